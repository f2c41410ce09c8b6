"""The per-sample gradients as a lazy matrix, and every answer that comes from its structure.

Other packages use `PerSampleGradients`, which keeps everything; `StreamedNorms` and `StreamedClip`, which keep one
answer; `RecordedGradients`, what the three have in common; `LossGradients`, for several losses; `Gradients`, any of
these; `LossReduction`, how the loss combines the samples; `Bound`, how to clip; `NonFinite`, what happens to samples
whose gradient is not finite; `UnitOptions`, how samples are combined to units; `make_projection`, a random projection
of the rows, and `Stack`, the parameters of one shape that it projects together; `sample_labels`, labels for the Fisher
matrix; `find_sides`, the factors of gradients as matrices; and `release_memory`.
"""

from persample.gradients.base import RecordedGradients
from persample.gradients.buffers import release_memory
from persample.gradients.clipping import LEAST_BOUND, Bound, check_max_norm, compute_clip_factors
from persample.gradients.curvature import find_sides, sample_labels
from persample.gradients.explanation import describe_tried
from persample.gradients.losses import LossGradients
from persample.gradients.matrix import PerSampleGradients
from persample.gradients.projection import METHODS as PROJECTION_METHODS
from persample.gradients.projection import Method as ProjectionMethod
from persample.gradients.projection import Projection, make_projection
from persample.gradients.reduction import LossReduction
from persample.gradients.squared_norms import NonFinite
from persample.gradients.stack import Stack
from persample.gradients.streamed import StreamedClip, StreamedNorms
from persample.gradients.units import UnitIds, UnitOptions, UnitReduction

Gradients = RecordedGradients | LossGradients

__all__ = [
    "LEAST_BOUND",
    "PROJECTION_METHODS",
    "Bound",
    "Gradients",
    "LossGradients",
    "LossReduction",
    "NonFinite",
    "PerSampleGradients",
    "Projection",
    "ProjectionMethod",
    "RecordedGradients",
    "Stack",
    "StreamedClip",
    "StreamedNorms",
    "UnitIds",
    "UnitOptions",
    "UnitReduction",
    "check_max_norm",
    "compute_clip_factors",
    "describe_tried",
    "find_sides",
    "make_projection",
    "release_memory",
    "sample_labels",
]
