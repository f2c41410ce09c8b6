"""What Python reads of samples: numbers, counts and decisions. Nobody can follow what it does with them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from persample.forward.detectors import Context, Detector
from persample.layouts import Call, Lost, Reduced, find_read_total


class Reads(Detector):
    """Notes what was read in a recording.

    Attributes:
        count: of numbers that may depend on several samples.
        has_values: whether the model has read values of samples, other than counts.
        decisions: what the model has read that is true or false for all samples together.
    """

    def __init__(self) -> None:
        self.count = 0
        self.has_values = False
        self.decisions: list[bool] = []

    def after(self, call: Call, result: Any, context: Context) -> None:
        if isinstance(result, Tensor) or not any(call.where):
            return
        if type(result) is bool:
            self._note_decision(call, result, context)
        if not call.facts.reads_values:
            return
        context.counted.add(result)
        context.counted.totals.update(find_read_total(call.tensors[0], call.where[0], result))
        self.count += context.batch > 1 or isinstance(call.where[0], (Lost, Reduced))
        if type(result) is not bool and context.is_inside:
            self.has_values |= call.tensors[0].is_floating_point()
        elif type(result) is not bool and context.outside is not None:
            context.outside.has_reads = True

    def _note_decision(self, call: Call, result: bool, context: Context) -> None:
        if call.facts.compares_tensors or any(isinstance(where, (Lost, Reduced)) for where in call.where):
            self.count += 1
            if context.is_inside:
                self.decisions.append(result)
