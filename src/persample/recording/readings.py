"""The batch size of a recording, where only calls of parts of the model or single ops tell it."""

from __future__ import annotations

from collections.abc import Collection

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
        self._first = ""  # what was chosen by the first call of a part, in words

    def choose(self, sizes: Collection[int], batch: int | None, place: str) -> int | None:
        """The batch size, None if a call shows no samples.

        Args:
            sizes: the sizes that the tensors of the call may have in their batch dimensions.
            batch: the batch size of the recording, None if it is not known.
            place: what is called, in words.

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
            first = self._first or f"{several.pop(0)} samples"
            raise PerSampleError(
                f"The size of the batch is ambiguous in a call of {place}: {first}, or {several[0]} samples. {_ADVICE}"
            )
        if several:
            self._first = f"{several[0]} samples, as in the first call, of {place}"
        return several[0] if several else None
