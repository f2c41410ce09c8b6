"""Where the samples lie: in the arguments of a call of a model, and in a batch of data."""

from persample.batches.arguments import Arguments
from persample.batches.data import Batch
from persample.batches.dims import BatchDim, BatchSizesDiffer, NoSamplesFound, WrongBatchSize
