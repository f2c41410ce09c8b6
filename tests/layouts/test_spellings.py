"""All spellings of an operator are followed alike, and weights that are broadcast against samples stay weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn
from torch.overrides import resolve_name

from persample import record
from persample._internal.facts import _SYNONYMS, facts, find_functions
from persample._internal.functions import is_inplace
from persample.rules.registry import get_rules
from persample.testing.oracle import assert_rows_close, loop_gradients, perturb

D = 4

REDUCED: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.divide": lambda losses: torch.divide(losses.sum(), len(losses)),
    "torch.true_divide": lambda losses: torch.true_divide(losses.sum(), len(losses)),
    "divide": lambda losses: losses.sum().divide(len(losses)),
    "divide_": lambda losses: losses.sum().divide_(len(losses)),
    "multiply": lambda losses: torch.multiply(losses.mean(), 1.5),
    "multiply_": lambda losses: losses.mean().multiply_(1.5),
    "subtract": lambda losses: torch.subtract(losses.sum(), 2.0),
    "subtract of two": lambda losses: losses.sum().subtract((losses * 0.3).sum()),
    "rsub": lambda losses: torch.negative(torch.rsub(losses.sum(), 1.0)),
    "positive": lambda losses: torch.positive(losses.sum()),
    "linalg.matmul": lambda losses: torch.linalg.matmul(torch.ones_like(losses).detach(), losses),
    "__rmatmul__": lambda losses: Tensor.__rmatmul__(losses, torch.ones_like(losses).detach()),
    "row_stack with a constant": lambda losses: torch.row_stack([losses, torch.ones(1, len(losses))]).square().sum(),
    "as_strided_": lambda losses: losses.clone().as_strided_((1, len(losses)), (1, 1)).square().sum(),
}


@pytest.mark.parametrize("name", REDUCED)
def test_aliases_of_linear_functions_of_a_loss(name: str) -> None:
    model = nn.Linear(3, 2).double()
    perturb(model)
    x = torch.randn(5, 3).double()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return REDUCED[name](model(x).square().sum(1))

    with record(model) as grads:
        loss(model, x).backward()
    assert_rows_close(grads.dense(), loop_gradients(model, x, loss))


@pytest.mark.parametrize(
    "add_up", [torch.sum, torch.nansum, lambda h: torch.linalg.matmul(torch.ones(5 * 2).double(), h)]
)
def test_aliases_beside_a_learned_factor(add_up: Callable[[Tensor], Tensor]) -> None:
    model = InForward(distributions.Normal).double()
    perturb(model)

    def loss(model: Any, x: Tensor) -> Tensor:
        return model.scale.sum().exp() * add_up(model.mean(x)[:, :2].square().flatten())

    x = torch.randn(5, 3).double()
    with record(model) as grads:
        loss(model, x).backward()
    rows = loop_gradients(model, x, lambda model, x: model.scale.sum().exp() * model.mean(x)[:, :2].square().sum())
    assert_rows_close(grads.dense(), rows)


def list_functions_of_two() -> list[Any]:
    found = find_functions("add", "sub", "mul", "div", "matmul", "mm")
    return [function for function in (*found, torch.linalg.matmul) if not is_inplace(function)]


@pytest.mark.parametrize("weight_first", [False, True])
@pytest.mark.parametrize("function", list_functions_of_two(), ids=resolve_name)
def test_spellings_of_functions_with_rules(function: Any, weight_first: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.weight = nn.Linear(D, D), nn.Parameter(torch.rand(D, D) + 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            if facts(function).operator == "mm":
                return function(h, self.weight) if not weight_first else function(self.weight, h.T).T  # type: ignore[no-any-return]
            h = h[:, None].tanh() + torch.eye(D).double()
            return function(self.weight, h) if weight_first else function(h, self.weight)  # type: ignore[no-any-return]

    model = Model().double()
    x = torch.randn(3, D).double()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().sum()

    with record(model) as grads:
        loss(model, x).backward()
    assert_rows_close(grads.dense(), loop_gradients(model, x, loss))
    assert get_rules(function)


def test_a_sum_in_a_divisor_is_refused_in_all_spellings() -> None:
    for function in (torch.divide, torch.true_divide, Tensor.__rtruediv__):
        model = nn.Linear(3, 1)
        with pytest.raises(Exception, match="is not linear in that sum"), record(model) as grads:
            total = model(torch.randn(5, 3)).square().sum()
            args = (total, 2.0) if function is Tensor.__rtruediv__ else (torch.tensor(2.0), total)
            function(*args).backward()
        assert len(grads) == 5


@pytest.mark.parametrize("name", sorted(_SYNONYMS))
def test_synonyms_compute_the_same(name: str) -> None:
    a, b = torch.rand(3, 3), torch.rand(3, 3)
    arguments: dict[str, tuple[Any, ...]] = {
        "cat": ((a, b),), "vstack": ((a, b),), "outer": (a[0], b[0]), "clamp": (a, 0.3, 0.6), "movedim": (a, 0, 1),
        "transpose": (a, 0, 1),
    }  # fmt: skip
    args = arguments.get(name, (a, b) if name in "atan2 div ge gt le lt mul ne sub".split() else (a,))
    found = [getattr(torch, each) for each in _SYNONYMS[name] if hasattr(torch, each)]
    assert found
    assert all(f in find_functions(name) for f in found)
    expected = getattr(torch, "positive" if name == "pos" else name)(*args)
    torch.testing.assert_close([f(*args) for f in found], [expected] * len(found), rtol=0, atol=0, equal_nan=True)


class Policy(nn.Module):
    """A policy with a learned deviation that all samples share."""

    def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.mean, self.scale, self.make = nn.Linear(3, D), nn.Parameter(torch.rand(D)), make

    def forward(self, x: Tensor) -> Tensor:
        return self.mean(x)  # type: ignore[no-any-return]

    def distribution(self, mean: Tensor) -> Any:
        return self.make(mean, self.scale.exp())


class InForward(Policy):
    def forward(self, x: Tensor, a: Tensor) -> Tensor:  # type: ignore[override]
        return self.distribution(self.mean(x)).log_prob(a)  # type: ignore[no-any-return]


DISTRIBUTIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "normal": distributions.Normal,
    "scale from samples, mean a weight": lambda mean, scale: distributions.Normal(scale, F.softplus(mean)),
    "laplace": distributions.Laplace,
    "student": lambda mean, scale: distributions.StudentT(3.0, mean, scale),
    "student with learned degrees": lambda mean, scale: distributions.StudentT(scale + 2, mean, scale),
    "gumbel": distributions.Gumbel,
    "independent": lambda mean, scale: distributions.Independent(distributions.Normal(mean, scale), 1),
    "multivariate": lambda mean, scale: distributions.MultivariateNormal(mean, torch.diag(scale)),
    "multivariate by its factor": lambda mean, scale: distributions.MultivariateNormal(
        mean, scale_tril=torch.diag(scale)
    ),
}


@pytest.mark.parametrize("batch", [1, 3, D])
@pytest.mark.parametrize("cls", [Policy, InForward])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions_with_learned_parameters(name: str, cls: type[Policy], batch: int) -> None:
    torch.manual_seed(0)
    model = cls(DISTRIBUTIONS[name]).double()
    perturb(model)
    data = torch.randn(batch, 3).double(), torch.randn(batch, D).double()

    def loss(model: Any, data: Any) -> Tensor:
        x, a = data
        found = model(x, a) if cls is InForward else model.distribution(model(x)).log_prob(a)
        return -found.flatten(1).sum(1).mean() if found.dim() > 1 else -found.mean()

    with record(model) as grads:
        loss(model, data).backward()
    assert_rows_close(grads.dense(), loop_gradients(model, data, loss))


@pytest.mark.parametrize("batch", [1, 3, D])
@pytest.mark.parametrize("weight_first", [False, True])
def test_broadcast_tensors_with_a_weight(weight_first: bool, batch: int) -> None:
    class Model(Policy):
        def forward(self, x: Tensor) -> Tensor:
            pair = [self.scale, self.mean(x)] if weight_first else [self.mean(x), self.scale]
            a, b = torch.broadcast_tensors(*pair)
            return torch.cat([a, a * b], 1).tanh()

    model = Model(distributions.Normal).double()
    perturb(model)
    x = torch.randn(batch, 3).double()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().sum()

    with record(model) as grads:
        loss(model, x).backward()
    assert_rows_close(grads.dense(), loop_gradients(model, x, loss))
