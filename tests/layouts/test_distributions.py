"""Losses by torch.distributions equal the loop: log-likelihoods, divergences, entropies, and reparametrised samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
from torch import Tensor, nn

from persample import record
from persample.testing.oracle import assert_rows_close, perturb, stack_gradients

B, K = 3, 4


def positive(h: Tensor) -> Tensor:
    return F.softplus(h) + 0.1


def unit(h: Tensor) -> Tensor:
    return 0.05 + 0.9 * h.sigmoid()


def lower(h: Tensor) -> Tensor:
    """A lower triangular matrix with a positive diagonal for each sample."""
    return torch.diag_embed(positive(h)) + torch.einsum("bi,bj->bij", h, h).tril(-1)


def covariance(h: Tensor) -> Tensor:
    return lower(h) @ lower(h).mT + torch.eye(K, dtype=h.dtype)


# Targets for the log-likelihoods: numbers, positive numbers, numbers in (0, 1), counts, bits, probabilities, ...
TARGETS: dict[str, Callable[[], Tensor]] = {
    "real": lambda: torch.randn(B, K, dtype=torch.float64),
    "positive": lambda: 0.2 + torch.rand(B, K, dtype=torch.float64),
    "above 1": lambda: 3 + torch.rand(B, K, dtype=torch.float64),
    "unit": lambda: 0.1 + 0.8 * torch.rand(B, K, dtype=torch.float64),
    "counts": lambda: torch.randint(0, 4, (B, K)).double(),
    "bits": lambda: torch.randint(0, 2, (B, K)).double(),
    "class": lambda: torch.randint(0, K, (B,)),
    "one hot": lambda: F.one_hot(torch.randint(0, K, (B,)), K).double(),
    "simplex": lambda: torch.rand(B, K, dtype=torch.float64).softmax(-1),
    "matrix": lambda: torch.linalg.inv(torch.eye(K).expand(B, K, K) + 0.1 * torch.rand(B, 1, 1)),
    "correlation": lambda: torch.linalg.cholesky(
        torch.eye(K, dtype=torch.float64).expand(B, K, K) + 0.1 * (1 - torch.eye(K, dtype=torch.float64))
    ),
    "one": lambda: 0.1 + 0.8 * torch.rand(B, dtype=torch.float64),
}  # fmt: skip

# A distribution made of two outputs of the model, and the kind of its targets.
DISTRIBUTIONS: dict[str, tuple[Callable[[Tensor, Tensor], D.Distribution], str]] = {
    "Bernoulli": (lambda a, b: D.Bernoulli(logits=a), "bits"),
    "Bernoulli, probs": (lambda a, b: D.Bernoulli(unit(a)), "bits"),
    "Beta": (lambda a, b: D.Beta(positive(a), positive(b)), "unit"),
    "Binomial": (lambda a, b: D.Binomial(5, logits=a), "counts"),
    "Categorical": (lambda a, b: D.Categorical(logits=a), "class"),
    "Categorical, probs": (lambda a, b: D.Categorical(positive(a)), "class"),
    "Cauchy": (lambda a, b: D.Cauchy(a, positive(b)), "real"),
    "Chi2": (lambda a, b: D.Chi2(positive(a)), "positive"),
    "ContinuousBernoulli": (lambda a, b: D.ContinuousBernoulli(unit(a)), "unit"),
    "Dirichlet": (lambda a, b: D.Dirichlet(positive(a)), "simplex"),
    "Exponential": (lambda a, b: D.Exponential(positive(a)), "positive"),
    "FisherSnedecor": (lambda a, b: D.FisherSnedecor(positive(a), positive(b)), "positive"),
    "Gamma": (lambda a, b: D.Gamma(positive(a), positive(b)), "positive"),
    "GeneralizedPareto": (lambda a, b: D.GeneralizedPareto(a, positive(b), unit(b)), "above 1"),
    "Geometric": (lambda a, b: D.Geometric(logits=a), "counts"),
    "Gumbel": (lambda a, b: D.Gumbel(a, positive(b)), "real"),
    "HalfCauchy": (lambda a, b: D.HalfCauchy(positive(a)), "positive"),
    "HalfNormal": (lambda a, b: D.HalfNormal(positive(a)), "positive"),
    "Independent": (lambda a, b: D.Independent(D.Normal(a, positive(b)), 1), "real"),
    "InverseGamma": (lambda a, b: D.InverseGamma(positive(a), positive(b)), "positive"),
    "Kumaraswamy": (lambda a, b: D.Kumaraswamy(positive(a), positive(b)), "unit"),
    "LKJCholesky": (lambda a, b: D.LKJCholesky(K, positive(a).mean(1)), "correlation"),
    "Laplace": (lambda a, b: D.Laplace(a, positive(b)), "real"),
    "LogNormal": (lambda a, b: D.LogNormal(a, positive(b)), "positive"),
    "LogisticNormal": (lambda a, b: D.LogisticNormal(a[:, 1:], positive(b[:, 1:])), "simplex"),
    "LowRankMultivariateNormal": (lambda a, b: D.LowRankMultivariateNormal(a, b[..., None], positive(b)), "real"),
    "MixtureSameFamily": (
        lambda a, b: D.MixtureSameFamily(D.Categorical(logits=a), D.Normal(b, positive(a))), "one",
    ),
    "Multinomial": (lambda a, b: D.Multinomial(1, logits=a), "one hot"),
    "MultivariateNormal": (lambda a, b: D.MultivariateNormal(a, covariance(b)), "real"),
    "MultivariateNormal, factor": (lambda a, b: D.MultivariateNormal(a, scale_tril=lower(b)), "real"),
    "MultivariateNormal, precision": (lambda a, b: D.MultivariateNormal(a, precision_matrix=covariance(b)), "real"),
    "NegativeBinomial": (lambda a, b: D.NegativeBinomial(positive(a), logits=b), "counts"),
    "Normal": (lambda a, b: D.Normal(a, positive(b)), "real"),
    "Normal, fixed scale": (lambda a, b: D.Normal(a, 1.0), "real"),
    "OneHotCategorical": (lambda a, b: D.OneHotCategorical(logits=a), "one hot"),
    "Pareto": (lambda a, b: D.Pareto(unit(a), positive(b)), "above 1"),
    "Poisson": (lambda a, b: D.Poisson(positive(a)), "counts"),
    "RelaxedBernoulli": (lambda a, b: D.RelaxedBernoulli(torch.tensor(0.7), logits=a), "unit"),
    "RelaxedOneHotCategorical": (lambda a, b: D.RelaxedOneHotCategorical(torch.tensor(0.7), logits=a), "simplex"),
    "StudentT": (lambda a, b: D.StudentT(3 + positive(a), b, positive(a)), "real"),
    "TransformedDistribution": (
        lambda a, b: D.TransformedDistribution(D.Normal(a, positive(b)), [D.TanhTransform()]), "unit",
    ),
    "Uniform": (lambda a, b: D.Uniform(a - 9, b + 9), "real"),
    "VonMises": (lambda a, b: D.VonMises(a, positive(b)), "real"),
    "Weibull": (lambda a, b: D.Weibull(positive(a), positive(b)), "positive"),
    "Wishart": (lambda a, b: D.Wishart(torch.tensor(K + 2.0, dtype=a.dtype), covariance(a)), "matrix"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def use_float64() -> Any:
    """GeneralizedPareto has a constant of the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


