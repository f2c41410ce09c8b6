"""The backward pass: turns the gradient of each use into terms and delivers them by parameter.

Other packages use the names below: the `Collector`, and the `Receiver` of what it finds; `Tap`, which reads the
gradient of the result of a use, `RetainedUse` for small results, `RecordedUse` and `Plan`, how a use is computed;
and `PositionSplitter`, for rows of positions.
"""

from persample.backward.collector import Collector, NoteLoss, Receiver, asked_sources
from persample.backward.entry_moves import is_entry_move
from persample.backward.positions import PositionSplitter, group_by_rows
from persample.backward.recorded_use import Plan, RecordedUse, Tap, is_tap
from persample.backward.retained import MAX_ENTRIES, RetainedUse
