"""The batch size of a recording, where only calls of parts of the model or single ops tell it."""

from __future__ import annotations

from collections.abc import Callable, Collection

from persample.errors import PerSampleError

_ADVICE = (
    "Pass samples= with a tensor that has one row for each sample (for a watched model: add_samples), or batch_size=; "
    "name tensors that are the same for all samples in constants=."
)


class Readings:
    """Chooses the batch size by the tensors of calls, and refuses calls that disagree about it.

    A part may be called with a tensor that is the same for all samples, such as an index of positions. If nothing but
    calls of parts tells the batch size, it cannot be distinguished from the samples.
    """

    def __init__(self, given: int | None) -> None:
        self._given = given  # by the user
        self._first: tuple[int, Callable[[], str]] | None = None  # what the first call of a part has told

    def choose(self, sizes: Collection[int], batch: int | None, place: Callable[[], str]) -> int | None:
        """The batch size, None if a call shows no samples.

        Args:
            sizes: the sizes that the tensors of the call may have in their batch dimensions.
            batch: the batch size of the recording, None if it is not known.
            place: returns what is called, in words, for errors.

        Raises:
            PerSampleError: two sizes fit.
        """
        known = self._given if batch is None else batch
        if known is not None and known in sizes:
            return known
        several = sorted({*sizes} - {1}) or sorted(sizes)  # a dimension of size 1 is expanded to any other
        if known is not None and (not self._first or not several or several == [1]):
            return None
        if known is not None or len(several) > 1:
            first, first_place = self._first or (several.pop(0), None)
            before = f" as in the first call, of {first_place()}," if first_place is not None else ""
            raise PerSampleError(
                f"The size of the batch is ambiguous in a call of {place()}: {first} samples,{before} or {several[0]} "
                f"samples? {_ADVICE}"
            )
        if several:
            self._first = several[0], place
        return several[0] if several else None
