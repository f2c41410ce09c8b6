"""What has changed between two scans, such as before and after labels were corrected."""

from __future__ import annotations

import posixpath
from collections import Counter
from dataclasses import dataclass
from typing import Any

from persample.scanning.errors import ScanError
from persample.scanning.estimates import NoEstimate, WrongLabels
from persample.scanning.results import Scan


@dataclass(frozen=True)
class Comparison:
    """The difference between two scans. Examples are pairs of ids, before and after.

    `relabelled` have another label, `resolved` were suspects and are none any more, `remaining` were and are, and
    `new` are suspects now. `only_before` and `only_after` are ids of examples that the other scan has not.
    """

    pairs: list[tuple[int, int]]
    only_before: list[int]
    only_after: list[int]
    relabelled: list[tuple[int, int]]
    resolved: list[tuple[int, int]]
    remaining: list[tuple[int, int]]
    new: list[tuple[int, int]]
    wrong_labels: tuple[WrongLabels | NoEstimate, WrongLabels | NoEstimate]
    mean_loss: tuple[float | None, float | None]


def compare_scans(before: Scan, after: Scan) -> Comparison:
    """Compare two scans of the same or corrected data.

    Examples are matched by name, then by the name of their file, because a corrected label moves it to another folder.
    Names that occur more than once are not matched.
    Without names the scans must have the same number of examples, which are matched by id.
    """
    pairs = _match(before, after)
    labels = [scan.describe(range(len(scan))) if "label" in scan.columns else None for scan in (before, after)]
    old, new = (set(scan.suspects().ids.tolist()) if scan.default_ranking else set() for scan in (before, after))
    first, second = labels
    return Comparison(
        pairs=pairs,
        only_before=sorted(set(range(len(before))) - {i for i, _ in pairs}),
        only_after=sorted(set(range(len(after))) - {j for _, j in pairs}),
        relabelled=[(i, j) for i, j in pairs if first and second and first[i]["label"] != second[j]["label"]],
        resolved=[(i, j) for i, j in pairs if i in old and j not in new],
        remaining=[(i, j) for i, j in pairs if i in old and j in new],
        new=[(i, j) for i, j in pairs if i not in old and j in new],
        wrong_labels=(before.estimate_wrong_labels(), after.estimate_wrong_labels()),
        mean_loss=(_get_mean_loss(before), _get_mean_loss(after)),
    )


def _match(before: Scan, after: Scan) -> list[tuple[int, int]]:
    has_names = ["name" in scan.columns for scan in (before, after)]
    if not all(has_names):
        if len(before) != len(after):
            raise ScanError(
                f"The scans have {len(before)} and {len(after)} examples, and not both have names to match them by. "
                "Scan with ids=."
            )
        return [(i, i) for i in range(len(before))]
    old, new = before.column("name"), after.column("name")
    found = _match_unique({i: str(name) for i, name in enumerate(old)}, {j: str(name) for j, name in enumerate(new)})
    for rename in (_add_class, posixpath.basename):
        left = {i: rename(old[i]) for i in range(len(old)) if i not in found}
        right = {j: posixpath.basename(new[j]) for j in range(len(new)) if j not in set(found.values())}
        found |= _match_unique(left, right)
    return sorted(found.items())


def _add_class(name: str) -> str:
    """The name that `persample apply` gives to a moved file whose own name was taken.

    >>> _add_class("cats/1.png")
    'cats-1.png'
    """
    return f"{name.partition('/')[0]}-{posixpath.basename(name)}"


def _match_unique(left: dict[int, str], right: dict[int, str]) -> dict[int, int]:
    """Pairs of ids whose names are equal, and occur once on each side."""
    counts = [Counter(names.values()) for names in (left, right)]
    places = {name: j for j, name in right.items()}
    return {i: places[name] for i, name in left.items() if all(count[name] == 1 for count in counts)}


def _get_mean_loss(scan: Scan) -> float | None:
    spread: dict[str, Any] = scan.summary["columns"].get("loss", {})
    return spread.get("mean")
