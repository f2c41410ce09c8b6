"""The motion of `embedding_bag`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from persample._internal.functions import find_bags
from persample.layouts.algebra.engine import declare, get_argument
from persample.layouts.call import Call
from persample.layouts.ids import find_layout_of_ids, make_sample_ids
from persample.layouts.layout import Layout, Lost
from persample.layouts.motion import Motion


@declare(F.embedding_bag)
def _embedding_bag(call: Call, results: Sequence[Tensor]) -> Motion:
    """A bag belongs to the sample of its indices and weights, and of the offset at which it begins."""
    where = {id(t): w for t, w in call.pairs}
    input, weight, offsets = call.args[0], get_argument(call, 1, "weight"), get_argument(call, 2, "offsets")
    weights = get_argument(call, 8, "per_sample_weights")
    reads_values = offsets is not None
    if isinstance(where[id(weight)], Layout):
        return Motion((Lost("embedding_bag has samples in its weight"),))
    bag, count = find_bags(input, offsets, get_argument(call, 9, "include_last_offset", default=False))
    # Pairs of tensors: bags, and samples that they belong to.
    claims = [
        (bag, make_sample_ids(t, where.get(id(t)), call.batch).reshape(-1)) for t in (input, weights) if t is not None
    ]
    if offsets is not None:
        claims.append((torch.arange(count), make_sample_ids(offsets, where.get(id(offsets)), call.batch)[:count]))
    owner = torch.full((count,), -1, dtype=torch.int32, device=input.device)
    for bags, samples in claims:
        is_claim = samples >= 0
        bags, samples = bags[is_claim], samples[is_claim]
        before = owner[bags]
        has_conflict = bool(((before >= 0) & (before != samples)).any())
        owner[bags] = samples
        if has_conflict or not torch.equal(owner[bags], samples):
            lost = Lost("embedding_bag puts rows of several samples into one bag")
            return Motion((lost,), depends_on_values=reads_values)
    return Motion((find_layout_of_ids(owner, call.batch),), depends_on_values=reads_values)
