"""Everything inside a block that uses the parameters is recorded: methods, parts, several models, no call at all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import persample
from persample import PerSampleError, record, watch
from persample._internal.state import ModuleState
from persample.errors import SamplesMixed

B, D, T = 5, 3, 4

Batch = tuple[Tensor, ...]


class Case:
    """A model, the samples, and a training step: `step(model, samples)` returns the losses, a mean over the samples."""

    def __init__(self, make: Callable[[], Any], samples: Callable[[int], Batch], step: Callable[..., Any]) -> None:
        self.make, self.samples, self.step = make, samples, step


def perturb(models: Any) -> Any:
    for model in list_models(models):
        model.double()
        for p in model.parameters():
            p.data += 0.3 * torch.randn_like(p)
    return models


def list_models(models: Any) -> list[nn.Module]:
    if isinstance(models, nn.Module):
        return [models]
    return list(models.values() if isinstance(models, dict) else models)


def name_parameters(models: Any) -> dict[str, Tensor]:
    if isinstance(models, nn.Module):
        return dict(models.named_parameters())
    items = models.items() if isinstance(models, dict) else enumerate(models)
    found: dict[str, Tensor] = {}
    for name, model in items:
        for own, p in model.named_parameters():
            if not any(p is other for other in found.values()):
                found[f"{name}.{own}"] = p
    return found


def run_steps(step: Callable[..., Any], models: Any, samples: Batch) -> None:
    """A step is a generator of losses or returns one; each has its own backward pass."""
    losses = step(models, *samples)
    for loss in [losses] if isinstance(losses, Tensor) else losses:
        loss.backward()


def compute_rows(case: Case, models: Any, samples: Batch) -> dict[str, Tensor]:
    """The rows by a loop over the samples, each as a batch of one."""

    named = name_parameters(models)
    rows: dict[str, list[Tensor]] = {name: [] for name in named}
    for n in range(len(samples[0])):
        run_steps(case.step, models, tuple(t[n : n + 1] for t in samples))
        for name, p in named.items():
            rows[name].append(torch.zeros_like(p) if p.grad is None else p.grad)
            p.grad = None
    return {name: torch.stack(parts) for name, parts in rows.items()}


def floats(*shapes: tuple[int, ...]) -> Callable[[int], Batch]:
    return lambda batch: tuple(torch.randn(batch, *shape, dtype=torch.float64) for shape in shapes)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(4 * D, D), nn.Linear(D, 4 * D)
        self.scale = nn.Parameter(torch.randn(D))

    def encode(self, x: Tensor) -> Tensor:
        return self.down(x).tanh() * self.scale

    def decode(self, z: Tensor) -> Tensor:
        return F.linear(z, self.up.weight, self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.mu, self.var = nn.Linear(4 * D, 6), nn.Linear(6, D), nn.Linear(6, D)
        self.fc3, self.fc4 = nn.Linear(D, 6), nn.Linear(6, 4 * D)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(self.fc1(x))
        return self.mu(h), self.var(h)

    def decode(self, z: Tensor) -> Tensor:
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))


def step_vae(model: VAE, image: Tensor, noise: Tensor) -> Tensor:
    x = image.view(-1, 4 * D)
    mu, var = model.encode(x)
    out = model.decode(mu + (0.5 * var).exp() * noise)
    kl = -0.5 * torch.sum(1 + var - mu.pow(2) - var.exp())
    return (F.binary_cross_entropy(out, x.sigmoid(), reduction="sum") + kl) / len(x)


class Raw(nn.Module):
    """Has no submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(2, D)), nn.Parameter(torch.randn(2))

    def score(self, x: Tensor) -> Tensor:
        return F.linear((x - 0.1) / 2, self.w, self.b)

    def transform(self, x: Tensor) -> Tensor:
        return x @ (self.w.t() * 2)


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.encoder = nn.Embedding(7, D), nn.GRU(D, 6, batch_first=True)
        self.decoder, self.head = nn.GRUCell(D, 6), nn.Linear(6, 7)


