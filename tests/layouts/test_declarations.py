"""Declared functions in a model: the gradients equal the loop, and nothing is tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributions as d

from persample import SamplesMixed, record
from persample.layouts import MEMO
from persample.testing import assert_rows_close, loop_gradients

B, D = 3, 4
pytestmark = pytest.mark.filterwarnings("ignore:To copy construct", "ignore:reduction")

Forward = Callable[[Tensor, Tensor], Tensor]  # of h = linear(x), and x


def make(*shape: int) -> Tensor:
    """Constants without a dimension of the batch size."""
    return torch.linspace(-1.0, 1.3, torch.Size(shape).numel()).double().sin().view(shape) + 0.1


class Model(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(D, D)
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x), x)


def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return (out * out.conj()).real.sum() if out.is_complex() else out.square().sum()


def run(model: nn.Module, x: Tensor) -> Any:
    MEMO.clear()
    with record(model, loss_reduction="sum") as grads:
        compute_loss(model, x).backward()
    return grads


def positive(h: Tensor) -> Tensor:
    return F.softplus(h) + 0.5


def square(h: Tensor) -> Tensor:
    """A well-conditioned matrix for each sample."""
    return torch.eye(2).to(h) * 3 + h.view(-1, 2, 2)


FUNCTIONS: dict[str, Forward] = {
    # ---- pointwise ----
    "real": lambda h, x: torch.polar(h.exp(), h).real,
    "frexp": lambda h, x: torch.frexp(h)[0],
    "special": lambda h, x: torch.special.erfcx(h) + torch.special.xlog1py(h, positive(h)),
    "masked_fill, broadcast": lambda h, x: h.masked_fill(torch.tensor([True, False, False, True]), 0.5),
    "index_fill": lambda h, x: h.index_fill(1, torch.tensor([0, 2]), 0.5),
    "bucketize": lambda h, x: h * torch.bucketize(x, torch.linspace(-1, 1, 5).double()),
    "searchsorted": lambda h, x: h * torch.searchsorted(torch.linspace(-1, 1, 5).double(), x),
    "isin": lambda h, x: h * torch.isin(x.round(), torch.tensor([0.0, 1.0]).double()),
    "vander": lambda h, x: torch.linalg.vander(h, N=3),
    "view of another dtype": lambda h, x: h * x.view(torch.int64).sign(),
    "as_tensor": lambda h, x: torch.as_tensor(h),
    "one_hot": lambda h, x: h * F.one_hot(x.argmax(1), 4),
    # ---- along dims ----
    "quantile": lambda h, x: torch.quantile(h, 0.3, dim=1),
    "quantiles": lambda h, x: torch.quantile(h, torch.tensor([0.2, 0.6]).double(), dim=1).transpose(0, 1),
    "renorm": lambda h, x: h.renorm(2, 0, 0.1),
    "diff": lambda h, x: h.diff(dim=1),
    "trapezoid": lambda h, x: torch.trapezoid(h, make(4).cumsum(0), dim=1),
    "trapezoid of samples": lambda h, x: torch.trapezoid(h, x.cumsum(1), dim=1),
    "cumulative_trapezoid": lambda h, x: torch.cumulative_trapezoid(h, dim=1),
    "gradient": lambda h, x: torch.gradient(h, dim=1)[0],
    "kthvalue": lambda h, x: h.kthvalue(2, 1).values,
    "fftn of the last dims": lambda h, x: torch.fft.fftn(h.view(-1, 2, 2), s=(2, 2)),
    "hfft2": lambda h, x: torch.fft.hfft2(torch.complex(h, h).view(-1, 2, 2)),
    "fftshift": lambda h, x: torch.fft.fftshift(h, 1),
    "stft": lambda h, x: torch.stft(h.repeat(1, 4), 8, window=make(8), return_complex=True),
    "istft": lambda h, x: torch.istft(
        torch.stft(h.repeat(1, 4), 8, window=torch.ones(8).double(), return_complex=True),
        8,
        window=torch.ones(8).double(),
    ),
    "cross": lambda h, x: torch.linalg.cross(h[:, :3], x[:, 1:]),
    "vecdot": lambda h, x: torch.linalg.vecdot(h, x),
    "pairwise_distance": lambda h, x: F.pairwise_distance(h, x, keepdim=True),
    "cosine_similarity": lambda h, x: F.cosine_similarity(h[:, None], make(5, D), dim=-1),
    "matrix_norm": lambda h, x: torch.linalg.matrix_norm(h.view(-1, 2, 2)),
    "msort": lambda h, x: torch.msort(h.t()).t(),
    "nanmean": lambda h, x: h.nanmean(1),
    # ---- products ----
    "kron": lambda h, x: torch.kron(h, make(1, 2)),
    "kron on the right": lambda h, x: torch.kron(make(2, 2), h).unflatten(0, (2, -1)).transpose(0, 1),
    "tensordot": lambda h, x: torch.tensordot(h.view(-1, 2, 2), make(2, 2, 3), 2),
    "tensordot of dims": lambda h, x: torch.tensordot(make(2, 5), h.view(-1, 2, 2), ([0], [1])).transpose(0, 1),
    "inner": lambda h, x: torch.inner(h, make(5, D)),
    "multi_dot": lambda h, x: torch.linalg.multi_dot([h, make(D, 5), make(5, 2)]),
    "multi_dot of vectors": lambda h, x: h * torch.linalg.multi_dot([make(5), make(5, 2), make(2)]),
    "diagonal by einsum": lambda h, x: torch.einsum("bii->bi", h.view(-1, 2, 2)),
    "trace by einsum": lambda h, x: torch.einsum("bii", h.view(-1, 2, 2)),
    "baddbmm, broadcast": lambda h, x: torch.baddbmm(make(1, 2, 1), h.view(-1, 2, 2), x.view(-1, 2, 2)),
    "__rmatmul__": lambda h, x: Tensor.__rmatmul__(make(D, 5), h),
    "bilinear": lambda h, x: F.bilinear(h, x, make(5, D, D), make(5)),
    # ---- tensors by keyword ----
    "linear by keyword": lambda h, x: F.linear(bias=make(5), weight=make(5, D), input=h),
    "matmul by keyword": lambda h, x: torch.matmul(other=make(D, 5), input=h),
    "addmm by keyword": lambda h, x: torch.addmm(mat2=make(D, 5), input=make(5), mat1=h),
    "where by keyword": lambda h, x: torch.where(other=make(D), condition=x > 0, input=h),
    "attention by keyword": lambda h, x: F.scaled_dot_product_attention(
        value=h[:, None], key=x[:, None], query=h[:, None]
    ),
    "conv by keyword": lambda h, x: torch.conv1d(weight=make(2, 1, 3), input=h[:, None], bias=make(2)),
    "layer_norm by keyword": lambda h, x: F.layer_norm(bias=make(D), weight=make(D), input=h, normalized_shape=(D,)),
    # ---- matrices ----
    "solve": lambda h, x: torch.linalg.solve(square(h), x.view(-1, 2, 2)),
    "solve for vectors": lambda h, x: torch.linalg.solve(square(h), x[:, :2]),
    "solve for columns": lambda h, x: torch.linalg.solve(make(D, D) + 3 * torch.eye(D).double(), h.t()).t(),
    "solve_triangular": lambda h, x: torch.linalg.solve_triangular(square(h).tril(), x.view(-1, 2, 2), upper=False),
    "cholesky_solve": lambda h, x: torch.cholesky_solve(
        x.view(-1, 2, 2), torch.linalg.cholesky(square(h) @ square(h).mT)
    ),
    "lu_solve": lambda h, x: torch.linalg.lu_solve(*torch.linalg.lu_factor(square(h)), x.view(-1, 2, 2)),
    "lu_unpack": lambda h, x: torch.lu_unpack(*torch.linalg.lu_factor(square(h)))[2],
    "pinv": lambda h, x: torch.linalg.pinv(square(h)),
    # ---- shapes ----
    "diag_embed": lambda h, x: torch.diag_embed(h),
    "select_scatter": lambda h, x: h.select_scatter(x[:, 0], 1, 2),
    "select_scatter of samples": lambda h, x: torch.zeros(len(h), 5).to(h).select_scatter(h[:, 0], 1, 2),
    "slice_scatter": lambda h, x: h.slice_scatter(x[:, :2], 1, 1, 3),
    "pad": lambda h, x: F.pad(h, (1, 2), value=0.5),
    "pad of samples": lambda h, x: F.pad(h, (0, 0, 1, 2))[1:-2],
    "crop of padded samples": lambda h, x: F.pad(F.pad(h, (0, 0, 1, 1)), (0, 0, -1, -1)),
    "rot90": lambda h, x: h.view(-1, 2, 2).rot90(1, (1, 2)),
    "meshgrid": lambda h, x: h * torch.meshgrid(make(2), make(2), indexing="xy")[0].flatten(),
    "unsafe_chunk": lambda h, x: torch.unsafe_chunk(h, 2, 1)[1],
    "pixel_shuffle": lambda h, x: F.pixel_shuffle(h.view(-1, 4, 1, 1), 2),
    "new with samples": lambda h, x: h * x.new_tensor(x),
    # ---- layers ----
    "fold of unfold": lambda h, x: F.fold(F.unfold(h.view(-1, 1, 2, 2), 2, padding=1), (2, 2), 2, padding=1),
    "grid_sample": lambda h, x: F.grid_sample(
        make(1, 2, 4, 4).expand(len(h), -1, -1, -1), h.view(-1, 1, 2, 2).tanh(), align_corners=False
    ),
    "affine_grid": lambda h, x: F.affine_grid(
        h.repeat(1, 2)[:, :6].view(-1, 2, 3), [len(h), 1, 2, 2], align_corners=False
    ),
    "group_norm of vectors": lambda h, x: F.group_norm(h, 2, make(D), make(D)),
    "instance_norm": lambda h, x: F.instance_norm(h.view(-1, 2, 2), weight=make(2)),
    "local_response_norm": lambda h, x: F.local_response_norm(h.view(-1, 2, 2), 2),
    "max_unpool": lambda h, x: F.max_unpool1d(*F.max_pool1d(h[:, None], 2, return_indices=True), 2),
    "lp_pool": lambda h, x: F.lp_pool1d(positive(h)[:, None], 2, 2),
    "adaptive_max_pool with indices": lambda h, x: F.adaptive_max_pool1d(h[:, None], 2, return_indices=True)[0],
    "convolution of a group for each sample": lambda h, x: F.conv1d(
        h[None], make(2, 1, 3).repeat(len(h), 1, 1), groups=len(h)
    ).view(len(h), 2, 2),
    "dynamic convolution": lambda h, x: F.conv1d(x[None], h[:, None, :3], groups=len(h))[0],
    "conv_tbc": lambda h, x: torch.conv_tbc(h.t().contiguous().unsqueeze(-1), make(2, 1, 3), make(3)).transpose(0, 1),
    "interpolate": lambda h, x: F.interpolate(h[:, None], scale_factor=2, mode="linear"),
    "rnn_cell": lambda h, x: torch.rnn_tanh_cell(h, x, make(5, D)[:D], make(D, D), None, None),
    "lstm_cell": lambda h, x: torch.lstm_cell(h, (x, x), make(16, D), make(16, D), make(16), make(16))[1],
    "attention with fewer keys": lambda h, x: F.scaled_dot_product_attention(
        h.view(-1, 4, 1, 1), x.view(-1, 2, 2, 1), x.view(-1, 2, 2, 1), enable_gqa=True
    ),
    "attention of each row": lambda h, x: F.scaled_dot_product_attention(h, make(5, D), make(5, 2)),
    "multi_head_attention": lambda h, x: F.multi_head_attention_forward(
        *(h.view(-1, 2, 2).transpose(0, 1),) * 3, 2, 1, make(6, 2), make(6), None, None, False, 0.0, make(2, 2), make(2)
    )[0].transpose(0, 1),
    "embedding_bag with weights": lambda h, x: F.embedding_bag(
        x.abs().mul(2).long().clamp(max=4), make(5, 2), mode="sum", per_sample_weights=h
    ),
}

LOSSES: dict[str, Callable[[Tensor, Tensor, str], Tensor]] = {
    "mse": lambda h, x, r: F.mse_loss(h, x, reduction=r),
    "l1": lambda h, x, r: F.l1_loss(h, x, reduction=r),
    "huber": lambda h, x, r: F.huber_loss(h, x, reduction=r),
    "smooth l1": lambda h, x, r: F.smooth_l1_loss(h, x, reduction=r),
    "binary": lambda h, x, r: F.binary_cross_entropy(h.sigmoid(), x.sigmoid(), weight=positive(make(D)), reduction=r),
    "binary with logits": lambda h, x, r: F.binary_cross_entropy_with_logits(
        h, x.sigmoid(), weight=positive(make(D)), pos_weight=positive(make(D)), reduction=r
    ),
    "probabilities": lambda h, x, r: F.cross_entropy(h, x.softmax(1), reduction=r),
    "weighted probabilities": lambda h, x, r: F.cross_entropy(h, x.softmax(1), weight=positive(make(D)), reduction=r),
    "classes": lambda h, x, r: F.cross_entropy(h, x.argmax(1), label_smoothing=0.1, reduction=r),
    "classes of pixels": lambda h, x, r: F.cross_entropy(
        h.view(-1, 2, 2), x[:, :2].sign().long().clamp(min=0), reduction=r
    ),
    "nll": lambda h, x, r: F.nll_loss(h.log_softmax(1), x.argmax(1), reduction=r),
    "poisson": lambda h, x, r: F.poisson_nll_loss(h, x.exp(), reduction=r),
    "gaussian": lambda h, x, r: F.gaussian_nll_loss(h, x, positive(x), reduction=r),
    "hinge": lambda h, x, r: F.hinge_embedding_loss(h, x.sign(), reduction=r),
    "ranking": lambda h, x, r: F.margin_ranking_loss(h[:, 0], h[:, 1], x[:, 0].sign(), reduction=r),
    "soft margin": lambda h, x, r: F.soft_margin_loss(h, x.sign(), reduction=r),
    "multi margin": lambda h, x, r: F.multi_margin_loss(h, x.argmax(1), weight=positive(make(D)), reduction=r),
    "multilabel margin": lambda h, x, r: F.multilabel_margin_loss(h, x.argsort(1), reduction=r),
    "multilabel soft margin": lambda h, x, r: F.multilabel_soft_margin_loss(h, x.sign().clamp(min=0), reduction=r),
    "cosine": lambda h, x, r: F.cosine_embedding_loss(h, x, x[:, 0].sign(), reduction=r),
    "triplet": lambda h, x, r: F.triplet_margin_loss(h, x, x.flip(1), margin=9.0, reduction=r),
    "kl": lambda h, x, r: F.kl_div(h.log_softmax(1), x.softmax(1), reduction="batchmean" if r == "mean" else r),
    "ctc": lambda h, x, r: F.ctc_loss(
        h.log_softmax(1).expand(5, -1, -1), x.argsort(1)[:, :2].clamp(min=1), [5] * len(h), [2] * len(h), reduction=r
    ),
}


def check_gradients(model: nn.Module, loss: Callable[..., Tensor], reduction: str = "sum") -> None:
    """Compare with the loop in float64; nothing may be tried."""
    MEMO.clear()
    torch.manual_seed(1)
    model, x = model.double(), torch.randn(B, D).double()
    with record(model, loss_reduction=reduction) as grads:
        loss(model, x).backward()
    assert not grads.explain().tried
    assert_rows_close(grads.dense(), loop_gradients(model, x, loss), 1e-8)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_equal_the_loop_without_a_trial(name: str) -> None:
    check_gradients(Model(FUNCTIONS[name]), compute_loss)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_equal_the_loop_without_a_trial(name: str, reduction: str) -> None:
    def compute(model: nn.Module, x: Tensor) -> Tensor:
        return LOSSES[name](model(x), x, reduction).sum()

    check_gradients(Model(lambda h, x: h), compute, "mean" if reduction == "mean" else "sum")


DISTRIBUTIONS: dict[str, Callable[[Tensor], d.Distribution]] = {
    "Normal": lambda h: d.Normal(h, positive(h)),
    "Laplace": lambda h: d.Laplace(h, positive(h)),
    "Cauchy": lambda h: d.Cauchy(h, 1.0),
    "StudentT": lambda h: d.StudentT(positive(h) + 2, h, 1.0),
    "Beta": lambda h: d.Beta(positive(h), positive(h)),
    "Gamma": lambda h: d.Gamma(positive(h), positive(h)),
    "Dirichlet": lambda h: d.Dirichlet(positive(h)),
    "Weibull": lambda h: d.Weibull(positive(h), 1.5),
    "Exponential": lambda h: d.Exponential(positive(h)),
    "Pareto": lambda h: d.Pareto(positive(h), positive(h)),
    "MultivariateNormal": lambda h: d.MultivariateNormal(h, torch.eye(D).to(h)),
    "MultivariateNormal by factors": lambda h: d.MultivariateNormal(h, scale_tril=torch.diag_embed(positive(h))),
    "LowRankMultivariateNormal": lambda h: d.LowRankMultivariateNormal(h, make(D, 2), positive(make(D))),
    "mixture": lambda h: d.MixtureSameFamily(d.Categorical(torch.ones(len(h), D).to(h)), d.Normal(h, 1.0)),
    "transformed": lambda h: d.TransformedDistribution(d.Normal(h, 1.0), [d.SigmoidTransform()]),
    "Categorical": lambda h: d.Categorical(logits=h),
    "Multinomial": lambda h: d.Multinomial(5, logits=h),
    "Geometric": lambda h: d.Geometric(logits=h),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions_are_followed_without_a_trial(name: str) -> None:
    def forward(h: Tensor, x: Tensor) -> Tensor:
        distribution = DISTRIBUTIONS[name](h)
        return -distribution.log_prob(distribution.sample())

    torch.manual_seed(1)
    grads = run(Model(forward).double(), torch.randn(B, D).double())
    assert not grads.explain().tried and (grads.norms() > 0).all()


MIXING: dict[str, Forward] = {
    "histc": lambda h, x: h * torch.histc(x, 4),
    "bincount": lambda h, x: h * torch.bincount(x.argmax(1), minlength=4),
    "cov": lambda h, x: h @ torch.cov(x.t()),
    "quantile over samples": lambda h, x: h - x.quantile(0.5, dim=0),
    "renorm over samples": lambda h, x: h * x.renorm(2, 1, 0.1),
    "diff over samples": lambda h, x: h[1:] * x.diff(dim=0),
    "fftn of all dims": lambda h, x: torch.fft.fftn(h),
    "fftn of the dims before": lambda h, x: torch.fft.fftn(h.view(-1, 2, 2), s=(3, 2, 2)),
    "kron of samples": lambda h, x: torch.kron(h, x),
    "tensordot over samples": lambda h, x: h @ torch.tensordot(x, x, ([0], [0])),
    "matrix of samples": lambda h, x: torch.linalg.pinv(h),
    "solve with rows of samples": lambda h, x: torch.linalg.solve(torch.eye(len(h)).to(h) * 2 + 0.1, h),
    "cdist of samples": lambda h, x: torch.cdist(h, x),
    "cross entropy of samples as classes": lambda h, x: F.cross_entropy(
        h.t(), torch.tensor([0, 1, 2, 0]), reduction="none"
    ),
    "weighted classes": lambda h, x: F.cross_entropy(h, x.argmax(1), weight=positive(make(D))),
    "convolution over samples as channels": lambda h, x: F.conv1d(h[None], make(2, len(h), 3)),
    "stft over samples": lambda h, x: torch.stft(h.t().repeat(1, 4), 4, return_complex=True).abs(),
    "view of another dtype": lambda h, x: h * x.t().contiguous().view(torch.int32).float().mean(),
    "a new tensor of a mean": lambda h, x: h - x.new_tensor(x.mean(0)),
    "circular padding of samples": lambda h, x: F.pad(h.t()[None], (1, 1), mode="circular"),
    "multinomial of samples": lambda h, x: h * torch.multinomial(x.t().exp(), 2).sum(),
}


@pytest.mark.parametrize("name", MIXING)
def test_functions_that_mix_samples_are_refused(name: str) -> None:
    with pytest.raises(SamplesMixed):
        run(Model(MIXING[name]).double(), torch.randn(B, D).double())


# ---- loose rows ----


LOOSE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "pointwise": lambda p, q: p.tanh() * q.exp() + 2,
    "linear": lambda p, q: F.linear(p, make(5, D), make(5)),
    "softmax": lambda p, q: p.softmax(1),
    "norm": lambda p, q: F.layer_norm(p, (D,), make(D)),
    "attention": lambda p, q: F.scaled_dot_product_attention(p.view(-1, 2, 2), q.view(-1, 2, 2), q.view(-1, 2, 2)),
    "embedding": lambda p, q: p * F.embedding(q.argmax(1), make(D, D)),
    "constants for all rows": lambda p, q: p * make(D) + make(1, D),
    "sort within rows": lambda p, q: p.sort(1).values,
    "convolution": lambda p, q: F.conv1d(p[:, None], make(2, 1, 3)),
}


def select(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mask = x[:, :2] > -0.3  # some rows of each sample
    return mask, torch.stack([h, -h], 1)[mask], torch.stack([x, 2 * x], 1)[mask]


@pytest.mark.parametrize("name", LOOSE)
def test_functions_of_loose_rows_equal_the_loop_without_a_trial(name: str) -> None:
    check_gradients(Model(lambda h, x: LOOSE[name](*select(h, x)[1:])), compute_loss)


LOOSE_MIXING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "constants that differ": lambda p, q: p * torch.arange(len(p))[:, None],
    "products with constants that differ": lambda p, q: torch.bmm(p.view(-1, 2, 2), torch.rand(len(p), 2, 2).double()),
    "triu": lambda p, q: p.triu(),
    "cumsum": lambda p, q: p.cumsum(0),
    "targets that differ": lambda p, q: F.cross_entropy(p, torch.arange(len(p)) % D, reduction="none"),
    "a write to the first rows": lambda p, q: (p := p.clone(), p[1:].zero_())[0],
    "a write to each second row": lambda p, q: (p := p.clone(), p[::2].mul_(2))[0],
    "attention across rows": lambda p, q: F.scaled_dot_product_attention(p[None], p[None], p[None]),
}


@pytest.mark.parametrize("name", LOOSE_MIXING)
def test_loose_rows_are_not_used_by_position(name: str) -> None:
    torch.manual_seed(1)
    with pytest.raises(SamplesMixed):
        run(Model(lambda h, x: LOOSE_MIXING[name](*select(h, x)[1:])).double(), torch.randn(B, D).double())
