"""The backward pass: turns the gradient of each use into terms and delivers them by parameter.

Other packages use the names below: the `Collector`; `Tap`, which reads the gradient of the result of a use,
`RetainedUse` for small results, `RecordedUse` and `Plan`, how a use is computed; `PositionSplitter`, for rows of
positions; and `compute_parameter_gradients`, in place of `autograd.grad`.
"""

from persample.backward.collector import Collector, Deliver, asked_sources
from persample.backward.entry_moves import is_entry_move
from persample.backward.parameter_gradients import compute_parameter_gradients, make_refusal
from persample.backward.positions import PositionSplitter, group_by_rows
from persample.backward.recorded_use import Plan, RecordedUse
from persample.backward.retained import MAX_ENTRIES, RetainedUse
from persample.backward.tap import Tap, is_tap
