"""RNN, LSTM and GRU.

A call with several layers is rewritten as one call of `layer` for each, with dropout between them, which is what torch
does inside (`calls`). The rule of `layer` (`terms`) computes the gates of all steps at once, from the inputs and the
outputs of the forward pass, and goes back through the steps for the gates' gradients (`cells`, `scan`); from there on
every weight is that of a linear map. As these give the gradient of the input too, torch's own backward is not run.
"""

from persample.rules.recurrent import calls, steps, terms
from persample.rules.recurrent.cells import CELLS

__all__ = ["CELLS", "calls", "steps", "terms"]
