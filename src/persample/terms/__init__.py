"""Terms: structured per-sample gradients of one weight, with one class for each structure.

Other packages use the classes below and `add_terms`, which adds the terms of several uses; `base.Term` lists the
answers that every term gives. `Groups` and `merge_samples` turn rows of samples into rows of groups of samples.
`allocate` divides the numbers of a projected row among parameters.
"""

from persample.terms.base import Term, is_complex, sum_dense
from persample.terms.blocks import Blocks
from persample.terms.dense import Dense
from persample.terms.folded import Folded
from persample.terms.groups import Groups, add_samples, make_groups, merge_samples
from persample.terms.joined import Joined
from persample.terms.kronecker import allocate
from persample.terms.outer import Outer
from persample.terms.patches import Patches
from persample.terms.rows import Rows
from persample.terms.slices import Slices
from persample.terms.sum import Sum, add_terms

__all__ = [
    "Blocks",
    "Dense",
    "Folded",
    "Groups",
    "Joined",
    "Outer",
    "Patches",
    "Rows",
    "Slices",
    "Sum",
    "Term",
    "add_samples",
    "add_terms",
    "allocate",
    "is_complex",
    "make_groups",
    "merge_samples",
    "sum_dense",
]
