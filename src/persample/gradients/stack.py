"""What a recording keeps for one parameter, or for several of one shape that are computed as one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from persample.errors import PerSampleError
from persample.gradients.clipping import add_weighted_rows
from persample.terms import Term, find_factors


@dataclass(slots=True, eq=False)
class Stack:
    """One term for some parameters of one shape: the samples of each parameter after those of the last.

    The layers of a transformer have such parameters. One call then answers for all of them.

    >>> import torch
    >>> from persample.terms import Dense
    >>> stack = Stack(["a", "b"], Dense(torch.ones(6, 4)))
    >>> stack.measure()[0].shape, stack.sum(torch.ones(3))["b"]
    (torch.Size([2, 3]), tensor([3., 3., 3., 3.]))
    """

    names: Sequence[str]
    term: Term
    _versions: list[tuple[Tensor, int]] = field(default_factory=list, init=False)

    @property
    def batch(self) -> int:
        return self.term.batch // len(self.names)

    def measure(self, compact: bool = False, summed: bool = True) -> tuple[Tensor, Tensor | None]:
        """`(len(names), batch)`: the squared norms, and their floors or None; see `Term.measure`.

        With `compact`, the dense form is kept if the norms needed it and it is smaller.
        """
        squares, floor, term = self.term.measure(compact=compact, summed=summed)
        self.replace_term(term)
        count = len(self.names)
        return squares.view(count, -1), None if floor is None else floor.view(count, -1)

    def replace_term(self, term: Term) -> None:
        """Keep an equal term in another form."""
        if term is not self.term:
            self.term = term
            if self._versions:
                self.note_versions()

    def compute_exact_row(self, name: str, sample: int) -> Tensor:
        """The row of a sample for one parameter, in float64."""
        return self.term.compute_exact_row(self.names.index(name) * self.batch + sample)

    def clear_samples(self, is_cleared: Tensor) -> Stack:
        """The same with rows of zeros where a mask `(batch,)` is true, also if their rows are not finite."""
        mask = is_cleared.to(next(find_factors(self.term)).device)
        return Stack(self.names, self.term.clear_samples(mask.repeat(len(self.names))))

    def sum(self, weights: Tensor, exact: Collection[int] = ()) -> dict[str, Tensor]:
        """`{name: shape}`: the sum over n of weights[n] g_n for each parameter, for samples in `exact` in float64."""
        if len(self.names) == 1 or exact:
            return {name: add_weighted_rows(term, weights, exact) for name, term in self.split()}
        return dict(zip(self.names, self.term.sum_each(weights, len(self.names)).unbind(), strict=True))

    def split(self) -> Iterator[tuple[str, Term]]:
        """Each parameter and its own term."""
        if len(self.names) == 1:
            yield self.names[0], self.term
            return
        batch = self.batch
        for i, name in enumerate(self.names):
            yield name, self.term.some(i * batch, (i + 1) * batch)

    def note_versions(self) -> None:
        """From now on, `check_unchanged` refuses factors that were changed in place."""
        self._versions = [(t, t._version) for t in find_factors(self.term)]

    def check_unchanged(self) -> None:
        """Raise if a factor was changed in place since `note_versions`."""
        for tensor, version in self._versions:
            if tensor._version != version:
                raise PerSampleError(
                    f"An activation behind the gradients of '{self.names[0]}' was changed in place after the backward "
                    "pass. Read the answers before you change it, or change a copy."
                )
