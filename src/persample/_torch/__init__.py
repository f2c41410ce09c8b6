"""Every private name of torch that persample uses.

No other package may use one (`tests/test_structure.py`). Each entry says what the name gives and which feature needs
it. If the installed torch lacks a name, `import persample` still works: the first use of the name raises a
PerSampleError that names the feature.
"""

import torch

from persample._torch.autograd import *
from persample._torch.compiler import *
from persample._torch.functions import *
from persample._torch.lookup import *
from persample._torch.memory import *
from persample._torch.modes import *
from persample._torch.modules import *
from persample._torch.numbers import *
from persample._torch.parallel import *

warn_if_untested(torch.__version__)
