"""Each part of a key is needed: without it, a call gets the effect of another one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import PerSampleError, record
from persample.forward import program, repeats
from persample.layouts import MEMO, call
from persample.testing import assert_rows_close, loop_gradients

pytestmark = pytest.mark.quick

B, T, D = 3, 4, 5
SHAPE = (D,)

Function = Callable[[Any, Tensor], Tensor]
Key = tuple[Any, ...]


class Model(nn.Module):
    """A layer, and then a function of the layer's result that a test chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)
        self.matrix = nn.Parameter(torch.randn(D, D))
        self.vector = nn.Parameter(torch.randn(D))
        self.register_buffer("constant", torch.randn(D, D))
        self.function: Function = lambda model, h: h

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.first(x))


@dataclass
class Variant:
    """The calls of a pass; `refused`: they mix samples, or cannot be followed."""

    function: Function
    shape: tuple[int, ...] = (B, T, D)
    refused: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Tensor], Tensor] = lambda x: x
    freezes: bool = False

    def check(self, model: Model) -> None:
        def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
            out = model(x).square()
            return out.flatten(1).sum(1).sum() if out.dim() > 1 else out.sum()

        model.function = self.function
        model.first.requires_grad_(not self.freezes)
        x = self.prepare(torch.randn(self.shape, dtype=torch.float64))
        if self.refused:
            with pytest.raises(PerSampleError), record(model, verify=False, **self.options):
                model(x).square().sum().backward()
            return
        with record(model, verify=False, **self.options) as grads:
            compute_loss(model, x).backward()
        rows = grads.dense()
        expected = loop_gradients(model, x, compute_loss)
        assert_rows_close({name: rows[name] for name in expected}, expected)


def pick(h: Tensor) -> Tensor:
    """The samples in another order, for which there is no key without sizes."""
    return h[[0, 2, 1]] if len(h) == B else h


def use_norm(eps: float, change: Callable[[Tensor], Tensor]) -> Function:
    return lambda m, h: F.layer_norm(change(h), (D,), m.vector, None, eps)


def normalise_by_root(number: float) -> Function:
    """Each pass computes the argument anew."""
    return lambda m, h: torch.layer_norm(h.sin(), SHAPE, m.vector, None, math.sqrt(number))