class Heads(nn.Module):
    """Two outputs, from which a loss is computed inside or outside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, K), nn.Linear(5, K)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


def check(compute_loss: Callable[[Tensor, Tensor, Tensor], Tensor], target: Tensor) -> None:
    """Compare recorded gradients with the loop; `compute_loss` gets two outputs and the targets."""
    model, x = Heads().double(), torch.randn(B, 5, dtype=torch.float64)
    perturb(model)
    losses = (compute_loss(*model(x[n : n + 1]), target[n : n + 1]) for n in range(B))
    expected = stack_gradients(losses, dict(model.named_parameters()))
    with record(model, loss_reduction="sum") as grads:
        compute_loss(*model(x), target).backward()
    found = grads.dense()
    assert_rows_close({name: found[name] for name in expected}, expected, 1e-8)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_log_likelihoods(name: str) -> None:
    torch.manual_seed(0)
    make, kind = DISTRIBUTIONS[name]
    if not hasattr(D, name.split(",")[0]):
        pytest.skip("this version of torch does not have it")
    check(lambda a, b, y: -make(a, b).log_prob(y).sum(), TARGETS[kind]())


def test_every_distribution_has_a_case() -> None:
    without_density = {"Distribution", "ExponentialFamily"}
    names = {
        name
        for name in D.__all__
        if isinstance(getattr(D, name), type) and issubclass(getattr(D, name), D.Distribution)
    }
    cases = {name.split(",")[0] for name in DISTRIBUTIONS}
    assert names - without_density - cases <= {"OneHotCategoricalStraightThrough"}


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "Normal": lambda a, b: (D.Normal(a, positive(b)), D.Normal(torch.zeros_like(a), torch.ones_like(a))),
    "Normal, prior of one row": lambda a, b: (D.Normal(a, positive(b)), D.Normal(torch.zeros(K), torch.ones(K))),
    "Categorical": lambda a, b: (D.Categorical(logits=a), D.Categorical(logits=b)),
    "Bernoulli": lambda a, b: (D.Bernoulli(logits=a), D.Bernoulli(logits=b)),
    "Beta": lambda a, b: (D.Beta(positive(a), positive(b)), D.Beta(positive(b), positive(a))),
    "Gamma": lambda a, b: (D.Gamma(positive(a), positive(b)), D.Gamma(positive(b), positive(a))),
    "Dirichlet": lambda a, b: (D.Dirichlet(positive(a)), D.Dirichlet(positive(b))),
    "Laplace": lambda a, b: (D.Laplace(a, positive(b)), D.Laplace(b, positive(a))),
    "MultivariateNormal": lambda a, b: (
        D.MultivariateNormal(a, covariance(b)), D.MultivariateNormal(b, covariance(a)),
    ),
    "Independent": lambda a, b: (
        D.Independent(D.Normal(a, positive(b)), 1), D.Independent(D.Normal(b, positive(a)), 1),
    ),
    "Poisson": lambda a, b: (D.Poisson(positive(a)), D.Poisson(positive(b))),
    "Exponential": lambda a, b: (D.Exponential(positive(a)), D.Exponential(positive(b))),
}  # fmt: skip


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences(name: str) -> None:
    torch.manual_seed(0)
    check(lambda a, b, y: D.kl_divergence(*DIVERGENCES[name](a, b)).sum(), torch.zeros(B))


@pytest.mark.parametrize(
    "name", ["Bernoulli", "Beta", "Categorical", "Dirichlet", "Gamma", "Laplace", "Normal", "StudentT"]
)
def test_entropies(name: str) -> None:
    torch.manual_seed(0)
    check(lambda a, b, y: -DISTRIBUTIONS[name][0](a, b).entropy().sum(), torch.zeros(B))


def test_reparametrised_samples() -> None:
    """The noise is drawn once for the batch; the loop gets the rows of the same noise."""
    torch.manual_seed(0)
    noise = torch.randn(B, K, dtype=torch.float64)
    check(lambda a, b, y: D.Normal(a, positive(b)).log_prob(a.detach() + y).sum(), noise)
    model = Heads().double()
    with record(model, loss_reduction="sum") as grads:
        a, b = model(torch.randn(B, 5, dtype=torch.float64))
        D.Normal(a, positive(b)).rsample().square().sum().backward()
    assert grads.norms().all()
