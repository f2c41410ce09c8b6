"""Options that are declared once and shown by several functions."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from typing import Any, TypedDict, Unpack, get_type_hints

import pytest

import persample
from persample._internal.options import make_options, show_options
from persample.private import PrivacyEngine
from persample.private.options import EngineOptions, PrivateOptions
from persample.recording.options import Options, RecordOptions

pytestmark = pytest.mark.quick


class SmallOptions(TypedDict, total=False):
    size: int
    colour: str


@dataclass(kw_only=True)
class AllOptions:
    """Some options.

    Attributes:
        size: how large it is,
            in metres.
        colour: its colour.
        hidden: for us.

    More text.
    """

    size: int = 1
    colour: str = "red"
    hidden: bool = False


@show_options(AllOptions, SmallOptions)
def paint(place: str, **options: Unpack[SmallOptions]) -> AllOptions:
    """Paint something.

    Args:
        place: where.
        **options: see `AllOptions`.

    Returns:
        The options.
    """
    return make_options(AllOptions, "paint", options, SmallOptions)


def test_help_shows_the_options() -> None:
    assert str(inspect.signature(paint)) == "(place: 'str', *, size: 'int' = 1, colour: 'str' = 'red') -> 'AllOptions'"
    assert inspect.getdoc(paint) == inspect.cleandoc("""Paint something.

    Args:
        place: where.
        size: how large it is,
            in metres.
        colour: its colour.

    Returns:
        The options.
    """)


def test_options_are_checked_by_name() -> None:
    assert paint("here", size=2) == AllOptions(size=2)
    with pytest.raises(
        TypeError, match=r"^paint\(\) got an unexpected keyword argument 'color'. Did you mean 'colour'\?"
    ):
        paint("here", color="blue")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"argument 'xyz'\. The options are colour, size"):
        paint("here", xyz=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'hidden'"):
        paint("here", hidden=True)  # type: ignore[call-arg]
    assert make_options(AllOptions, "paint", {"hidden": True}).hidden


DECLARED: list[tuple[Any, Any, set[str]]] = [
    (Options, RecordOptions, {"guard", "keep_rows", "reduce"}),
    (EngineOptions, PrivateOptions, set()),
]
FUNCTIONS = [
    persample.record, persample.watch, PrivacyEngine.make_private, PrivacyEngine.make_private_with_epsilon,
]  # fmt: skip


@pytest.mark.parametrize(("values", "typed", "internal"), DECLARED, ids=lambda value: getattr(value, "__name__", ""))
def test_both_declarations_agree(values: Any, typed: Any, internal: set[str]) -> None:
    """The names and types for type checkers, and the fields with defaults and documentation."""
    declared = get_type_hints(values)
    assert {field.name for field in fields(values)} - internal == set(typed.__annotations__)
    for name, kind in get_type_hints(typed).items():
        assert kind == declared[name], name


@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_option_is_documented_once(function: Any) -> None:
    documented = (inspect.getdoc(function) or "").splitlines()
    parameters = inspect.signature(function).parameters
    for name in parameters.keys() - {"self"}:
        assert len([line for line in documented if line.startswith(f"    {name}: ")]) == 1, name
    assert not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters.values())


def test_an_unknown_option_is_refused_at_the_call() -> None:
    model: Any = None
    with pytest.raises(TypeError, match=r"record\(\) got an unexpected keyword argument 'bach_size'.*'batch_size'"):
        persample.record(model, bach_size=3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"watch\(\) got an unexpected keyword argument 'guard'"):
        persample.watch(model, print, guard=None)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"make_private\(\) got an unexpected keyword argument 'clip'.*'clipping'"):
        PrivacyEngine().make_private(
            module=model, optimizer=model, data_loader=model, noise_multiplier=1.0, max_grad_norm=1.0, clip="flat"
        )  # type: ignore[call-arg]
