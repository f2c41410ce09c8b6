"""Groups of parameters by the modules that they belong to."""

from __future__ import annotations

from collections.abc import Sequence

MAX_GROUPS = 16


def group_by_module(names: Sequence[str], most: int = MAX_GROUPS) -> dict[str, list[str]]:
    """The parameter names of each module, at the greatest depth that gives at most `most` groups.

    >>> group_by_module(["conv.weight", "conv.bias", "head.0.weight", "head.2.weight"])
    {'conv': ['conv.weight', 'conv.bias'], 'head.0': ['head.0.weight'], 'head.2': ['head.2.weight']}
    """
    modules = [name.split(".")[:-1] or [name] for name in names]
    depths = range(max(map(len, modules), default=1), 0, -1)
    depth = next((d for d in depths if len({tuple(m[:d]) for m in modules}) <= most), 1)
    found: dict[str, list[str]] = {}
    for module, name in zip(modules, names, strict=True):
        found.setdefault(".".join(module[:depth]), []).append(name)
    return found
