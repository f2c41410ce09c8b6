"""The forward pass: follows the samples through every op, finds the uses of weights and runs them.

Other packages use the names below: the `Tracker` and its `FollowMode`; `OutsideTensors`, which decides about tensors
from outside; `get_program`, what is known about the passes of a model; `Audit`, the mode that follows memory;
`Detector`, the interface of what watches besides, and functions for detectors; and the texts and tools for
`coupled="contributions"`.
"""

from persample.forward.audit import Audit
from persample.forward.contributions import ADVICE, CONTRIBUTIONS, FirstLoss, make_advice
from persample.forward.detectors import Context, Detector
from persample.forward.early import BEFORE, FollowedBatch
from persample.forward.fastpath import LAYERS
from persample.forward.gradient_hooks import is_own_function
from persample.forward.known import TensorMap
from persample.forward.mode import FollowMode
from persample.forward.outside import OutsideTensors
from persample.forward.program import get_program
from persample.forward.results import guard_output, is_refused, refuse_mixed_outputs
from persample.forward.tracker import Tracker
