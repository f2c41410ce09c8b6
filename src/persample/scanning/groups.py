"""Groups of parameters, whose norms are columns of a scan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from persample._internal.models import group_by_module
from persample.scanning.errors import ScanError

Groups = Callable[[str], str] | Mapping[str, Sequence[str]]


def group_parameters(names: Sequence[str], groups: Groups | None) -> dict[str, list[str]]:
    """The parameter names of each group: as the user says, or by module at a depth that gives few groups.

    >>> group_parameters(["conv.weight", "conv.bias", "head.0.weight", "head.2.weight"], None)
    {'conv': ['conv.weight', 'conv.bias'], 'head.0': ['head.0.weight'], 'head.2': ['head.2.weight']}
    >>> group_parameters(["conv.weight", "conv.bias"], lambda name: name.rpartition(".")[2])
    {'weight': ['conv.weight'], 'bias': ['conv.bias']}
    """
    if isinstance(groups, Mapping):
        counts = Counter(name for members in groups.values() for name in members)
        if unknown := sorted(set(counts) - set(names)):
            raise ScanError(f"groups contains {unknown[0]!r}, which is not a scanned parameter.")
        if repeated := [name for name, count in counts.items() if count > 1]:
            raise ScanError(f"groups contains {repeated[0]!r} twice.")
        return {group: list(members) for group, members in groups.items()}
    if groups is None:
        return group_by_module(names)
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(groups(name), []).append(name)
    return found
