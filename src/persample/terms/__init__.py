"""Terms: structured per-sample gradients of one weight, with one class for each structure.

Other packages use the names below: the classes, and `add_terms`, which adds the terms of several uses. `Term` lists the
answers that every term gives. `Groups` and `merge_samples` turn rows of samples into rows of groups of samples.
`allocate` divides the numbers of a projected row among parameters, which `KroneckerSketch`, `SparseSketch` or
`TensorSketch` compute. `multiply` and `compute_tanh` are computed by the library that
`choose_library` names, or that `use_library` sets.
"""

from persample.terms.base import (
    Term,
    compute_row_norms,
    convert_to_double,
    find_factors,
    is_complex,
    iterate_samples,
    map_factors,
    sum_dense,
    widen_factors,
)
from persample.terms.blocks import Blocks
from persample.terms.cost import Algorithm, choose_norm_algorithm, force_algorithm
from persample.terms.dense import Dense, sum_to_shape
from persample.terms.folded import Folded
from persample.terms.groups import Groups, add_samples, make_groups, merge_samples
from persample.terms.joined import Joined
from persample.terms.kronecker import KroneckerSketch, Sides, allocate, split_shape
from persample.terms.libraries import SETTING, Library, choose_library, find_maker, use_library
from persample.terms.outer import Outer, SharedProducts
from persample.terms.patches import Patches
from persample.terms.products import compute_tanh, make_accumulator, multiply, prefers_onednn
from persample.terms.rounding import add_lost_squares
from persample.terms.rows import Rows
from persample.terms.sketch import Sketch, SparseSketch, TensorSketch
from persample.terms.slices import Slices
from persample.terms.sum import Sum, add_terms

__all__ = [
    "SETTING",
    "Algorithm",
    "Blocks",
    "Dense",
    "Folded",
    "Groups",
    "Joined",
    "KroneckerSketch",
    "Library",
    "Outer",
    "Patches",
    "Rows",
    "SharedProducts",
    "Sides",
    "Sketch",
    "Slices",
    "SparseSketch",
    "Sum",
    "TensorSketch",
    "Term",
    "add_lost_squares",
    "add_samples",
    "add_terms",
    "allocate",
    "choose_library",
    "choose_norm_algorithm",
    "compute_row_norms",
    "compute_tanh",
    "convert_to_double",
    "find_factors",
    "find_maker",
    "force_algorithm",
    "is_complex",
    "iterate_samples",
    "make_accumulator",
    "make_groups",
    "map_factors",
    "merge_samples",
    "multiply",
    "prefers_onednn",
    "split_shape",
    "sum_dense",
    "sum_to_shape",
    "use_library",
    "widen_factors",
]
