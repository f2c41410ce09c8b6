"""A compiled step notices everything that changes between two calls, wherever its code reads it."""

from __future__ import annotations

import array
import types
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from persample import compile as compile_step
from persample import record

B, D = 4, 3
SCALE = 2.0
SETTINGS = {"scale": 2.0}
OBJECT = types.SimpleNamespace(scale=2.0)
MODULE = types.ModuleType("settings_of_a_test")
MODULE.scale = 2.0  # type: ignore[attr-defined]
ARRAY = np.array([2.0, 1.0], dtype="float32")


class Base(nn.Module):
    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)
        self.own: Any = None

    def read(self) -> float:
        return self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.read()


class Inner:
    factor = 2.0

    def __init__(self, scale: float = 2.0) -> None:
        self.scale = scale


@dataclass(slots=True)
class Slotted:
    scale: float = 2.0


@dataclass
class Nested:
    inner: Inner = field(default_factory=Inner)
    many: list[Any] = field(default_factory=lambda: [{"deep": Inner()}])


def make(read: Callable[[Any], Any], own: Any = None, **members: Any) -> Base:
    """A model of a new class."""
    model = type("Model", (Base,), {"read": read, "values": {"scale": 2.0}, **members})()
    model.own = own
    return model


def read_global(m: Any) -> float:
    return SCALE


def read_global_dict(m: Any) -> float:
    return SETTINGS["scale"]


def read_global_object(m: Any) -> float:
    return OBJECT.scale


def read_module(m: Any) -> float:
    return MODULE.scale


def read_global_array(m: Any) -> float:
    return float(ARRAY[0])


def read_in_a_nested_function(m: Any) -> float:
    return sum(SCALE for _ in range(1))


def help_reading() -> float:
    return read_global(None)


def read_through_a_helper(m: Any) -> float:
    return help_reading()


def set_item(container: Any, key: Any) -> Callable[[Any], None]:
    return lambda m: container.__setitem__(key, 3.0)


def set_global(m: Any) -> None:
    globals()["SCALE"] = 3.0


def make_enclosing() -> tuple[Callable[[Any], float], Callable[[Any], None]]:
    scale = [2.0]
    return lambda m: scale[0], lambda m: scale.__setitem__(0, 3.0)


def make_defaults() -> Callable[..., float]:
    def read(m: Any, scale: dict[str, float] = {"scale": 2.0}) -> float:  # noqa: B006
        return scale["scale"]

    return read


def make_keyword_default() -> Callable[..., float]:
    def read(m: Any, *, scale: float = 2.0) -> float:
        return scale

    return read


def make_partial() -> Any:
    cell = {"scale": 2.0}
    return lambda m: m.own(), partial(lambda c: c["scale"], cell), lambda m: m.own.args[0].__setitem__("scale", 3.0)


def change_array(m: Any) -> None:
    m.own[0] = 3.0


def change_scale_of_class(m: Any) -> None:
    type(m).scale = 3.0


ENCLOSING = make_enclosing()
PARTIAL = make_partial()
FIRST = lambda m: float(m.own[0])  # noqa: E731
OF_OWN = lambda m: m.own.scale  # noqa: E731