def step_seq2seq(model: Seq2Seq, source: Tensor, target: Tensor) -> Tensor:
    _, h = model.encoder(model.embedding(source))
    h, losses = h[0], []
    token = torch.zeros(len(source), dtype=torch.long)
    for t in range(target.shape[1]):
        h = model.decoder(model.embedding(token), h)
        losses.append(F.cross_entropy(model.head(h), target[:, t]))
        token = target[:, t]
    return torch.stack(losses).sum()


class Lightning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Sequential(nn.Linear(D, 6), nn.Tanh()), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))

    def training_step(self, batch: Batch, i: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(self.encoder(x)), y)


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(D, 6), nn.Linear(6, 2), nn.Linear(6, 1)

    def act(self, state: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(self.body(state))
        return self.actor(h).log_softmax(-1), self.critic(h).squeeze(-1)


def compute_actor_critic(log_probs: Tensor, value: Tensor, action: Tensor, returns: Tensor) -> Tensor:
    chosen = log_probs.gather(1, action[:, None]).squeeze(1)
    return (-chosen * (returns - value.detach()) + F.smooth_l1_loss(value, returns, reduction="none")).mean()


def step_two_models(models: dict[str, nn.Module], state: Tensor, action: Tensor, returns: Tensor) -> Tensor:
    log_probs = models["actor"](state).log_softmax(-1)
    return compute_actor_critic(log_probs, models["critic"](state).squeeze(-1), action, returns)


def make_actions(batch: int) -> Batch:
    return *floats((D,))(batch), torch.randint(2, (batch,)), *floats(())(batch)


def make_gan() -> list[nn.Module]:
    generator = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, D))
    return [generator, nn.Sequential(nn.Linear(D, 6), nn.LeakyReLU(0.2), nn.Linear(6, 1))]


def step_gan(models: list[nn.Module], real: Tensor, z: Tensor) -> Any:
    """As in DCGAN: the discriminator's two losses, then the generator's through the discriminator."""
    generator, discriminator = models
    label = torch.full((len(real),), 1.0, dtype=torch.float64)
    yield F.binary_cross_entropy_with_logits(discriminator(real).view(-1), label)
    fake = generator(z)
    label.fill_(0.0)
    yield F.binary_cross_entropy_with_logits(discriminator(fake.detach()).view(-1), label)
    label.fill_(1.0)
    yield F.binary_cross_entropy_with_logits(discriminator(fake).view(-1), label)


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.rnn, self.decoder = nn.Embedding(7, D), nn.LSTM(D, 6, 2, batch_first=True), nn.Linear(6, 7)


def step_language_model(model: LanguageModel, tokens: Tensor, h: Tensor, c: Tensor) -> Tensor:
    state = (h.transpose(0, 1).contiguous(), c.transpose(0, 1).contiguous())
    losses = []
    for part in tokens.split(3, dim=1):  # truncated: the state of the last part is detached
        state = tuple(s.detach() for s in state)
        out, state = model.rnn(model.encoder(part[:, :-1]), state)
        losses.append(F.cross_entropy(model.decoder(out).transpose(1, 2), part[:, 1:]))
    return sum(losses)


def make_pairs(batch: int) -> Batch:
    return *floats((D,), (D,))(batch), torch.randint(2, (batch,)).double()


