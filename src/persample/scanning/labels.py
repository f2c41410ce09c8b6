"""How names of classes become numbers: in the order of the model if it has names, else in alphabetical order."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from persample._internal.text import format_list
from persample.scanning.errors import ScanError

_DEFAULT_NAME = re.compile(r"LABEL_\d+")  # what transformers writes if nobody names the classes


def find_model_classes(model: nn.Module) -> list[str] | None:
    """The names of the classes in the order of the model's outputs, from `model.config`; None if it has none."""
    config = getattr(model, "config", None)
    numbers: Any = getattr(config, "label2id", None)
    if not isinstance(numbers, Mapping) or not numbers or all(_DEFAULT_NAME.fullmatch(str(name)) for name in numbers):
        return None
    numbers = {str(name): int(number) for name, number in numbers.items()}
    names = {number: name for name, number in numbers.items()}
    if sorted(names) != list(range(len(numbers))):
        raise ScanError(f"label2id of the model's config must number its classes from 0, each once: {numbers}.")
    reverse = getattr(config, "id2label", None)
    if isinstance(reverse, Mapping):
        for number, name in reverse.items():
            if names.get(int(number)) != str(name):
                raise ScanError(
                    f"The model's config contradicts itself: id2label says that class {number} is {str(name)!r}, "
                    f"label2id says {names.get(int(number))!r}. Correct the config."
                )
    return [names[number] for number in range(len(names))]


def check_classes(classes: Sequence[str] | None, model: nn.Module) -> None:
    """Refuse names of classes that contradict those of the model."""
    own = find_model_classes(model)
    if classes is None or own is None or list(classes) == own[: len(classes)]:
        return
    pairs = [(i, a, b) for i, (a, b) in enumerate(zip(classes, own, strict=False)) if a != b]
    if not pairs:
        raise ScanError(f"The data has {len(classes)} classes, but the model's config.label2id has {len(own)}.")
    i, name, other = pairs[0]
    raise ScanError(
        f"Class {i} is {name!r} in the data, but {other!r} in the model's config.label2id. Number the labels as the "
        f"model does ({_show_numbers(own)}), or correct the config."
    )


def choose_classes(names: Sequence[str], known: Sequence[str] | None, where: str) -> list[str]:
    """The classes in the order of their numbers: `known` if given, which must contain all names, else sorted names.

    >>> choose_classes(["dog", "cat"], None, "photos"), choose_classes(["cat"], ["dog", "cat"], "photos")
    (['cat', 'dog'], ['dog', 'cat'])
    """
    if known is None:
        return sorted(set(names))
    if unknown := sorted(set(names) - set(known)):
        raise ScanError(
            f"{where} has the classes {format_list(unknown)}, which the model does not know. Its classes are "
            f"{_show_numbers(known)}."
        )
    return list(known)


def read_labels(values: Sequence[Any], known: Sequence[str] | None, where: str) -> tuple[list[int], list[str] | None]:
    """Numbers of classes, and the names of the classes if the labels are names. Rows without a label are refused.

    >>> read_labels(["b", "a", "b"], None, "The column"), read_labels([0, 2], None, "The column")
    (([1, 0, 1], ['a', 'b']), ([0, 2], None))
    """
    if blank := [i for i, value in enumerate(values) if _is_blank(value)]:
        raise ScanError(
            f"{where} is empty in {'row' if len(blank) == 1 else f'{len(blank):,} rows:'} {format_list(blank)} "
            "(counted from 0). Label or remove these rows."
        )
    if all(isinstance(value, float) for value in values):
        if fractions := [i for i, value in enumerate(values) if not value.is_integer()]:
            raise ScanError(
                f"{where} has numbers that are no classes, such as {values[fractions[0]]} in row {fractions[0]}. "
                "Labels are numbers of classes from 0, or names."
            )
        values = [int(value) for value in values]
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        most = None if known is None else len(known) - 1
        if bad := [i for i, v in enumerate(values) if v < 0 or (most is not None and v > most)]:
            wanted = "0 or more" if most is None else f"0 to {most}"
            raise ScanError(
                f"{where} must have labels from {wanted}, but rows {format_list(bad)} have others, such as "
                f"{values[bad[0]]}. Classes are numbered from 0."
            )
        return list(values), None if known is None else list(known)
    names = [str(value) for value in values]
    classes = choose_classes(names, known, where)
    numbers = {name: i for i, name in enumerate(classes)}
    return [numbers[name] for name in names], classes


def _is_blank(value: Any) -> bool:
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def _show_numbers(classes: Sequence[str]) -> str:
    return format_list([f"{i} {name}" for i, name in enumerate(classes)], most=20)
