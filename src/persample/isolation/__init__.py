"""What private training refuses although it has per-sample gradients: detectors that it adds to its recordings.

- `later_steps`: samples that reach later steps other than through the noisy sum
- `places`: results that depend on a sample's number in the batch
- `loss_code`: numbers of samples that Python has read, and that may change what the code around the model does
- `exposed`: memory of samples that code outside torch has got, and may write unseen
- `rows_before`: which samples of the loader the rows of the model's arguments are

Private training uses `Isolation`, one for each watched model, and `Rows`.
"""

from persample.isolation.later_steps import LaterSteps
from persample.isolation.loss_code import LossCode
from persample.isolation.places import Places
from persample.isolation.rows_before import Rows, RowsBefore
from persample.recording import Guard

__all__ = ["Isolation", "Rows", "RowsBefore"]


class Isolation(Guard):
    """What isolates the steps of a watched model."""

    def __init__(self) -> None:
        places = Places()
        self.loss_code = LossCode(places)
        self.rows = RowsBefore(self.loss_code.exposed)
        super().__init__((LaterSteps(), places, self.loss_code), self.rows)
