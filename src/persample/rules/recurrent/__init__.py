"""RNN, LSTM and GRU: backpropagation through time with one gradient per sample.

A call with several layers is rewritten as one `recurrent_layer` per layer with dropout in between, as torch does
internally (`calls`). The rule of `recurrent_layer` (`layer`) recomputes the gates of all steps at once, from the inputs
and outputs of the forward pass. It then scans backwards over the time steps for the gradients of the gates (`cells`,
`bptt`). Given these, each weight is the weight of a linear map. The gradient of the input follows too, so torch's own
backward is not run. Single steps (`torch.lstm_cell`, ...) have rules in `steps`.
"""

from persample.rules.recurrent import calls, layer, steps
from persample.rules.recurrent.cells import CELLS
