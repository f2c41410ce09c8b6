"""The number of examples in a batch of a scan, where the user has not chosen it."""

from __future__ import annotations

import torch
from torch import Tensor

from persample.losses import compute_loss
from persample.scanning.measure import Measurement, prepare_model
from persample.scanning.source import DEFAULT_BATCH_SIZE, Source, move_to_device

_LARGEST = 256

# What the forward pass of a batch may save for the backward pass. Larger batches share the time that Python takes for
# each op among more examples, but their activations do not stay in the cache. Measured on the CNN of `benchmarks.scan`
# (130 kB for an example), as a ratio to a plain pass in batches of 64: a recording takes 1.52, 1.37, 1.24 and 1.22 in
# batches of 64, 128, 256 and 512, and a plain pass 1.00, 0.97, 0.92 and 0.97.
_MAX_SAVED = 2**25

# A scan measures its first batch twice. With larger batches, a scan of 256 images with that CNN took 1.5 times as long.
_LEAST_BATCHES = 16


def choose_batch_size(measurement: Measurement, source: Source, shard_size: int) -> int:
    """64, or up to 256 if the model saves little for an example, all examples have one shape, and there are many.

    The result depends on the model and the data only, so that a scan that is continued has the same batches.
    """
    largest = min(_LARGEST, shard_size, (source.size or 0) // _LEAST_BATCHES)
    if not source.has_equal_shapes or largest < 2 * DEFAULT_BATCH_SIZE:
        return DEFAULT_BATCH_SIZE
    try:
        with prepare_model(measurement, None):
            saved = _count_saved_bytes(measurement, source.collate(source.read_first()))
    except Exception:  # the scan raises it again, and says which example it is about
        return DEFAULT_BATCH_SIZE
    size = DEFAULT_BATCH_SIZE
    while 2 * size <= largest and 2 * size * saved <= _MAX_SAVED:
        size *= 2
    return size


def _count_saved_bytes(measurement: Measurement, batch: object) -> int:
    """The bytes that autograd saves in the forward pass of a batch, without parameters."""
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        # The result keeps the saved tensors alive, so that no address occurs twice.
        _losses = compute_loss(measurement.model, move_to_device(batch, measurement.device), measurement.loss_fn)
    for p in measurement.model.parameters():
        saved.pop(p.untyped_storage().data_ptr(), None)
    return sum(saved.values())
