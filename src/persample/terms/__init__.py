"""The structures in which per-sample gradients come, a class each; `dense()` is what all of them have."""

from persample.terms.base import Term, dense_sum
from persample.terms.dense import Dense
from persample.terms.outer import Outer
from persample.terms.patches import Patches
from persample.terms.rows import Rows

__all__ = ["Dense", "Outer", "Patches", "Rows", "Term", "dense_sum"]