def step_siamese(encoder: nn.Module, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    one, other = (encoder[2](encoder[1](encoder[0](t))) for t in (a, b))
    distance = F.pairwise_distance(one, other)
    return (y * distance.square() + (1 - y) * F.relu(2 - distance).square()).mean()


def step_teacher(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Targets of a frozen copy, of the model itself, and of the model in another mode, before and between the calls."""
    with torch.no_grad():
        model[0](torch.randn(7, D).double())  # an evaluation of other data
        target = model[2](model[0](y))
    out = model[2](model[0](x))
    with torch.no_grad():
        other = model(y + 1)
        model[0](torch.randn(7, D).double())
    return ((out - target).square().sum(1) + other.sum(1) * out.sum(1)).mean()


def tokens_and_states(batch: int) -> Batch:
    return torch.randint(7, (batch, 6)), *floats((2, 6), (2, 6))(batch)


def make_sequences(batch: int) -> Batch:
    return torch.randint(7, (batch, T)), torch.randint(7, (batch, 3))


def make_classes(batch: int) -> Batch:
    return *floats((D,))(batch), torch.randint(2, (batch,))


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, 2))


def step_dict(m: nn.ModuleDict, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m["head"](m["body"](x).relu()), y)


def step_list(m: nn.ModuleList, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m[1](m[0](x).relu()), y)


def step_raw_derived(m: Raw, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.transform(x) + m.b, y)


def step_keywords(m: nn.ModuleDict, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(input=m["head"](input=m["body"](input=x)), target=y)


class Tagger(nn.Module):
    """A conditional random field: looks up rows of its parameters by the tags of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.emit, self.moves, self.first = (
            nn.Linear(D, 3),
            nn.Parameter(torch.randn(3, 3)),
            nn.Parameter(torch.randn(3)),
        )

    def compute_nll(self, x: Tensor, tags: Tensor) -> Tensor:
        scores = self.emit(x)
        total, own = self.first + scores[:, 0], self.first[tags[:, 0]] + scores[torch.arange(len(x)), 0, tags[:, 0]]
        for i in range(1, tags.shape[1]):
            total = (total.unsqueeze(2) + self.moves + scores[:, i].unsqueeze(1)).logsumexp(1)
            own = own + self.moves[tags[:, i - 1], tags[:, i]] + scores[:, i].gather(1, tags[:, i : i + 1]).squeeze(1)
        return (total.logsumexp(1) - own).mean()


def make_tags(batch: int) -> Batch:
    return *floats((T, D))(batch), torch.randint(3, (batch, T))


def make_tied() -> list[nn.Module]:
    one, other = nn.Linear(D, D), nn.Sequential(nn.Linear(D, D), nn.Linear(D, 2))
    other[0].weight = one.weight
    return [one, other]


CASES = {
    "methods": Case(Autoencoder, floats((4 * D,)), lambda m, x: F.mse_loss(m.decode(m.encode(x)), x)),
    "forward": Case(Autoencoder, floats((4 * D,)), lambda m, x: F.mse_loss(m.forward(x), x)),
    "calls and methods": Case(
        Autoencoder, floats((4 * D,)), lambda m, x: (m(x) - m.decode(2 * m.encode(x))).square().sum(1).mean()
    ),
    "VAE": Case(VAE, floats((2, 2 * D), (D,)), step_vae),
    "raw parameters": Case(Raw, make_classes, lambda m, x, y: F.cross_entropy(m.score(x), y)),
    "raw derived weights": Case(Raw, make_classes, step_raw_derived),
    "dict": Case(lambda: nn.ModuleDict({"body": nn.Linear(D, 6), "head": nn.Linear(6, 2)}), make_classes, step_dict),
    "keywords": Case(
        lambda: nn.ModuleDict({"body": nn.Linear(D, 6), "head": nn.Linear(6, 2)}), make_classes, step_keywords
    ),
    "list": Case(lambda: nn.ModuleList([nn.Linear(D, 6), nn.Linear(6, 2)]), make_classes, step_list),
    "seq2seq": Case(Seq2Seq, make_sequences, step_seq2seq),
    "Lightning": Case(Lightning, make_classes, lambda m, x, y: m.training_step((x, y), 0)),
    "actor-critic, one module": Case(
        ActorCritic, make_actions, lambda m, s, a, r: compute_actor_critic(*m.act(s), a, r)
    ),
    "actor-critic, two modules": Case(
        lambda: {"actor": two_layers(), "critic": nn.Linear(D, 1)}, make_actions, step_two_models
    ),
    "GAN": Case(make_gan, floats((D,), (2,)), step_gan),
    "tied models": Case(make_tied, make_classes, lambda m, x, y: F.cross_entropy(m[1](m[0](x).tanh()), y)),
    "conditional random field": Case(Tagger, make_tags, lambda m, x, tags: m.compute_nll(x, tags)),
    "language model": Case(LanguageModel, tokens_and_states, step_language_model),
    "siamese": Case(two_layers, make_pairs, step_siamese),
    "triplet": Case(
        two_layers,
        floats((D,), (D,), (D,)),
        lambda m, a, p, n: F.triplet_margin_loss(*[m[2](m[0](t)) for t in (a, p, n)]),
    ),
    "no_grad": Case(two_layers, floats((D,), (D,)), step_teacher),
}


def compare(grads: Any, rows: dict[str, Tensor]) -> None:
    found = grads.dense()
    assert found.keys() == rows.keys()
    for name, part in rows.items():
        torch.testing.assert_close(found[name], part)


@pytest.mark.parametrize("name", CASES)
def test_rows_equal_a_loop(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    models = perturb(case.make())
    for batch in (B, T, D, 2, 1, B):  # also as large as other dimensions
        samples = case.samples(batch)
        rows = compute_rows(case, models, samples)
        with record(models) as grads:
            run_steps(case.step, models, samples)
        compare(grads, rows)
        keep = "everything" if name == "GAN" else "norms"  # which allows one backward pass
        with record(models, samples=samples, keep=keep, keep_grad=True) as norms:
            run_steps(case.step, models, samples)
        torch.testing.assert_close(norms.norms(), grads.norms())
        for key, p in name_parameters(models).items():
            torch.testing.assert_close(p.grad, rows[key].mean(0))
            p.grad = None
    for model in list_models(models):
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


# ---- beside hooks of the user ----


def test_hooks_of_the_user_on_parts_stay_in_their_order() -> None:
    """They change the arguments by name and by position, and one is added and one removed in the block."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D)), torch.randn(B, D)
    model.append(copy.copy(model[0]))  # has the same dicts of hooks
    removed = model[1].register_forward_pre_hook(lambda module, args: (2 * args[0],))
    kept = model[1].register_forward_pre_hook(lambda module, args, kwargs: (args, kwargs), with_kwargs=True)

    def step() -> Tensor:
        return model[2](model[1](input=model[0](x))).square().sum()

    with pytest.raises(IndexError):  # the hook gets no arguments by position
        step()
    with record(model, loss_reduction="sum") as grads:
        removed.remove()
        added = model[1].register_forward_pre_hook(
            lambda module, args, kwargs: ((), {"input": 3 * kwargs["input"]}), with_kwargs=True, prepend=True
        )
        loss = step()
        loss.backward()
    assert [*model[1]._forward_pre_hooks] == [added.id, kept.id]
    assert model[1]._forward_pre_hooks_with_kwargs.keys() == {added.id, kept.id}
    assert not model[0]._forward_pre_hooks and not model[0]._forward_pre_hooks_with_kwargs
    torch.testing.assert_close(step(), loss)
    step().backward()
    for name, total in grads.sum().items():
        torch.testing.assert_close(total, model.get_parameter(name).grad)


@pytest.mark.parametrize("is_freed", [True, False])
def test_parts_that_are_replaced_in_the_block(is_freed: bool) -> None:
    """The hook of a part that has left the model is removed, too."""
    model, x = nn.Sequential(nn.Linear(D, D), nn.Sequential(nn.Tanh(), nn.Linear(D, D))), torch.randn(B, D)
    part = None if is_freed else model[1]
    with record(model, loss_reduction="sum") as grads:
        model[1] = nn.Identity()
        model[1](model[0](x)).square().sum().backward()
    assert part is None or not any(each._forward_pre_hooks for each in part.modules())
    torch.testing.assert_close(grads.sum()["0.bias"], 2 * model[0](x).sum(0))


# ---- where the batch is ----


class Words(nn.Module):
    """Adds positions to words, by modules or by the weights themselves."""

    def __init__(self, is_raw: bool) -> None:
        super().__init__()
        self.words, self.positions, self.head = nn.Embedding(7, D), nn.Embedding(9, D), nn.Linear(D, 2)
        self.is_raw = is_raw

    def look_up(self, table: nn.Module, ids: Tensor) -> Tensor:
        return F.embedding(ids, table.weight) if self.is_raw else table(ids)


def compute_words(model: Words, x: Tensor, y: Tensor, places: Tensor | None, positions_first: bool) -> Tensor:
    places = torch.arange(x.shape[1]) if places is None else places
    parts = [(model.words, x), (model.positions, places)]
    found = [model.look_up(*part) for part in (reversed(parts) if positions_first else parts)]
    return F.cross_entropy(model.head((found[0] + found[1]).mean(1)), y)


@pytest.mark.parametrize("positions_first", [True, False])
@pytest.mark.parametrize("is_raw", [True, False])
def test_a_call_that_may_have_samples_or_not(is_raw: bool, positions_first: bool) -> None:
    torch.manual_seed(0)
    model = perturb(Words(is_raw))
    x, y, places = torch.randint(7, (B, T)), torch.randint(2, (B,)), torch.arange(T)

    def step(model: Words, x: Tensor, y: Tensor, given: Tensor | None = None) -> Tensor:
        return compute_words(model, x, y, given, positions_first)

    rows = compute_rows(Case(lambda: None, floats(), step), model, (x, y))
    for given, options in (
        (None, {}),
        (places, {"samples": x}),
        (places, {"samples": {"x": [x], "y": y}}),
        (places, {"batch_size": B}),
        (places, {"constants": places}),
    ):
        with record(model, **options) as grads:
            step(model, x, y, given).backward()
        compare(grads, rows)
    message = r"ambiguous in a call of .* (4|5) samples, as .* or (4|5) samples\?"
    with pytest.raises(PerSampleError, match=message), record(model):
        step(model, x, y, places).backward()
    x, y = x[:T], y[:T]  # as many positions as samples
    with record(model, constants=places) as grads:
        step(model, x, y, places).backward()
    assert len(grads) == T


def test_two_arguments_of_different_sizes_are_refused() -> None:
    model = nn.ModuleDict({"pair": nn.Bilinear(D, D, 2)}).double()
    x, other = torch.randn(B, D).double(), torch.randn(T, D).double()
    with pytest.raises(PerSampleError, match="ambiguous"), record(model):
        model["pair"](x, other)
    message = r"ambiguous in a call of bilinear with weights.* 4 samples, or 5 samples"
    with pytest.raises(PerSampleError, match=message), record(model):
        F.bilinear(x, other, model["pair"].weight)


def test_samples_that_do_not_fit_are_refused() -> None:
    model = nn.Linear(D, 2)
    wrong = torch.ones(5, D), torch.ones(4)
    with pytest.raises(PerSampleError, match="different sizes"), record(model, samples=wrong):
        pass
    with (
        pytest.raises(PerSampleError, match="4 samples in a recording that has one of 5"),
        record(model, samples=torch.ones(5, D)),
    ):
        model(torch.ones(4, D))
    assert not model._forward_pre_hooks


def test_a_batch_of_other_data_is_refused() -> None:
    models = perturb(make_gan())
    with pytest.raises(PerSampleError, match="7 samples in a recording that has one of 5"), record(models):
        models[0](torch.randn(B, 2).double())
        models[1](torch.randn(7, D).double())
    with (
        pytest.raises(PerSampleError, match=r"ambiguous.* 5 samples, as in the first call.* 7 samples"),
        record(models),
    ):
        models[0][0](torch.randn(B, 2).double())
        models[1][0](torch.randn(7, D).double())


def test_noise_that_is_drawn_in_the_block() -> None:
    torch.manual_seed(0)
    models, vae = perturb(make_gan()), perturb(VAE())
    for draw in (lambda: torch.randn(B, 2).double() * 2, lambda: torch.empty(B, 2).double().normal_()):
        torch.manual_seed(1)
        z = draw()
        rows = compute_rows(Case(make_gan, floats(), lambda m, z: F.softplus(-m[1](m[0](z))).mean()), models, (z,))
        torch.manual_seed(1)
        with record(models) as grads:
            F.softplus(-models[1](models[0](draw()))).mean().backward()
        compare(grads, rows)
    with record(vae) as grads:
        vae.decode(torch.randn(B, D).double()).square().sum(1).mean().backward()
    assert (grads.norms() > 0).all() and grads.loss_reduction == "mean"


def test_packed_sequences_of_a_part() -> None:
    torch.manual_seed(0)
    model = perturb(nn.ModuleDict({"rnn": nn.LSTM(D, 6, batch_first=True), "head": nn.Linear(6, 2)}))
    lengths = torch.tensor([3, 1, 4, 2, 4])

    def step(model: nn.ModuleDict, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return F.cross_entropy(model["head"](model["rnn"](packed)[1][0][-1]), y)

    samples = (*floats((T, D))(B), lengths, torch.randint(2, (B,)))
    with record(model) as grads:
        step(model, *samples).backward()
    compare(grads, compute_rows(Case(lambda: None, floats(), step), model, samples))


def test_verification_of_parts() -> None:
    model = perturb(Autoencoder())
    x = torch.randn(B, 4 * D).double()
    with record(model) as grads:
        model.decode(model.encode(x)).square().mean().backward()
    assert "verified" in grads.verification
    message = "only calls of modules can be verified"
    with pytest.raises(PerSampleError, match=message), record(model, verify="always"):
        model.decode(x[:, :D])
    raw = perturb(Raw())
    with record(raw) as grads:
        raw.score(torch.randn(B, D).double()).sum().backward()
    assert grads.verification.startswith("not verified: weights are used outside")


def test_parts_that_mix_samples_are_refused() -> None:
    raw = perturb(Raw())
    x = torch.randn(B, D).double()
    with pytest.raises(SamplesMixed), record(raw):
        raw.score(x - x.mean(0)).sum().backward()
    with pytest.raises(SamplesMixed), record(raw):
        raw.score(x).softmax(0)[0].sum().backward()


# ---- gradients inside a block ----


def step_fgsm(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
    return F.cross_entropy(model((x + 0.1 * slope.sign()).detach()), y)


def step_attack_on_parts(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(model[2](model[0](x)), y), x)
    return F.cross_entropy(model[2](model[0]((x + 0.1 * slope.sign()).detach())), y)


def step_weighted_by_slope(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    return (F.cross_entropy(out, y, reduction="none") * (1 + slope.norm(dim=1))).mean()


@pytest.mark.parametrize("step", [step_fgsm, step_attack_on_parts, step_weighted_by_slope])
def test_gradients_of_inputs_beside_a_recording(step: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model = perturb(two_layers())
    for batch in (B, D):
        samples = make_classes(batch)
        with record(model) as grads:
            step(model, *samples).backward()
        compare(grads, compute_rows(Case(two_layers, floats(), step), model, samples))


def test_autograd_grad_of_parameters_says_what_to_call() -> None:
    model = two_layers()
    for options, advice in (({}, r"Call backward\(\).*grads.mean\(\)"), ({"create_graph": True}, "persample.rows")):
        message = f"gradient of '0.weight' and 3 other parameters.*{advice}"
        with pytest.raises(PerSampleError, match=message), record(model):
            torch.autograd.grad(model(torch.ones(B, D)).sum(), list(model.parameters()), **options)


# ---- other front ends ----


@pytest.mark.parametrize(
    "name", ["methods", "forward", "VAE", "dict", "seq2seq", "siamese", "triplet", "language model"]
)
@pytest.mark.parametrize("options", [{}, {"keep": "norms"}], ids=str)
def test_watched_parts(name: str, options: dict[str, Any]) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    models, found = perturb(case.make()), []
    batches = [case.samples(batch) for batch in (B, T, B)]
    expected = [compute_rows(case, models, samples) for samples in batches]
    with watch(models, found.append, options):
        for samples, rows in zip(batches, expected, strict=True):
            run_steps(case.step, models, samples)
            norms = torch.cat([part.flatten(1) for part in rows.values()], 1).norm(dim=1)
            torch.testing.assert_close(found.pop().norms(), norms)


def test_several_models_are_watched_and_monitored() -> None:
    case = CASES["actor-critic, two modules"]
    torch.manual_seed(0)
    models, found = perturb(case.make()), []
    batches = [case.samples(batch) for batch in (B, T)]
    expected = [compute_rows(case, models, samples) for samples in batches]
    with watch(models, found.append):
        for samples in batches:
            run_steps(case.step, models, samples)
    for grads, rows in zip(found, expected, strict=True):
        compare(grads, rows)
    with persample.monitor(models, every=1) as watching:
        for samples in batches:
            run_steps(case.step, models, samples)
    for measured, rows in zip(watching.history, expected, strict=True):
        norms = torch.cat([part.flatten(1) for part in rows.values()], 1).norm(dim=1)
        assert measured.norms["most"] == pytest.approx(float(norms.max()))
    assert not any(part._forward_pre_hooks for model in models.values() for part in model.modules())


def test_what_is_no_model_is_refused() -> None:
    for wrong, message in (
        ([], "list or dict of them"),
        (3, "got int"),
        ([nn.Linear(2, 2), 3], "got int as '1'"),
        ({"a.b": nn.Linear(2, 2)}, "cannot be named 'a.b'"),
    ):
        with pytest.raises(PerSampleError, match=message), record(wrong):
            pass


# ---- weights beside tensors that are no batch ----


def compute_distance(model: nn.Module, before: dict[str, Tensor]) -> Tensor:
    terms = [F.mse_loss(p, before[name]) + (p - before[name]).square().sum() for name, p in model.named_parameters()]
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())
    return sum(terms)


@pytest.mark.parametrize("is_first", [True, False])
def test_pretrained_weights_are_no_samples(is_first: bool) -> None:
    """Also if as many rows of them as samples."""
    torch.manual_seed(0)
    model = perturb(two_layers())
    before = {name: p.detach() + 1 for name, p in model.named_parameters()}
    for batch in (B, 7):
        x, y = make_classes(batch)

        def step(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(m[2](m[0](x).tanh()), y)

        with record(model) as grads:
            distance = compute_distance(model, before) if is_first else None
            loss = step(model, x, y)
            (loss + (compute_distance(model, before) if distance is None else distance)).backward()
        compare(grads, compute_rows(Case(two_layers, floats(), step), model, (x, y)))
        shared = torch.autograd.grad(compute_distance(model, before), list(model.parameters()))
        for found, expected in zip(grads.shared().values(), shared, strict=True):
            torch.testing.assert_close(found, expected)


def test_the_state_of_a_model_does_not_hold_the_recording() -> None:
    """It would be restored after the extra passes of a verification."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), 2)
    plain = ModuleState(model)
    with record(model):
        inside = ModuleState(model)
    hooks = 10 * sum(1 for _ in model.modules())  # the dicts of hooks, with what is in them
    assert len(inside._undo) <= len(plain._undo) + hooks
    contents = [undo.args[1] for undo in inside._undo]  # type: ignore[attr-defined]
    assert any(isinstance(content, dict) and "training" in content for content in contents)
    assert not any(isinstance(content, dict) and "collector" in content for content in contents)
