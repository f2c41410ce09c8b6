"""Losses of papers and tutorials: regression, classes, weights, masks, noise, embeddings, second derivatives."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.everyday.loop import ALL, MONITOR, PRIVATE, RECORD, ROWS, SCAN, USUAL, WATCH, Batch, Origin
from tests.everyday.pytorch_examples import labelled, mlp, vectors

losses = Origin("Losses of papers")


def regression() -> nn.Module:
    return mlp(4, 2)


def classifier() -> nn.Module:
    return mlp(4, 3)


# ---- regression ----


@losses("regression with a predicted variance (Gaussian NLL)", lambda: mlp(4, 4), vectors, front_ends=ALL)
def gaussian_nll(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    mean, log_var = model(x).chunk(2, dim=1)
    return F.gaussian_nll_loss(mean, y, log_var.exp())


class MultiTask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = mlp(4, 5), nn.Linear(5, 2), nn.Linear(5, 3)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).tanh()
        return self.one(h), self.two(h)


def two_tasks(size: int) -> tuple[Tensor, ...]:
    return torch.randn(size, 4), torch.randn(size, 2), torch.randint(3, (size,))


@losses("multi-task heads", MultiTask, two_tasks, front_ends=(*USUAL, PRIVATE))
def multi_task(model: nn.Module, batch: Batch) -> Tensor:
    x, y, labels = batch
    one, two = model(x)
    return F.mse_loss(one, y) + 0.3 * F.cross_entropy(two, labels)


def weighted_tasks(model: Any, batch: Batch) -> Tensor:
    x, y, labels = batch
    one, two = model(x)
    s = model.log_vars
    return torch.exp(-s[0]) * F.mse_loss(one, y) + torch.exp(-s[1]) * F.cross_entropy(two, labels)


@losses("multi-task with learned variances (Kendall)", MultiTask, two_tasks, own=weighted_tasks)
def kendall(model: Any, batch: Batch) -> Tensor:
    x, y, labels = batch
    one, two = model(x)
    loss = 0
    for s, own in zip(model.log_vars, (F.mse_loss(one, y), F.cross_entropy(two, labels)), strict=True):
        loss = loss + torch.exp(-s) * own + s
    return loss  # type: ignore[return-value]


class KendallInForward(MultiTask):
    def forward(self, x: Tensor, y: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        one, two = super().forward(x)
        precision = torch.exp(-self.log_vars)
        return precision[0] * F.mse_loss(one, y) + precision[1] * F.cross_entropy(two, labels) + self.log_vars.sum()


@losses(
    "multi-task with learned variances, loss in forward",
    KendallInForward,
    two_tasks,
    own=lambda model, batch: model(*batch) - model.log_vars.sum(),
)
def kendall_in_forward(model: nn.Module, batch: Batch) -> Tensor:
    return model(*batch)  # type: ignore[no-any-return]


@losses("quantile loss", lambda: mlp(4, 3), lambda size: (torch.randn(size, 4), torch.randn(size)), front_ends=ALL)
def quantile(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    pred, found = model(x), []
    for i, q in enumerate((0.1, 0.5, 0.9)):
        errors = y - pred[:, i]
        found.append(torch.max((q - 1) * errors, q * errors).unsqueeze(1))
    return torch.mean(torch.sum(torch.cat(found, dim=1), dim=1))


@losses("RMSE over the batch", regression, vectors, front_ends=(RECORD,), refused={"all": "linear|mixe"})
def rmse(model: nn.Module, batch: Batch) -> Tensor:
    return torch.sqrt(F.mse_loss(model(batch[0]), batch[1]))


@losses("log-cosh loss", regression, vectors, front_ends=(RECORD, WATCH))
def log_cosh(model: nn.Module, batch: Batch) -> Tensor:
    return torch.mean(torch.log(torch.cosh(model(batch[0]) - batch[1])))


# ---- classes ----


@losses("focal loss", classifier, labelled, front_ends=ALL)
def focal(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    ce = F.cross_entropy(model(x), y, reduction="none")
    return (0.25 * (1 - torch.exp(-ce)) ** 2 * ce).mean()


@losses("label smoothing", classifier, labelled, front_ends=ALL)
def label_smoothing(model: nn.Module, batch: Batch) -> Tensor:
    return nn.CrossEntropyLoss(label_smoothing=0.1)(model(batch[0]), batch[1])


WEIGHTS = torch.tensor([0.5, 2.0, 1.0]).double()


def sum_class_weights(batch: Batch) -> Tensor:
    return WEIGHTS[batch[1]].sum()


@losses(
    "class weights",
    classifier,
    labelled,
    count=sum_class_weights,
    front_ends=(RECORD, WATCH, MONITOR, PRIVATE, SCAN),
    refused={"private": "weight|mean over|average"},
)
def class_weights(model: nn.Module, batch: Batch) -> Tensor:
    return nn.CrossEntropyLoss(weight=WEIGHTS)(model(batch[0]), batch[1])


@losses("class weights by hand, normalised", classifier, labelled, count=sum_class_weights)
def class_weights_by_hand(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    w = WEIGHTS[y]
    return (F.cross_entropy(model(x), y, reduction="none") * w).sum() / w.sum()


@losses(
    "binary classes with pos_weight",
    lambda: mlp(4, 2),
    lambda size: (torch.randn(size, 4), torch.randint(2, (size, 2)).double()),
)
def pos_weight(model: nn.Module, batch: Batch) -> Tensor:
    return nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0, 3.0]))(model(batch[0]), batch[1])


@losses(
    "ignored labels",
    classifier,
    lambda size: (torch.randn(size, 4), torch.tensor([0, -100, 2, 1, -100])[:size]),
    count=lambda batch: (batch[1] != -100).sum(),
)
def ignored(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@losses(
    "sample weights, divided by their sum",
    regression,
    lambda size: (*vectors(size), torch.rand(size)),
    count=lambda batch: batch[2].sum(),
)
def importance_weights(model: nn.Module, batch: Batch) -> Tensor:
    x, y, w = batch
    return (F.mse_loss(model(x), y, reduction="none").mean(1) * w).sum() / w.sum()


@losses(
    "average of weighted losses (torch.average-like)",
    regression,
    lambda size: (*vectors(size), torch.rand(size)),
    count=lambda batch: batch[2].sum(),
    front_ends=(RECORD,),
)
def normalised_weights(model: nn.Module, batch: Batch) -> Tensor:
    x, y, w = batch
    per_sample = (model(x) - y).square().mean(dim=1)
    return torch.dot(per_sample, w / w.sum())


@losses(
    "mean of the unmasked entries by indexing",
    regression,
    lambda size: (*vectors(size), torch.rand(size, 2) < 0.7),
    count=lambda batch: batch[2].sum(),
)
def masked_by_index(model: nn.Module, batch: Batch) -> Tensor:
    x, y, mask = batch
    return F.mse_loss(model(x)[mask], y[mask])


def padded_words(size: int) -> tuple[Tensor, Tensor]:
    words = torch.tensor([[1, 2, 0], [3, 0, 0], [1, 1, 1], [2, 3, 0], [3, 2, 1]])[:size]
    return torch.randn(size, 3, 4), words


@losses(
    "smoothed targets, rows of padding filled with 0 by their positions",
    lambda: mlp(4, 4),
    padded_words,
    count=lambda batch: (batch[1] != 0).sum(),
    front_ends=(RECORD,),
)
def smoothed_targets(model: nn.Module, batch: Batch) -> Tensor:
    logits, words = model(batch[0]).log_softmax(dim=-1).view(-1, 4), batch[1].reshape(-1)
    smooth = torch.full_like(logits.detach(), 0.05).scatter_(1, words[:, None], 0.9)
    padding = torch.nonzero(words == 0)
    if padding.dim() > 0:
        smooth.index_fill_(0, padding.squeeze(1), 0.0)
    return F.kl_div(logits, smooth, reduction="sum") / (words != 0).sum()


def sequence_mask(size: int) -> tuple[Tensor, Tensor, Tensor]:
    mask = torch.arange(5) < torch.tensor([5 - n % 3 for n in range(size)])[:, None]
    return torch.randn(size, 5, 4), torch.randn(size, 5, 2), mask.double()


@losses(
    "masked regression on sequences, divided by the mask's sum",
    regression,
    sequence_mask,
    count=lambda batch: batch[2].sum(),
    front_ends=(RECORD, WATCH, MONITOR, SCAN),
)
def masked_loss(model: nn.Module, batch: Batch) -> Tensor:
    x, y, mask = batch
    loss = (model(x) - y).pow(2).mean(-1)
    return (loss * mask).sum() / mask.sum()


@losses(
    "masked loss, divided by the mask's sum plus epsilon",
    regression,
    sequence_mask,
    share=lambda model, sample, batch: (
        masked_loss_eps(model, sample) * (sample[2].sum() + 1e-8) / (batch[2].sum() + 1e-8)
    ),
    front_ends=(RECORD,),
)
def masked_loss_eps(model: nn.Module, batch: Batch) -> Tensor:
    x, y, mask = batch
    loss = F.l1_loss(model(x), y, reduction="none").mean(-1) * mask
    return loss.sum() / (mask.sum() + 1e-8)


@losses("masked loss, each sequence's own mean", regression, sequence_mask, front_ends=(RECORD, MONITOR, PRIVATE))
def masked_own_mean(model: nn.Module, batch: Batch) -> Tensor:
    x, y, mask = batch
    loss = (model(x) - y).pow(2).mean(-1)
    return ((loss * mask).sum(1) / mask.sum(1)).mean()


@losses(
    "packed sequences in an LSTM, padded targets ignored",
    lambda: PackedTagger(),
    lambda size: packed_text(size),
    count=lambda batch: (batch[2] != -100).sum(),
    front_ends=(RECORD,),
)
def packed_tags(model: nn.Module, batch: Batch) -> Tensor:
    tokens, lengths, tags = batch
    scores = model(tokens, lengths)
    return F.cross_entropy(scores.flatten(0, 1), tags[:, : scores.shape[1]].flatten(), ignore_index=-100)


class PackedTagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.out = nn.Embedding(11, 5), nn.LSTM(5, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        output, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.out(output)


def packed_text(size: int) -> tuple[Tensor, Tensor, Tensor]:
    lengths = torch.tensor([5 - n % 3 for n in range(size)])
    mask = torch.arange(5) < lengths[:, None]
    return torch.randint(11, (size, 5)), lengths, torch.randint(3, (size, 5)).where(mask, -100)


def lengths_as_list(size: int) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    x, y, mask = sequence_mask(size)
    return x, y, mask, mask.sum(1).int().tolist()


@losses(
    "sum over sequences, divided by the sum of a list of lengths",
    regression,
    lengths_as_list,
    share=lambda model, sample, batch: squares_of_tokens(model, sample).sum() / sum(batch[3]),
    take=lambda b, n: (b[0][n : n + 1], b[1][n : n + 1], b[2][n : n + 1], b[3][n : n + 1]),
)
def over_list_of_lengths(model: nn.Module, batch: Batch) -> Tensor:
    return squares_of_tokens(model, batch).sum() / sum(batch[3])


def squares_of_tokens(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0]) - batch[1]).pow(2).mean(-1) * batch[2]  # type: ignore[no-any-return]


@losses(
    "sum over sequences, divided by their length", regression, sequence_mask, sizes=(5, 3, 10), front_ends=(RECORD,)
)
def over_length(model: nn.Module, batch: Batch) -> Tensor:
    return squares_of_tokens(model, batch).sum() / batch[0].size(1)


# ---- penalties ----


def plain_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@losses(
    "L2 penalty on all weights",
    classifier,
    labelled,
    own=plain_loss,
    front_ends=(RECORD, MONITOR, PRIVATE),
    refused={"private": "penalty|not recorded"},
)
def l2_penalty(model: nn.Module, batch: Batch) -> Tensor:
    l2 = sum(p.pow(2.0).sum() for p in model.parameters())
    return plain_loss(model, batch) + 0.01 * l2


@losses("L1 penalty on one layer", classifier, labelled, own=plain_loss)
def l1_penalty(model: Any, batch: Batch) -> Tensor:
    return plain_loss(model, batch) + 0.01 * model[0].weight.abs().sum()


@losses("L2 penalty, norms of parameters", classifier, labelled, own=plain_loss, front_ends=(RECORD,))
def norm_penalty(model: Any, batch: Batch) -> Tensor:
    loss = plain_loss(model, batch)
    for p in model.parameters():
        loss += 0.01 * p.norm(2)
    return loss


@losses("orthogonality penalty", classifier, labelled, own=plain_loss, front_ends=(RECORD,))
def orthogonality(model: Any, batch: Batch) -> Tensor:
    w = model[0].weight
    return plain_loss(model, batch) + 0.1 * (w @ w.T - torch.eye(len(w))).norm().square()


START = mlp(4, 3).double().requires_grad_(False)


@losses("L2-SP: distance from the pretrained weights", classifier, labelled, own=plain_loss, front_ends=(RECORD,))
def l2_sp(model: nn.Module, batch: Batch) -> Tensor:
    apart = [F.mse_loss(p, q, reduction="sum") for p, q in zip(model.parameters(), START.parameters(), strict=True)]
    return plain_loss(model, batch) + 0.05 * torch.stack(apart).sum()


@losses("sparse autoencoder, L1 penalty on activations", lambda: SparseAutoencoder(), lambda size: torch.randn(size, 4))
def sparse_autoencoder(model: nn.Module, x: Tensor) -> Tensor:
    reconstruction, code = model(x)
    return F.mse_loss(reconstruction, x) + 0.1 * code.abs().sum(1).mean()


class SparseAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 7), nn.Linear(7, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = torch.relu(self.encoder(x))
        return self.decoder(code), code


# ---- noise ----


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.net(x + 0.3 * torch.randn_like(x)), x)


@losses("denoising autoencoder, loss in forward", Denoiser, lambda size: torch.randn(size, 4))
def denoising(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)  # type: ignore[no-any-return]


class Diffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.time = mlp(4, 4), nn.Embedding(10, 4)
        self.register_buffer("alphas", torch.linspace(0.99, 0.1, 10))

    def forward(self, x: Tensor) -> Tensor:
        t, noise = torch.randint(0, 10, (x.shape[0],)), torch.randn_like(x)
        alpha = self.get_buffer("alphas")[t][:, None]
        noisy = alpha.sqrt() * x + (1 - alpha).sqrt() * noise
        return F.mse_loss(self.net(noisy + self.time(t)), noise)


@losses("diffusion (DDPM), noise and time drawn in forward", Diffusion, lambda size: torch.randn(size, 4))
def diffusion(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)  # type: ignore[no-any-return]


@losses(
    "diffusion, noise drawn in the loop",
    lambda: NoisePredictor(),
    lambda size: torch.randn(size, 4),
    front_ends=(RECORD, WATCH, MONITOR),
)
def diffusion_in_loop(model: nn.Module, x: Tensor) -> Tensor:
    t, noise = torch.rand(len(x), 1), torch.randn_like(x)
    return F.mse_loss(model((1 - t) * x + t * noise, t), noise - x)  # flow matching


class NoisePredictor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(5, 4)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.net(torch.cat([x, t], 1))  # type: ignore[no-any-return]


# ---- teachers, attacks ----


class Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online = mlp(4, 3)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            for p, q in zip(self.target.parameters(), self.online.parameters(), strict=True):
                p.mul_(0.99).add_(q, alpha=0.01)
            teacher = self.target(x)
        return self.online(x), teacher


@losses("EMA teacher, updated in forward", Student, lambda size: torch.randn(size, 4))
def ema_teacher(model: nn.Module, x: Tensor) -> Tensor:
    student, teacher = model(x)
    return F.mse_loss(student, teacher) + 0.1 * student.square().mean()


@losses(
    "mean teacher, labelled and unlabelled samples in one call",
    classifier,
    lambda size: (torch.randn(size, 4), torch.randn(size, 4), torch.randint(3, (size,))),
    is_pair=True,
    options={"unit_reduction": "mean"},
    front_ends=(RECORD,),
)
def labelled_and_unlabelled(model: nn.Module, batch: Batch) -> Tensor:
    labelled_x, unlabelled_x, y = batch
    logits = model(torch.cat([labelled_x, unlabelled_x]))
    n = len(y)
    consistency = F.mse_loss(logits[n:].softmax(1), START(unlabelled_x).softmax(1))
    return F.cross_entropy(logits[:n], y) + 0.5 * consistency


@losses("FGSM adversarial training", classifier, labelled)
def fgsm(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    x = x.clone().requires_grad_(True)
    (grad,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
    adversarial = (x + 0.1 * grad.sign()).detach()
    return F.cross_entropy(model(adversarial), y)


@losses("FGSM by backward(), x.grad and zero_grad()", classifier, labelled, front_ends=(RECORD,))
def fgsm_by_backward(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch[0].clone().requires_grad_(), batch[1]
    F.cross_entropy(model(x), y).backward()
    assert x.grad is not None
    adversarial = (x + 0.1 * x.grad.sign()).detach()
    model.zero_grad()
    return F.cross_entropy(model(adversarial), y)


@losses("FGSM, clean and adversarial loss together", classifier, labelled, front_ends=(RECORD,))
def fgsm_both(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    delta = torch.zeros_like(x, requires_grad=True)
    (grad,) = torch.autograd.grad(F.cross_entropy(model(x + delta), y), delta)
    return 0.5 * F.cross_entropy(model(x), y) + 0.5 * F.cross_entropy(model(x + 0.1 * grad.sign()), y)


@losses("virtual adversarial noise by input gradients (PGD, 2 steps)", classifier, labelled, front_ends=(RECORD,))
def pgd(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    adversarial = x.detach()
    for _ in range(2):
        adversarial.requires_grad_()
        (grad,) = torch.autograd.grad(F.cross_entropy(model(adversarial), y, reduction="sum"), [adversarial])
        adversarial = (adversarial.detach() + 0.05 * grad.sign()).clamp(x - 0.1, x + 0.1)
    return F.cross_entropy(model(adversarial), y)


@losses("TRADES: sum of divergences, times beta over the batch size, beside a mean", classifier, labelled)
def trades(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    size = len(x)
    divergence = nn.KLDivLoss(reduction="sum")(F.log_softmax(model(x + 0.1), 1), F.softmax(model(x), 1))
    return F.cross_entropy(model(x), y) + 6 * (1.0 / size) * divergence


# ---- embeddings, sets ----


class Factorisation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(6, 3), nn.Embedding(7, 3)
        self.user_bias, self.item_bias = nn.Embedding(6, 1), nn.Embedding(7, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        dot = (self.user(user) * self.item(item)).sum(1)
        return dot + self.user_bias(user).squeeze(1) + self.item_bias(item).squeeze(1)


def ratings(size: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randint(6, (size,)), torch.randint(7, (size,)), torch.randn(size)


@losses("matrix factorisation with biases", Factorisation, ratings, front_ends=(RECORD, WATCH, MONITOR, PRIVATE))
def factorisation(model: nn.Module, batch: Batch) -> Tensor:
    user, item, rating = batch
    return F.mse_loss(model(user, item), rating)


@losses("BPR, positive and negative items", Factorisation, lambda size: (*ratings(size)[:2], torch.randint(7, (size,))))
def bpr(model: nn.Module, batch: Batch) -> Tensor:
    user, positive, negative = batch
    return -F.logsigmoid(model(user, positive) - model(user, negative)).mean()


@losses(
    "skip-gram with negative samples",
    lambda: SkipGram(),
    lambda size: (torch.randint(9, (size,)), torch.randint(9, (size,)), torch.randint(9, (size, 4))),
)
def skip_gram(model: Any, batch: Batch) -> Tensor:
    return -model(*batch).mean()


class SkipGram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.u, self.v = nn.Embedding(9, 4), nn.Embedding(9, 4)

    def forward(self, u: Tensor, v: Tensor, negative: Tensor) -> Tensor:
        centre = self.u(u)
        score = F.logsigmoid((centre * self.v(v)).sum(1))
        return score + F.logsigmoid(-torch.bmm(self.v(negative), centre.unsqueeze(2)).squeeze(2)).sum(1)


class DeepSet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phi, self.rho = mlp(4, 5), mlp(5, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.rho((self.phi(x) * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True))  # type: ignore[no-any-return]


@losses(
    "deep sets with padded sets",
    DeepSet,
    lambda size: (*sequence_mask(size)[::2], torch.randn(size, 2)),
    front_ends=(*USUAL, PRIVATE),
)
def deep_sets(model: nn.Module, batch: Batch) -> Tensor:
    x, mask, y = batch
    return F.mse_loss(model(x, mask), y)


class TwoTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.document = mlp(4, 3), mlp(4, 3)

    def forward(self, query: Tensor, document: Tensor) -> Tensor:
        return F.normalize(self.query(query), dim=1) @ F.normalize(self.document(document), dim=1).T


@losses(
    "two towers with in-batch negatives",
    TwoTower,
    lambda size: (torch.randn(size, 4), torch.randn(size, 4)),
    front_ends=(RECORD, MONITOR, PRIVATE),
    refused={"all": "mixe|combine"},
)
def two_tower(model: nn.Module, batch: Batch) -> Tensor:
    scores = model(*batch)
    return F.cross_entropy(scores / 0.1, torch.arange(len(scores)))


losses(
    "two towers with in-batch negatives, contributions asked for",
    TwoTower,
    lambda size: (torch.randn(size, 4), torch.randn(size, 4)),
    front_ends=(RECORD,),
    contributions=True,
    options={"coupled": "contributions"},
)(two_tower)


@losses(
    "SimCLR (NT-Xent)",
    classifier,
    lambda size: (torch.randn(size, 4), torch.randn(size, 4)),
    front_ends=(RECORD,),
    refused={"all": "mixe|combine"},
)
def simclr(model: nn.Module, batch: Batch) -> Tensor:
    z1, z2 = (F.normalize(model(x), dim=1) for x in batch)
    z = torch.cat([z1, z2])
    similarity = (z @ z.T / 0.5).masked_fill(torch.eye(len(z)).bool(), float("-inf"))
    n = len(z1)
    return F.cross_entropy(similarity, torch.cat([torch.arange(n) + n, torch.arange(n)]))


@losses(
    "DINO-like centring with the batch's mean",
    classifier,
    lambda size: (torch.randn(size, 4), torch.randn(size, 4)),
    front_ends=(RECORD,),
)
def centred_teacher(model: nn.Module, batch: Batch) -> Tensor:
    teacher = START(batch[1])
    targets = ((teacher - 0.3) / 0.1).softmax(1).detach()
    return torch.sum(-targets * F.log_softmax(model(batch[0]), dim=-1), dim=-1).mean()


# ---- second derivatives: the slow door ----


def points(size: int) -> tuple[Tensor, Tensor]:
    return torch.rand(size, 2), torch.rand(size, 2)


NEEDS_ROWS = {"record": r"persample\.rows"}


@losses("PINN: residual of the heat equation", lambda: mlp(2, 1), points, front_ends=(ROWS, RECORD), refused=NEEDS_ROWS)
def pinn(model: nn.Module, batch: Batch) -> Tensor:
    x = batch[0].clone().requires_grad_(True)
    u = model(x)
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 1].sum(), x, create_graph=True)
    residual = first[:, 0] - 0.1 * second[:, 1]
    return residual.square() + (model(batch[1]) - 1.0).square().squeeze(1)


@losses(
    "WGAN-GP: gradient penalty of the critic",
    lambda: mlp(4, 1),
    lambda size: (torch.randn(size, 4), torch.randn(size, 4)),
    front_ends=(ROWS, RECORD),
    refused=NEEDS_ROWS,
)
def wgan_gp(model: nn.Module, batch: Batch) -> Tensor:
    real, fake = batch
    alpha = torch.rand(len(real), 1)
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    (gradient,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
    return (model(fake) - model(real)).squeeze(1) + 10 * (gradient.norm(2, dim=1) - 1) ** 2


@losses("Hamiltonian network", lambda: mlp(2, 1), points, front_ends=(ROWS, RECORD), refused=NEEDS_ROWS)
def hamiltonian(model: nn.Module, batch: Batch) -> Tensor:
    x = batch[0].clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (torch.stack([gradient[:, 1], -gradient[:, 0]], 1) - batch[1]).square().mean(1)


@losses(
    "forces of an energy model",
    lambda: mlp(6, 1),
    lambda size: (torch.randn(size, 3, 2), torch.randn(size, 3, 2)),
    front_ends=(ROWS,),
)
def forces(model: nn.Module, batch: Batch) -> Tensor:
    positions = batch[0].clone().requires_grad_(True)
    energy = model(positions.flatten(1))
    (gradient,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
    return (-gradient - batch[1]).square().mean((1, 2)) + energy.squeeze(1).square()
