"""Whether a number is written out where it is used, by the bytecode of each Python that the tests run on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from persample._internal.calling_code import _find_constants, _is_written_out_first

TWO = 2
NUMBERS = {"two": 2}


def _is_written_in_caller(number: float, *, other: float = 0) -> bool:
    frame = sys._getframe(1)
    return (number or other) in _find_constants(frame.f_code, frame.f_lasti)


class Value:
    """Each operation returns whether its other operand is written out."""

    def __init__(self) -> None:
        self.div = partial(_is_written_in_caller)  # called from C, as a method of a tensor is

    def __truediv__(self, number: float) -> bool:
        frame = sys._getframe(1)
        return number in _find_constants(frame.f_code, frame.f_lasti)

    __rtruediv__ = __mul__ = __rmul__ = __itruediv__ = __truediv__


VALUE: Any = Value()


def divide_in_place() -> Any:
    value: Any = Value()
    value /= 2
    return value


def divide_by_local() -> Any:
    value, number = VALUE, 2
    return value / number


def divide_by_local_beside_a_constant() -> Any:
    """One instruction of Python 3.13 loads both operands of the quotient; the constant before it is of the product."""
    value, number = VALUE, 2
    return [2, value / number][1]


def divide_by_default(number: int = 2) -> Any:
    return VALUE / number


def divide_in_a_loop() -> Any:
    for number in (2,):
        found = VALUE / number
    return found


WRITTEN: list[Callable[[], Any]] = [
    lambda: VALUE / 2, lambda: VALUE * 2, lambda: 2 * VALUE, lambda: 2 / VALUE, lambda: VALUE / 2.0,
    lambda: VALUE / 1000,
    lambda: VALUE / -2, lambda: VALUE / 2**2, lambda: VALUE.div(2), lambda: VALUE.div(0, other=2), divide_in_place,
]  # fmt: skip
COMPUTED: list[Callable[[], Any]] = [
    lambda: VALUE / TWO, lambda: TWO * VALUE, lambda: VALUE / NUMBERS["two"], lambda: VALUE / len([1, 2]),
    lambda: VALUE / max(2, 1), lambda: VALUE / (TWO if VALUE else 3), lambda: VALUE.div(TWO), divide_by_local,
    divide_by_local_beside_a_constant, divide_by_default, divide_in_a_loop,
]  # fmt: skip


@pytest.mark.parametrize("compute", WRITTEN)
def test_numbers_that_are_written_out(compute: Callable[[], Any]) -> None:
    assert compute() is True


@pytest.mark.parametrize("compute", COMPUTED)
def test_numbers_from_elsewhere(compute: Callable[[], Any]) -> None:
    assert compute() is False


def is_written_first(*args: Any, **kwargs: Any) -> bool:
    frame = sys._getframe(1)
    return _is_written_out_first(frame.f_code, frame.f_lasti)


LITERALS: list[Callable[[], Any]] = [
    lambda: is_written_first([0.5, -0.5]), lambda: is_written_first([0.5, 0.2, 0.1, 0.2]),
    lambda: is_written_first((1, 2, 3)), lambda: is_written_first([[1, 2], [3, 4]], dtype=VALUE, device=NUMBERS),
    lambda: is_written_first(7, other=TWO),
]  # fmt: skip
OTHERS: list[Callable[[], Any]] = [
    lambda: is_written_first(NUMBERS), lambda: is_written_first([1, TWO, 3]), lambda: is_written_first([*NUMBERS, 1]),
    lambda: is_written_first([1, 2] if VALUE else [3, 4]), lambda: is_written_first(TWO, [1, 2]),
    lambda: is_written_first([n for n in (1, 2)]), lambda: is_written_first(*[1, 2]),
    lambda: is_written_first(data=[1, 2, TWO]), lambda: is_written_first([1, 2] * TWO), lambda: is_written_first(),
]  # fmt: skip


@pytest.mark.parametrize("compute", LITERALS)
def test_first_arguments_that_are_written_out(compute: Callable[[], Any]) -> None:
    assert compute() is True


@pytest.mark.parametrize("compute", OTHERS)
def test_first_arguments_from_elsewhere(compute: Callable[[], Any]) -> None:
    assert compute() is False
