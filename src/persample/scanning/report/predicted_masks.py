"""Masks that the scanned model predicts, for the examples in the table of a report."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from persample.losses import LossFunction, get_ignored_label
from persample.scanning.errors import ScanError
from persample.scanning.measure import Measurement, prepare_model
from persample.scanning.predictions import Outputs
from persample.scanning.report.masks import MaskedImage, find_masked_image
from persample.scanning.report.previews import Deferred, find_content
from persample.scanning.results import Scan
from persample.scanning.source import Collate, Source
from persample.scanning.store import Array

_EXAMPLES = 8  # to look at, of all


def find_mask_reader(scan: Scan, source: Source | None, stack: ExitStack) -> tuple[MaskReader | None, str]:
    """What shows predicted masks if the data has masks and the scan has its model; else None.

    With it comes a sentence on why the masks cannot be predicted, if so. The scanned weights stay loaded until the
    stack is closed.
    """
    if source is None or not scan.has_model:
        return None, ""
    if not any(find_masked_image(example) is not None for example in source.read_examples([0]).values()):
        return None, ""
    try:
        model, loss_fn = stack.enter_context(scan.load_model())
    except ScanError as error:
        return None, f"The masks that the model predicts are not shown. {error}"
    some = source.read_examples(range(min(_EXAMPLES, len(scan))))
    return MaskReader(model, loss_fn, source.collate, list(some.values())), ""


class MaskReader:
    """A function for `show` of a report: adds the mask that the model predicts to images with masks.

    The model is called by the loss of the scan, as in the scan, for each example in the table. An example for which
    this fails is shown with its given mask alone. If the model has one score per pixel, `some` examples show whether
    scores are probabilities: numbers from 0 to 1.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction, collate: Collate, some: Sequence[Any]) -> None:
        self._measurement, self._collate = Measurement(model, loss_fn, quantities=["loss", "norm"]), collate
        self._ignored, self._some = get_ignored_label(loss_fn), some

    def __call__(self, example: Any) -> Any:
        found = find_masked_image(example)
        return find_content(example) if found is None else Deferred(found, lambda: self._complete(example, found))

    def _complete(self, example: Any, found: MaskedImage) -> MaskedImage:
        given = found.given.copy()
        given[given == self._ignored] = -1
        return replace(found, given=given, predicted=self._predict(example, given))

    def _predict(self, example: Any, given: Array) -> Array | None:
        """The classes `(H, W)` that the model predicts; None if its outputs are no scores of the given classes."""
        scores = self._compute_scores(example)
        if scores is None or scores.shape[1:] != given.shape or given.max() >= max(2, len(scores)):
            return None
        if len(scores) > 1:
            return scores.argmax(0).numpy()
        return (scores[0] > (0.5 if self._are_probabilities else 0.0)).long().numpy()

    @cached_property
    def _are_probabilities(self) -> bool:
        found = [scores for example in self._some if (scores := self._compute_scores(example)) is not None]
        return bool(found) and all(bool(((scores >= 0) & (scores <= 1)).all()) for scores in found)

    @torch.no_grad()
    def _compute_scores(self, example: Any) -> Tensor | None:
        """`(classes, H, W)`: the output of the model for an example; None if it has another shape."""
        outputs = Outputs(1, 0)
        try:
            with prepare_model(self._measurement, None), outputs.capture(self._measurement.model):
                self._measurement.losses.compute_any(self._collate([example]))
        except Exception:  # a preview must not fail; if only the loss fails, the outputs are there
            pass
        scores = outputs.get()
        if scores is None or scores.dim() not in (3, 4):
            return None
        return (scores if scores.dim() == 4 else scores[:, None])[0].cpu()
