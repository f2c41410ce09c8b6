"""Influence by parts of a model: modules, heads, experts, or any entries of its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from persample.scanning.errors import ScanError
from persample.terms import Dense, Term

# A parameter, or a parameter and an index of its entries: `("attention.weight", slice(0, 64))`.
Part = str | tuple[str, Any]
Groups = Mapping[str, Sequence[Part]]


def split_directions(directions: Mapping[str, Term], groups: Groups | None) -> dict[str, list[tuple[int, Term]]]:
    """For each parameter the numbers of its groups, with directions that are zero outside of the group."""
    if groups is None:
        return {name: [(0, term)] for name, term in directions.items()}
    found: dict[str, list[tuple[int, Term]]] = {}
    for number, parts in enumerate(groups.values()):
        for part in parts:
            name, index = (part, None) if isinstance(part, str) else part
            if name in directions:
                term = directions[name]
                found.setdefault(name, []).append((number, term if index is None else _select(term, name, index)))
    return found


def check_groups(groups: Groups, names: Sequence[str]) -> None:
    """Raise if a group has a parameter that does not exist."""
    if not groups:
        raise ScanError("groups is empty: pass a dict from the name of each group to its parameters.")
    for group, parts in groups.items():
        if isinstance(parts, str):
            raise ScanError(f"The group {group!r} must be a list of parameters, got {parts!r}.")
        for part in parts:
            name = part if isinstance(part, str) else part[0]
            if name not in names:
                raise ScanError(f"The group {group!r} contains {name!r}, which is not a parameter that counts.")


def _select(term: Term, name: str, index: Any) -> Term:
    """Gradients that are zero outside of some entries of the parameter."""
    mask = torch.zeros(term.shape, dtype=torch.bool)
    try:
        mask[index] = True
    except (IndexError, TypeError) as error:
        raise ScanError(
            f"{index!r} is no index of {name!r}, which has the shape {tuple(term.shape)}: {error}"
        ) from None
    rows = term.dense()
    return Dense(rows * mask.to(rows.device))