def drop_values(fields: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(each for each in fields if isinstance(each, type))


def drop_types(fields: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(each for each in fields if not isinstance(each, type))


def drop_names(fields: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(each for each in fields if not isinstance(each, str))


# ---- keys without sizes: (function, fields, numbers, tensors ...) ----

WITHOUT_SIZES: dict[str, tuple[Callable[[Key], Key], list[Variant]]] = {
    "function": (
        lambda key: key[1:],
        [Variant(lambda m, h: F.linear(h, m.matrix)), Variant(lambda m, h: torch.matmul(h, m.matrix))],
    ),
    "values": (
        lambda key: (key[0], drop_values(key[1]), *key[2:]),
        [Variant(lambda m, h: h.softmax(1)), Variant(lambda m, h: h.softmax(0), refused=True)],
    ),
    "names": (
        lambda key: (key[0], drop_names(key[1]), *key[2:]),
        [
            Variant(lambda m, h: torch.sub(input=h, other=m.vector)),
            Variant(lambda m, h: torch.sub(other=h, input=m.vector)),
        ],
    ),
    "numbers beside parameters": (
        lambda key: (*key[:2], *key[3:]),
        [Variant(use_norm(1e-5, torch.sin)), Variant(use_norm(0.5, torch.sin))],
    ),
    "layout": (
        lambda key: (*key[:3], *[t if t[0] in (None, "parameter") else t[1:] for t in key[3:]]),
        [
            Variant(lambda m, h: h.softmax(1), (B, B, D)),
            Variant(lambda m, h: h.softmax(1), (B, B, D), refused=True, options={"batch_dim": 1}),
        ],
    ),
    "dimensions": (
        lambda key: (*key[:3], *[(t[0], *t[2:]) for t in key[3:]]),
        [
            Variant(lambda m, h: h.softmax(-1), (B, D)),
            Variant(lambda m, h: h[:, 0].softmax(-1), (B, D), refused=True),
        ],
    ),
    "requires grad": (
        lambda key: (*key[:3], *[t[:2] for t in key[3:]]),
        [
            Variant(lambda m, h: F.linear(h.detach(), m.matrix) + h),
            Variant(lambda m, h: F.linear(h.sin(), m.matrix) + h),
        ],
    ),
    "parameters": (
        lambda key: (*key[:2], *[(None, *t[1:]) if t[0] == "parameter" else t for t in key[3:]]),
        [Variant(lambda m, h: F.linear(h, m.constant)), Variant(lambda m, h: F.linear(h, m.matrix))],
    ),
}

# ---- keys with sizes: (function, batch size, fields, numbers, tensors ...) ----


def reshape(m: Any, h: Tensor) -> Tensor:
    return m.first(torch.reshape(h, shape=(-1, D))).sin().view(h.shape)


def add_halves(m: Any, h: Tensor) -> Tensor:
    first, second = torch.chunk(torch.cat([h, h]), 2)
    return first.sin() + second


def read_bytes(m: Any, h: Tensor, dtype: torch.dtype) -> Tensor:
    """A product with numbers that are read from the bytes of each sample; of float64, there are two for each entry."""
    numbers = h.detach().to(dtype).mT.contiguous().view(torch.int32)
    return h * (numbers[0, : len(h)] % 7)[:, None]


def join_halves(m: Any, h: Tensor) -> Tensor:
    return torch.cat([m.first(half) for half in torch.chunk(h, 2)])


WITH_SIZES: dict[str, tuple[Callable[[Key], Key], list[Variant]]] = {
    "function": (
        lambda key: key[1:],
        [
            Variant(lambda m, h: m.first(torch.logcumsumexp(h, 1)), (B, D)),
            Variant(lambda m, h: m.first(torch.roll(h, 1)), (B, D), refused=True),
        ],
    ),
    "batch size": (
        lambda key: (key[0], *key[2:]),
        [Variant(add_halves, (2, D)), Variant(join_halves, (4, D))],
    ),
    "values": (
        lambda key: (*key[:2], drop_values(key[2]), *key[3:]),
        [Variant(lambda m, h: h + torch.roll(h, 1, 1)), Variant(lambda m, h: h + torch.roll(h, 1, 0), refused=True)],
    ),
    "types": (
        lambda key: (*key[:2], drop_types(key[2]), *key[3:]),
        [
            Variant(lambda m, h: h + h[[True] * len(h)], (B, D)),
            Variant(lambda m, h: h + h[[1] * len(h)], (B, D), refused=True),
        ],
    ),
    "names": (
        lambda key: (*key[:2], drop_names(key[2]), *key[3:]),
        [
            Variant(lambda m, h: torch.sub(input=pick(h), other=m.vector)),
            Variant(lambda m, h: torch.sub(other=pick(h), input=m.vector)),
        ],
    ),
    "numbers": (
        lambda key: (*key[:3], *key[4:]),
        [Variant(use_norm(1e-5, pick)), Variant(use_norm(0.5, pick))],
    ),
    "shapes": (
        lambda key: (*key[:4], *[t[1:] for t in key[4:]]),
        [Variant(reshape), Variant(reshape, (B, 2, D))],
    ),
    "dtypes": (
        lambda key: (*key[:4], *[(t[0], *t[2:]) for t in key[4:]]),
        [
            Variant(lambda m, h: read_bytes(m, h, torch.float32), (B, D)),
            Variant(lambda m, h: read_bytes(m, h, torch.float64), (B, D), refused=True),
        ],
    ),
    "sparse": (
        lambda key: (*key[:4], *[(*t[:2], *t[3:]) for t in key[4:]]),
        [
            Variant(lambda m, h: h, (B, D)),
            Variant(lambda m, h: h, (B, D), refused=True, prepare=Tensor.to_sparse),
        ],
    ),
    "requires grad": (
        lambda key: (*key[:4], *[(*t[:3], *t[4:]) for t in key[4:]]),
        [
            Variant(lambda m, h: F.linear(pick(h.detach()), m.matrix) + pick(h)),
            Variant(lambda m, h: F.linear(pick(h.sin()), m.matrix) + pick(h)),
        ],
    ),
    "layout": (
        lambda key: (*key[:4], *[(*t[:4], t[4] is None) for t in key[4:]]),
        [
            Variant(lambda m, h: h + torch.roll(h, 1, 1), (B, B, D)),
            Variant(lambda m, h: h + torch.roll(h, 1, 1), (B, B, D), refused=True, options={"batch_dim": 1}),
        ],
    ),
}


@pytest.fixture(autouse=True)
def memo() -> Iterator[None]:
    """No effects of other tests, and none of this one for others."""
    MEMO.clear()
    yield
    MEMO.clear()


def check_variants(variants: list[Variant]) -> None:
    torch.manual_seed(0)
    model = Model().double()
    for variant in variants * 4:  # the first passes are audited, and take no effects of others
        variant.check(model)


def change_keys(monkeypatch: pytest.MonkeyPatch, has_sizes: bool, change: Callable[[Key], Key]) -> None:
    """Have keys made without a part."""
    if has_sizes:
        make_key = call.make_key
        monkeypatch.setattr(call, "make_key", lambda each: change(make_key(each)))
        monkeypatch.setattr(repeats, "make_size_free_key", lambda *args: None)
    else:
        make = repeats.make_size_free_key

        def make_changed(*args: Any) -> Any:
            made = make(*args)
            return None if made is None else (("changed", *change(made[0])), made[1])

        monkeypatch.setattr(repeats, "make_size_free_key", make_changed)


CASES = [
    pytest.param(has_sizes, *case, id=f"{'with' if has_sizes else 'without'} sizes: {part}")
    for has_sizes, cases in ((False, WITHOUT_SIZES), (True, WITH_SIZES))
    for part, case in cases.items()
]


@pytest.mark.parametrize(("has_sizes", "change", "variants"), CASES)
def test_calls_that_differ_in_a_part_of_the_key(has_sizes: bool, change: Any, variants: list[Variant]) -> None:
    check_variants(variants)


@pytest.mark.parametrize(("has_sizes", "change", "variants"), CASES)
def test_each_part_of_a_key_is_needed(
    has_sizes: bool, change: Any, variants: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the part, a number is wrong, or a refusal is missing."""
    change_keys(monkeypatch, has_sizes, change)
    with pytest.raises((Exception, pytest.fail.Exception)):
        check_variants(variants)


# ---- sites: what is compared with the last call ----

# From the check of an argument and the argument: the check without the part.
Adapt = Callable[[Any, Any, Any], Any]

SITES: dict[str, tuple[Adapt, list[Variant]]] = {
    "values": (
        lambda check, value, known: (check[0], value, *check[2:]) if check[0] == program._SAME else check,
        [Variant(lambda m, h: h.softmax(1)), Variant(lambda m, h: h.softmax(0), refused=True)],
    ),
    "values that are computed": (
        lambda check, value, known: (check[0], value, *check[2:]) if check[0] == program._SAME else check,
        [Variant(normalise_by_root(1e-10)), Variant(normalise_by_root(0.25))],
    ),
    "layouts": (
        lambda check, value, known: (
            (check[0], known[id(value)][1][0], *check[2:])
            if check[0] == program._SAMPLES and id(value) in known
            else check
        ),
        [
            Variant(lambda m, h: h.softmax(1), (B, B, D)),
            Variant(lambda m, h: h.softmax(1), (B, B, D), refused=True, options={"batch_dim": 1}),
        ],
    ),
    "dimensions": (
        lambda check, value, known: (*check[:3], value.dim(), check[4]) if isinstance(value, Tensor) else check,
        [
            Variant(lambda m, h: h[:, 0].softmax(-1)),
            Variant(lambda m, h: h[:, 0].softmax(-1), (B, D), refused=True),
        ],
    ),
    "requires grad": (
        lambda check, value, known: (*check[:4], value.requires_grad) if isinstance(value, Tensor) else check,
        [
            Variant(lambda m, h: F.linear(h, m.matrix), freezes=True),
            Variant(lambda m, h: F.linear(h, m.matrix)),
        ],
    ),
}


def check_later_variant(variants: list[Variant]) -> None:
    """The second variant, after passes with the first one that leave its calls at the sites."""
    torch.manual_seed(0)
    model = Model().double()
    for variant in (*variants[:1] * 4, variants[1]):
        variant.check(model)


@pytest.mark.parametrize(("adapt", "variants"), SITES.values(), ids=SITES)
def test_calls_that_differ_from_the_last_one(adapt: Adapt, variants: list[Variant]) -> None:
    check_later_variant(variants)


@pytest.mark.parametrize(("adapt", "variants"), SITES.values(), ids=SITES)
def test_each_comparison_is_needed(adapt: Adapt, variants: list[Variant], monkeypatch: pytest.MonkeyPatch) -> None:
    matches = program.Site.matches

    def compare_less(self: Any, args: Any, kwargs: Any, known: Any, parameters: Any) -> bool:
        if len(args) == len(self._checks):
            self._checks = [adapt(check, value, known) for check, value in zip(self._checks, args, strict=True)]
        return matches(self, args, kwargs, known, parameters)

    monkeypatch.setattr(program.Site, "matches", compare_less)
    with pytest.raises((Exception, pytest.fail.Exception)):
        check_later_variant(variants)
