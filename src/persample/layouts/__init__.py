"""How an op moves the samples of a batch: from where they lie in its arguments to where they lie in its result.

There is no table of ops. An op that only moves entries (`MOVES`) is applied to a tensor that holds, for every entry,
the number of its sample: the result says exactly where each sample went. Any other op is tried:

1.  on shapes: run on the meta device with a batch of B and of B + 1, one dim of the result grows: the samples lie
    there. None: they were reduced together. Two: they were crossed.
2.  on values: run with invented numbers, and again with half of the samples changed. The entries that are said to be
    of the others must stay the same. This is what notices a softmax over the batch, a `cumsum` along it, or
    attention from one sample to the others, all of which keep their shapes.

What was found holds for the shapes it was found for, so it is remembered by them (`motion_of`). If it was found alike
for two sizes of the batch, and nothing else in the call goes with that size, it holds for all sizes (`general`).
"""

from persample.layouts import embedding_bag, known, recurrent
from persample.layouts.cache import CACHE
from persample.layouts.call import Op, op_of
from persample.layouts.counts import CountedSizes
from persample.layouts.find import call_simple, motion, motion_of
from persample.layouts.motion import Motion

__all__ = [
    "CACHE",
    "CountedSizes",
    "Motion",
    "Op",
    "call_simple",
    "embedding_bag",
    "known",
    "motion",
    "motion_of",
    "op_of",
    "recurrent",
]
