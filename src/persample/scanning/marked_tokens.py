"""Texts with the tokens marked that a language model predicts worst."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from persample.losses import call_model
from persample.scanning.errors import ScanError
from persample.scanning.predictions import find_logits
from persample.scanning.report.previews import MarkedText, find_content


def mark_worst_tokens(
    model: nn.Module, tokenizer: Any, max_length: int = 128, count: int = 5
) -> Callable[[Any], MarkedText | None]:
    """A function for `show` of a report: the text of an example with its `count` tokens of largest loss marked.

    `tokenizer` is a fast one of Hugging Face, which knows where its tokens are in a text. In an example with a prompt,
    only tokens of the completion are marked.
    """

    @torch.no_grad()
    def show(example: Any) -> MarkedText | None:
        text = find_content(example)
        if not isinstance(text, str):
            return None
        prompt = example.get("prompt", "") if isinstance(example, dict) else ""
        if prompt and not text.startswith(prompt):
            prompt = ""
        encoded = tokenizer(
            [text], truncation=True, max_length=max_length, return_offsets_mapping=True, return_tensors="pt"
        )
        places = encoded.pop("offset_mapping")[0, 1:]
        was_training = model.training
        model.eval()
        try:
            logits = find_logits(call_model(model, dict(encoded)))
        finally:
            model.train(was_training)
        if logits is None or logits.dim() != 3:
            raise ScanError("The outputs of the model have no scores for each token, so that none can be marked.")
        losses = F.cross_entropy(logits[0, :-1].float(), encoded["input_ids"][0, 1:], reduction="none")
        counts = (places[:, 1] > len(prompt)) & (places[:, 1] > places[:, 0])
        worst = losses.masked_fill(~counts, -torch.inf).topk(min(count, int(counts.sum()))).indices
        return MarkedText(text, [(int(start), int(end)) for start, end in places[worst]])

    return show
