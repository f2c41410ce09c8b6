"""How single examples are learnt: margins, forgetting and confidence over the epochs of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from persample.errors import PerSampleError
from persample.monitoring.measurement import ExampleId

# What is added up for each example, and what is kept from the last time that it was seen.
_SUMS = ("seen", "margin", "probability", "square", "correct", "forgotten", "measured", "cosine")
_LAST = ("label", "loss", "given_probability", "other", "other_probability", "is_correct", "norm")
_NAMES = (*_SUMS, *_LAST)


class Curves:
    """Adds up what a classifier says about each example, by id.

    >>> curves = Curves()
    >>> for logits in (torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 1.0]])):
    ...     curves.note(["a"], logits, torch.tensor([0]))
    >>> {name: round(float(column), 3) for name, column in curves.compute_columns().items()}["aum"]
    0.5
    """

    def __init__(self) -> None:
        self._rows: dict[ExampleId, int] = {}
        self._table = torch.zeros(0, len(_NAMES), dtype=torch.float64)

    @property
    def ids(self) -> list[ExampleId]:
        """The examples that were seen, in the order of the columns."""
        return list(self._rows)

    @torch.no_grad()
    def note(self, ids: Sequence[ExampleId] | Tensor, logits: Tensor, labels: Tensor) -> None:
        """Take the outputs `(batch, classes)` of a classifier for some examples, and their labels `(batch,)`."""
        if logits.dim() != 2 or labels.shape != logits.shape[:1] or len(ids) != len(labels):
            raise PerSampleError(
                f"note() needs logits (batch, classes), and a label and an id for each; got {tuple(logits.shape)}, "
                f"{tuple(labels.shape)} and {len(ids)} ids."
            )
        rows = self._find_rows(ids)
        logits, labels = logits.detach().double().cpu(), labels.detach().long().cpu()[:, None]
        given = logits.gather(1, labels)
        others = logits.scatter(1, labels, -torch.inf)
        probabilities = logits.softmax(1)
        own = probabilities.gather(1, labels)[:, 0]
        margin = (given - others.amax(1, keepdim=True))[:, 0]
        is_correct = (margin > 0).double()
        was_correct = self._get(rows, "is_correct")
        self._add(rows, seen=1.0, margin=margin, probability=own, square=own.square(), correct=is_correct)
        self._add(rows, forgotten=was_correct * (1 - is_correct))
        other = others.argmax(1)
        self._set(rows, label=labels[:, 0], loss=-logits.log_softmax(1).gather(1, labels)[:, 0], given_probability=own)
        self._set(rows, other=other, other_probability=probabilities.gather(1, other[:, None])[:, 0])
        self._set(rows, is_correct=is_correct)

    def note_gradients(self, ids: Sequence[ExampleId] | Tensor, norms: Tensor, cosines: Tensor) -> None:
        """Take the norms of some examples' gradients, and their cosines with the other examples of the batch."""
        rows = self._find_rows(ids)
        self._add(rows, measured=1.0, cosine=cosines.double().cpu())
        self._set(rows, norm=norms.double().cpu())

    def compute_columns(self) -> dict[str, Tensor]:
        """`{name: (examples,)}`: the statistics of each example.

        `aum` is the mean margin between the logit of the label and the largest other one (Pleiss et al., 2020),
        `forgetting` the number of times that the example was right and is wrong the next time (Toneva et al., 2019).
        `confidence`, `variability` and `correctness` are mean and deviation of the label's probability, and the share
        of the times at which it was right (Swayamdipta et al., 2020). `coherence` is the mean cosine of the gradient
        with the sum of the others in its batch. The other columns are of the last time.
        """
        found = dict(zip(_NAMES, self._table.unbind(1), strict=True))
        seen, measured = found["seen"], found["measured"]
        mean = found["probability"] / seen
        return {
            **{name: found[name] for name in ("label", "loss", "given_probability", "other", "other_probability")},
            "norm": found["norm"].where(measured > 0, torch.nan),
            "aum": found["margin"] / seen,
            "forgetting": found["forgotten"],
            "confidence": mean,
            "variability": (found["square"] / seen - mean.square()).clamp(min=0).sqrt(),
            "correctness": found["correct"] / seen,
            "coherence": found["cosine"] / measured,
        }

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs."""
        return {"ids": self.ids, "table": self._table.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._rows = {i: row for row, i in enumerate(state["ids"])}
        self._table = state["table"].clone()

    def _find_rows(self, ids: Sequence[ExampleId] | Tensor) -> Tensor:
        given = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        rows = torch.tensor([self._rows.setdefault(i, len(self._rows)) for i in given], dtype=torch.long)
        if (missing := len(self._rows) - len(self._table)) > 0:
            self._table = torch.cat([self._table, self._table.new_zeros(missing, len(_NAMES))])
        return rows

    def _get(self, rows: Tensor, name: str) -> Tensor:
        return self._table[rows, _NAMES.index(name)]

    def _set(self, rows: Tensor, **values: Tensor) -> None:
        for name, value in values.items():
            self._table[rows, _NAMES.index(name)] = value.double()

    def _add(self, rows: Tensor, **values: Tensor | float) -> None:
        for name, value in values.items():
            added = torch.as_tensor(value, dtype=torch.float64).expand(len(rows))
            self._table[:, _NAMES.index(name)].index_add_(0, rows, added)
