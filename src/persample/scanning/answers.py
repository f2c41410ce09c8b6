"""Answers to queries: the best of many scores, and how they are shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import torch
from torch import Tensor

from persample._internal.text import format_table, format_values


@dataclass(frozen=True, repr=False)
class Ranking:
    """Examples with their scores, best first. Iterating gives pairs of an id and its score.

    >>> ranking = Ranking(torch.tensor([17, 4]), torch.tensor([0.9, 0.25]))
    >>> ranking
    Ranking of 2 examples:
      example  score
           17    0.9
            4   0.25
    >>> list(ranking)
    [(17, 0.8999...), (4, 0.25)]
    """

    ids: Tensor
    scores: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def _repr_html_(self) -> str:
        pairs = zip(self.ids.tolist(), self.scores.tolist(), strict=True)
        return format_html_table(["example", "score"], [list(pair) for pair in pairs])

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self.ids.tolist(), self.scores.tolist(), strict=True)

    def __repr__(self) -> str:
        pairs = zip(self.ids[:_SHOWN].tolist(), self.scores[:_SHOWN].tolist(), strict=True)
        rows = [[str(i), f"{score:.4g}"] for i, score in pairs]
        end = f"\n  ... and {len(self) - _SHOWN} more" if len(self) > _SHOWN else ""
        table = format_table(rows, ["example", "score"], right={0, 1}, indent="  ")
        return f"Ranking of {len(self)} example{'s' * (len(self) != 1)}:\n{table}{end}"


_SHOWN = 10


@dataclass(frozen=True, repr=False)
class Influence:
    """The training examples with the most influence on each sample of a test batch: tensors `(samples, k)`, best first.

    A training step on one of `for_ids` lowers the loss of the test sample: its score is positive. A step on one of
    `against_ids` raises the loss: its score is negative.

    >>> Influence(torch.tensor([[4]]), torch.tensor([[2.5]]), torch.tensor([[7]]), torch.tensor([[-1.0]]))
    Influence on 1 sample, 1 example for and against:
      sample  for       against
           0  4 (+2.5)  7 (-1)
    """

    for_ids: Tensor
    for_scores: Tensor
    against_ids: Tensor
    against_scores: Tensor

    def __repr__(self) -> str:
        samples, k = self.for_ids.shape
        rows = [
            [
                str(sample),
                _format_pairs(self.for_ids[sample], self.for_scores[sample]),
                _format_pairs(self.against_ids[sample], self.against_scores[sample]),
            ]
            for sample in range(min(samples, _SHOWN_SAMPLES))
        ]
        table = format_table(rows, ["sample", "for", "against"], right={0}, indent="  ")
        end = f"\n  ... and {samples - _SHOWN_SAMPLES} more samples" if samples > _SHOWN_SAMPLES else ""
        title = f"Influence on {samples} sample{'s' * (samples != 1)}, {k} example{'s' * (k != 1)} for and against:"
        return f"{title}\n{table}{end}"

    def _repr_html_(self) -> str:
        rows = [list(row.values()) for row in self.list_rows()]
        return format_html_table(["sample", "pushes", "example", "score"], rows, "Influence", most=40)

    def list_rows(self) -> list[dict[str, Any]]:
        """One entry for each sample and example."""
        return [
            {"sample": sample, "pushes": direction, "example": i, "score": score}
            for sample in range(len(self.for_ids))
            for direction, ids, scores in (
                ("for", self.for_ids, self.for_scores),
                ("against", self.against_ids, self.against_scores),
            )
            for i, score in zip(ids[sample].tolist(), scores[sample].tolist(), strict=True)
        ]


_SHOWN_SAMPLES, _SHOWN_EXAMPLES = 8, 4


def _format_pairs(ids: Tensor, scores: Tensor) -> str:
    pairs = zip(ids.tolist()[:_SHOWN_EXAMPLES], scores.tolist(), strict=False)
    return ", ".join(f"{i} ({score:+.3g})" for i, score in pairs) + ", ..." * (len(ids) > _SHOWN_EXAMPLES)


def rank_scores(scores: Tensor, k: int) -> Influence:
    """The `k` largest and the `k` smallest of each row of scores."""
    best, worst = scores.topk(k), scores.topk(k, largest=False)
    return Influence(best.indices, best.values, worst.indices, worst.values)


class RunningTop:
    """The `k` best scores of each query and the ids of their examples, without keeping all scores.

    >>> top = RunningTop(2)
    >>> top.add(0, torch.tensor([[1.0, 5.0, 2.0]]))
    >>> top.add(3, torch.tensor([[3.0]]))
    >>> top.ids, top.scores
    (tensor([[1, 3]]), tensor([[5., 3.]]))
    """

    def __init__(self, k: int, largest: bool = True) -> None:
        self._k, self._is_largest = k, largest
        self.ids, self.scores = torch.empty(0, 0, dtype=torch.int64), torch.empty(0, 0)

    def add(self, start: int, scores: Tensor) -> None:
        """Take the scores `(queries, rows)` of the examples from `start` on."""
        best = scores.topk(min(self._k, scores.shape[1]), largest=self._is_largest)
        ids = best.indices + start
        if self.ids.numel():
            ids = torch.cat([self.ids, ids], 1)
            merged = torch.cat([self.scores, best.values], 1).topk(min(self._k, ids.shape[1]), largest=self._is_largest)
            self.ids, self.scores = ids.gather(1, merged.indices), merged.values
        else:
            self.ids, self.scores = ids, best.values


def format_html_table(header: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "", most: int = 20) -> str:
    """A table with at most `most` rows. All texts are escaped.

    >>> format_html_table(["id"], [[3], ["<b>"]], "two")
    '<table><caption>two</caption><tr><th>id</th></tr><tr><td>3</td></tr><tr><td>&lt;b&gt;</td></tr></table>'
    """
    lines = ["".join(f"<th>{escape(str(cell))}</th>" for cell in header)]
    lines += ["".join(f"<td>{escape(_format(cell))}</td>" for cell in row) for row in rows[:most]]
    if len(rows) > most:
        lines.append(f'<td colspan="{len(header)}">and {len(rows) - most:,} more</td>')
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table>{f'<caption>{escape(caption)}</caption>' if caption else ''}{body}</table>"


def _format(cell: Any) -> str:
    if cell is None:
        return ""
    return format_values(cell) if isinstance(cell, (float, list)) else str(cell)
