"""The forward pass: follows the samples through every op, finds the uses of weights and runs them.

Other packages use the names below: the `Tracker`; `OutsideTensors`, which decides about tensors from outside;
`get_program`, what is known about the passes of a model; `Isolation`, what private training refuses besides; `Audit`,
the mode that follows memory; and the texts and tools for `coupled="contributions"`.
"""

from persample.forward.audit import Audit
from persample.forward.contributions import CONTRIBUTIONS, FirstLoss, make_advice
from persample.forward.isolation import Isolation, refuse_state
from persample.forward.known_tensors import TensorMap
from persample.forward.outputs import guard_output, refuse_mixed_outputs
from persample.forward.outside import OutsideTensors
from persample.forward.program import get_program
from persample.forward.tracker import Tracker
from persample.forward.tried import TriedFunction, TriedFunctions
