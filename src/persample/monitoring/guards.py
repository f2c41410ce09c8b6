"""Guards: what goes wrong in a training run without an error, found in the first measured steps.

A weight in which no sample has a gradient learns nothing, whatever the loss does: a frozen path, an adapter that is not
called, an expert that no token is sent to. A weight that has gradients and does not move is missing in the optimizer,
or its updates vanish in rounding. In private training such a weight receives noise and nothing else.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from persample._internal.text import format_count
from persample.monitoring.measurement import Measurement

STEPS_TO_JUDGE = 5  # measured steps before something is judged
_EXPLODED = 10.0  # times its median over the last steps: a layer's norm that is unusual
_NAMED = 5  # weights in a warning
_MANY_ZEROS = 0.5  # the share of samples without a gradient that is worth a warning


class Guards:
    """Judges each measured step by the ones before it, and each cause once.

    Args:
        weights: the weights that are monitored, by name.
        groups: the names of the weights of each part of the model.
        window: the number of measured steps that a layer's norm is compared with.
    """

    def __init__(self, weights: Mapping[str, Tensor], groups: Mapping[str, Sequence[str]], window: int) -> None:
        self._groups = groups
        self._layers: dict[str, deque[float]] = {name: deque(maxlen=window) for name in groups}
        self._silent = {*weights}  # weights in which no sample has had a gradient yet
        self._start = {name: fingerprint(p) for name, p in weights.items()}
        self._steps = 0

    def check(self, found: Measurement, weights: Mapping[str, Tensor]) -> list[str]:
        """What is unusual in a step, in words."""
        self._steps += 1
        self._silent &= {*found.silent}
        warnings = [f"{found.not_finite} samples have a gradient that is not finite"] if found.not_finite else []
        if found.zero > _MANY_ZEROS * found.samples:
            warnings.append(f"{found.zero} of {format_count(found.samples, 'sample')} have no gradient at all")
        if self._steps == STEPS_TO_JUDGE + 1:
            warnings += self._judge_weights(weights)
        return warnings + self._judge_layers(found)

    def _judge_weights(self, weights: Mapping[str, Tensor]) -> list[str]:
        """Name the weights that have not learnt anything in the first steps."""
        learning = {name: p for name, p in weights.items() if name in self._start and name not in self._silent}
        stays = {name: fingerprint(p) == self._start[name] for name, p in learning.items()}
        still = [name for name, same in stays.items() if same.all()]
        dead = [f"{name}[{i}]" for name in stays if name not in still for i in stays[name].nonzero().flatten().tolist()]
        self._start.clear()
        causes = {
            "no sample has had a gradient here": sorted(self._silent),
            "has gradients and has not moved: is it in the optimizer, or is its update lost in rounding?": still,
            "has not moved, in contrast to the rest of the weight: an expert that is not used?": dead,
        }
        return [f"{describe_names(names)}: {cause}" for cause, names in causes.items() if names]

    def _judge_layers(self, found: Measurement) -> list[str]:
        warnings = []
        for name, part in found.layers.items():
            before, now = self._layers[name], part["most"]
            if len(before) >= STEPS_TO_JUDGE:
                usual = statistics.median(before)
                if now > _EXPLODED * usual > 0:
                    warnings.append(f"{name}: the largest norm is {now / usual:.0f} times its usual size")
                if not now and not usual and not self._silent.issuperset(self._groups[name]):
                    warnings.append(f"{name}: no sample has a gradient here")
            if now == now:  # not NaN, which a step without finite samples has
                before.append(now)
        return warnings


@torch.no_grad()
def fingerprint(weight: Tensor) -> Tensor:
    """Numbers that change if a weight changes: one, or one for each slice of a weight with three or more dimensions.

    >>> [len(fingerprint(torch.ones(shape))) for shape in ((2, 3), (4, 2, 3), (0, 2, 3))]
    [1, 4, 0]
    """
    to_local = getattr(weight, "to_local", None)  # of the shards of FSDP2
    own = weight.detach() if to_local is None else to_local().detach()
    rows = (own.flatten(1) if own.dim() > 2 and to_local is None else own.reshape(1, -1)).double()
    return rows @ torch.linspace(1, 2, rows.shape[1], dtype=torch.float64, device=rows.device)


def describe_names(names: Sequence[str]) -> str:
    """The first of some names.

    >>> describe_names(list("abcdefg"))
    'a, b, c, d, e and 2 more'
    """
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
