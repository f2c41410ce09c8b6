"""Texts with the tokens marked that are behind an example's gradient, or that a language model predicts worst."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample.losses import LossFunction, call_model
from persample.scanning.datasets import PretrainedTokenizer, TextCollator, text_losses
from persample.scanning.errors import ScanError
from persample.scanning.measure import Measurement, prepare_model
from persample.scanning.predictions import find_logits
from persample.scanning.report.previews import Deferred, MarkedText, find_content
from persample.scanning.source import move_to_device
from persample.scanning.tokens import measure_tokens


class TokenValues(NamedTuple):
    """What was measured for the tokens of a text.

    Attributes:
        text: the text.
        places: start and end of each token in the text.
        values: `{kind: (tokens,)}`. "token_gradient" is the norm of each token's part of the gradient, "token_loss" the
            loss of each token that counts, NaN for the others. What could not be measured is left out.
        reason: why there is no "token_gradient"; empty if there is.
    """

    text: str
    places: list[tuple[int, int]]
    values: dict[str, Tensor]
    reason: str

    def mark(self, count: int) -> MarkedText:
        """The text, with the `count` tokens of the largest values marked for each kind, but at most half of them."""
        marks = {}
        for kind, values in self.values.items():
            values = values.nan_to_num(0.0, posinf=0.0)  # neither of them is marked
            known = int((values > 0).sum())
            order = values.topk(min(count, (known + 1) // 2)).indices
            marks[kind] = [self.places[i] for i in order.tolist()]
        return MarkedText(self.text, marks, self.reason)


class TokenMarker:
    """A function for `show` of a report: from an example to its text with `count` marked tokens.

    Marked are the tokens with the largest parts of the example's gradient (`grads.by_position()`) and, for language
    models, by a switch of the page, those with the largest losses. Only the examples in the table are measured, with a
    backward pass each. The model is in evaluation mode meanwhile, and is not changed.

    Args:
        model: the model of the scan, with the scanned weights.
        tokenizer: a fast tokenizer of Hugging Face, which knows where its tokens are in a text.
        max_length: the maximum number of tokens, as in the scan.
        count: the number of tokens to mark.
        loss_fn: the loss of the scan, for batches of a `TextCollator`.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        max_length: int = 128,
        count: int = 5,
        loss_fn: LossFunction = text_losses,
    ) -> None:
        self._tokenizer, self._count = PretrainedTokenizer(tokenizer, max_length), count
        if not self._tokenizer.knows_places:
            raise ScanError("The tokenizer does not know where its tokens are in a text. Pass a fast tokenizer.")
        self._collate = TextCollator(self._tokenizer)
        self._measurement = Measurement(model, loss_fn, quantities=["loss", "norm"])

    def __call__(self, example: Any) -> Deferred | None:
        """The text of an example, to be marked; None if it is no text."""
        text = find_content(example)
        return Deferred(text, lambda: self._mark(example, text)) if isinstance(text, str) else None

    def _mark(self, example: Any, text: str) -> MarkedText:
        try:
            return self.measure(example).mark(self._count)
        except Exception as error:  # a report must not fail for a preview
            return MarkedText(text, {}, _describe(error))

    def measure(self, example: Any) -> TokenValues:
        """The values of the tokens of an example: a text, or a dict with a text as a scan reads it."""
        text = find_content(example)
        places = self._tokenizer.find_places(text)
        is_token = places[:, 1] > places[:, 0]
        shown = [(int(start), int(end)) for start, end in places[is_token]]
        if not shown:
            return TokenValues(text, [], {}, "the text has no token")
        batch = self._collate([{**(example if isinstance(example, Mapping) else {}), "text": text}])
        batch = move_to_device(batch, self._measurement.device)
        with prepare_model(self._measurement, None):
            gradient, reason = self._measure_gradient(batch, len(places))
            found = {"token_gradient": gradient, "token_loss": self._measure_loss(batch)}
        values = {kind: value.cpu()[is_token] for kind, value in found.items() if value is not None}
        return TokenValues(text, shown, values, reason)

    def _measure_gradient(self, batch: Any, length: int) -> tuple[Tensor | None, str]:
        """The norm of each token's part of the gradient; or None, and the reason why it cannot be measured."""
        try:
            norms = measure_tokens(self._measurement.model, self._measurement.loss_fn, batch, length, nonfinite="keep")
        except Exception as error:  # losses may be there, although this answer is not
            return None, _describe(error)
        if not norms.any():
            return None, "no part of the gradient belongs to one token"
        return norms[0], ""

    @torch.no_grad()
    def _measure_loss(self, batch: Any) -> Tensor | None:
        """The loss of each token that a language model predicts, NaN for the others; None for other models."""
        if "label" in batch:
            return None
        tokens = batch["tokens"]
        try:
            logits = find_logits(call_model(self._measurement.model, dict(tokens)))
        except Exception:  # the model takes other arguments
            return None
        ids = tokens["input_ids"][0]
        if logits is None or logits.dim() != 3 or logits.shape[1] != len(ids):
            return None
        losses = F.cross_entropy(logits[0, :-1].float(), ids[1:], reduction="none")
        is_real = tokens.get("attention_mask", torch.ones_like(tokens["input_ids"]))[0].bool()
        counts = is_real[1:] & is_real[:-1] & batch.get("completion_mask", is_real[None])[0, 1:].bool()
        return F.pad(losses.masked_fill(~counts, torch.nan), (1, 0), value=torch.nan)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
