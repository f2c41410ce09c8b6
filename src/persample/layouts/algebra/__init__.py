"""How torch functions move the samples, by their definitions: a declaration for each function, a file for each family.

From the layouts of the arguments and the shapes, the layout of the result follows by arithmetic, for all sizes, dtypes
and values. `find_declared_motion` is for `persample.layouts`; `declare` adds a function.
"""

from persample.layouts.algebra import (
    dims,
    layers,
    losses,
    pointwise,
    products,
    sequences,
    shapes,
)
from persample.layouts.algebra.engine import DECLARATIONS, declare, find_declared_motion, get_argument
from persample.layouts.algebra.size_free import BY_SHAPE, SIZE_FREE, find_size_free_layout