CHANGES: dict[str, tuple[Callable[[], Base], Callable[[Any], None]]] = {
    "class attribute": (lambda: make(lambda m: m.scale), change_scale_of_class),
    "attribute of a base class": (
        lambda: type("Derived", (type("Middle", (Base,), {"scale": 2.0}),), {})(),
        lambda m: setattr(type(m).__bases__[0], "scale", 3.0),
    ),
    "class attribute that is a dict": (
        lambda: make(lambda m: m.values["scale"]),
        lambda m: type(m).values.__setitem__("scale", 3.0),
    ),
    "class attribute that is an array": (
        lambda: make(lambda m: float(m.numbers[0]), numbers=np.array([2.0])),
        lambda m: m.numbers.__setitem__(0, 3.0),
    ),
    "method": (lambda: make(lambda m: 2.0), lambda m: setattr(type(m), "read", lambda m: 3.0)),
    "forward": (
        lambda: make(lambda m: 2.0),
        lambda m: setattr(type(m), "forward", lambda m, x: m.a(x) * 3.0),
    ),
    "property": (
        lambda: make(lambda m: m.prop, prop=property(lambda m: 2.0)),
        lambda m: setattr(type(m), "prop", property(lambda m: 3.0)),
    ),
    "static method": (
        lambda: make(lambda m: m.static(), static=staticmethod(lambda: 2.0)),
        lambda m: setattr(type(m), "static", staticmethod(lambda: 3.0)),
    ),
    "numpy array": (lambda: make(FIRST, np.array([2.0, 1.0], "float32")), change_array),
    "numpy array, transposed": (
        lambda: make(lambda m: float(m.own[0, 1]), np.arange(6.0).reshape(3, 2).T * 0 + 2),
        lambda m: m.own.__setitem__((0, 1), 3.0),
    ),
    "numpy array in a dict": (
        lambda: make(lambda m: float(m.own["a"][0]), {"a": np.array([2.0])}),
        lambda m: m.own["a"].__setitem__(0, 3.0),
    ),
    "array": (lambda: make(FIRST, array.array("d", [2.0])), change_array),
    "bytearray": (lambda: make(FIRST, bytearray([2])), lambda m: m.own.__setitem__(0, 3)),
    "long list": (lambda: make(FIRST, [2.0] * 5000), change_array),
    "deque": (lambda: make(FIRST, deque([2.0])), change_array),
    "object": (lambda: make(OF_OWN, Inner()), lambda m: setattr(m.own, "scale", 3.0)),
    "namespace": (lambda: make(OF_OWN, types.SimpleNamespace(scale=2.0)), lambda m: setattr(m.own, "scale", 3.0)),
    "slots": (lambda: make(OF_OWN, Slotted()), lambda m: setattr(m.own, "scale", 3.0)),
    "nested object": (
        lambda: make(lambda m: m.own.inner.scale, Nested()),
        lambda m: setattr(m.own.inner, "scale", 3.0),
    ),
    "object in a dict in a list": (
        lambda: make(lambda m: m.own.many[0]["deep"].scale, Nested()),
        lambda m: setattr(m.own.many[0]["deep"], "scale", 3.0),
    ),
    "class of an object": (
        lambda: make(lambda m: m.own.factor, type("Fresh", (Inner,), {"factor": 2.0})()),
        lambda m: setattr(type(m.own), "factor", 3.0),
    ),
    "class as an attribute": (
        lambda: make(lambda m: m.own.factor, type("Fresh", (Inner,), {"factor": 2.0})),
        lambda m: setattr(m.own, "factor", 3.0),
    ),
    "partial": (lambda: make(PARTIAL[0], PARTIAL[1]), PARTIAL[2]),
    "global": (lambda: make(read_global), set_global),
    "global in a nested function": (lambda: make(read_in_a_nested_function), set_global),
    "global of a helper": (lambda: make(read_through_a_helper), set_global),
    "global dict": (lambda: make(read_global_dict), set_item(SETTINGS, "scale")),
    "global object": (lambda: make(read_global_object), lambda m: setattr(OBJECT, "scale", 3.0)),
    "global array": (lambda: make(read_global_array), set_item(ARRAY, 0)),
    "module": (lambda: make(read_module), lambda m: setattr(MODULE, "scale", 3.0)),
    "enclosed variable": (lambda: make(ENCLOSING[0]), ENCLOSING[1]),
    "default": (lambda: make(make_defaults()), lambda m: type(m).read.__defaults__[0].__setitem__("scale", 3.0)),
    "keyword default": (
        lambda: make(make_keyword_default()),
        lambda m: type(m).read.__kwdefaults__.__setitem__("scale", 3.0),
    ),
    "cached property": (
        lambda: make(lambda m: m.helper.value, helper=type("H", (), {"value": cached_property(lambda h: 2.0)})()),
        lambda m: m.helper.__dict__.__setitem__("value", 3.0),
    ),
}


@pytest.fixture(autouse=True)
def restore_globals() -> Any:
    yield
    globals()["SCALE"] = SETTINGS["scale"] = OBJECT.scale = MODULE.scale = 2.0  # type: ignore[attr-defined]
    ARRAY[0] = 2.0


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(name: str) -> None:
    build, change = CHANGES[name]
    model, x = build(), torch.randn(B, D)

    def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().sum(1).mean()

    step = compile_step(model, compute_loss, lambda grads: grads.norms(), backend="eager")

    def compare() -> Tensor:
        with record(model) as grads:
            compute_loss(model, x).backward()
        norms = step(x)[1]
        torch.testing.assert_close(norms, grads.norms())
        return norms

    before = compare()
    graphs = repr(step)
    compare()
    assert repr(step) == graphs  # nothing has changed, and nothing is traced again
    change(model)
    assert not torch.allclose(compare(), before)


def test_a_global_with_the_name_of_an_attribute_does_not_count() -> None:
    model, x = make(lambda m: m.scale), torch.randn(B, D)
    step = compile_step(model, lambda m, x: m(x).sum(), lambda grads: grads.norms(), backend="eager")
    step(x)
    globals()["scale"] = 3.0
    step(x)
    del globals()["scale"]
    assert repr(step).endswith("graphs: 1)")
