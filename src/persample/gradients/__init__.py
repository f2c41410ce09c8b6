"""The per-sample gradients as a lazy matrix, and every answer that comes from its structure.

Each kind of gradients has two parts: an *intake*, which a recording fills, and what the user asks. Other packages use
`PerSampleGradients` of `KeptTerms`, which keeps everything; `StreamedNorms` of a `NormsIntake` and `StreamedClip` of a
`ClipIntake`, which keep one answer; `ReducedTerms` of a `ReducedIntake`, what a function makes of the terms;
`RecordedGradients` of an `Intake`, what these have in common; `LossGradients` of one `KeptTerms` for each of several
losses; `Gradients`, any of these. An intake is made of a `RecordedBatch`: the recorded parameters, the `BatchRows`, and
what the forward pass noted.

`Bound` says how to clip; `NonFinite`, what happens to samples whose gradient is not finite; `UnitOptions`, how samples
are combined to units. `make_rows` makes gradients from terms, and `find_term` is what they have for a parameter.
`make_projection` makes a random projection of the rows, and a `Stack` has the parameters of one shape that it projects
together. `sample_labels` draws labels for the Fisher matrix; `find_sides` finds the factors of gradients as matrices.
"""

from persample.gradients.base import RecordedGradients
from persample.gradients.buffers import release_memory
from persample.gradients.clip_intake import ClipIntake
from persample.gradients.clipping import LEAST_BOUND, Bound, check_max_norm, compute_clip_factors
from persample.gradients.curvature import find_sides, sample_labels
from persample.gradients.explanation import TriedFunction, describe_tried
from persample.gradients.intake import Intake, RecordedBatch
from persample.gradients.kept_terms import KeptTerms
from persample.gradients.losses import LossGradients
from persample.gradients.matrix import PerSampleGradients, find_term, make_rows
from persample.gradients.projection import METHODS as PROJECTION_METHODS
from persample.gradients.projection import Method as ProjectionMethod
from persample.gradients.projection import Projection, make_projection
from persample.gradients.reduced import Reduce, ReducedIntake, ReducedTerms
from persample.gradients.rows import BatchRows
from persample.gradients.squared_norms import NonFinite
from persample.gradients.stack import Stack
from persample.gradients.streamed import StreamedClip, StreamedNorms
from persample.gradients.streamed_norms import NormsIntake
from persample.gradients.units import UnitIds, UnitOptions, UnitReduction

Gradients = RecordedGradients | LossGradients
