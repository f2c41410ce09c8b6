"""Where the samples of a batch lie in a tensor (a layout), and how a call of a torch function moves them (a motion).

Most functions of torch declare how they move the samples, and the layout of a result follows by arithmetic (`algebra`).
A function that selects or reorders samples is applied to a tensor of sample ids (`by_ids`), one that takes an index or
a mask too (`by_index`). Any other function is tried with a larger batch and with other values for some samples
(`by_trial`). What a call does is kept under its key, which holds everything that decides about it (`call`, `motion`).

How a loss combines the samples is read from the calls that make it. A reduction makes a sum or a mean (`reductions`),
and a mean has a divisor, which is held constant or refused (`means`, `divisors`). A number that scales such a sum is a
size, a count, or a factor (`scales`); what is known about numbers is kept in `counts`. `parts` computes each sample's
part of a sum.

Other packages use the names below.
"""

from persample.layouts.algebra import (
    BY_SHAPE,
    DECLARATIONS,
    SIZE_FREE,
    find_declared_motion,
    find_size_free_layout,
    get_argument,
)
from persample.layouts.algebra.engine import move as move_layout
from persample.layouts.algebra.sequences import make_packed_layout
from persample.layouts.by_ids import find_layout_of_base, find_layout_of_view, has_mixed_pairs
from persample.layouts.by_trial import find_motion_by_trial, has_different_orders
from persample.layouts.call import HAS_PARAMETERS, HAS_SAMPLES, Call, Key, make_call, make_size_free_key
from persample.layouts.counts import CountedSizes, Scale, SizesRead, Totals, find_listed_total, find_read_total
from persample.layouts.divisors import (
    EVEN,
    Divisor,
    DivisorMode,
    SampleUnits,
    describe_divisors,
    find_own_factors,
    make_sample_units,
)
from persample.layouts.find import find_motion, find_plain_layout, give_to_one_sample, mark_plain
from persample.layouts.ids import add_samples_to_layout, make_layout, make_sample_ids
from persample.layouts.indexing import Indexing
from persample.layouts.layout import (
    Crossed,
    Divided,
    Layout,
    Lost,
    Reduced,
    Reduction,
    Scattered,
    Where,
    lose_entries,
    make_pattern,
)
from persample.layouts.motion import MEMO, Effect, Motion, make_uniform_motion
from persample.layouts.parts import NoParts, Summed
from persample.layouts.reductions import make_reduced
from persample.layouts.samples import (
    Owners,
    has_equal_shares,
    join_samples,
    place_rows,
    replace_samples,
    split_samples,
    take_sample,
)
from persample.layouts.within_units import enter_units, find_motion_with_units
