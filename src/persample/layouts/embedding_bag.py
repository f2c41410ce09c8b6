"""Where the samples lie in the result of `embedding_bag`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from persample._internal.functions import find_bags
from persample.layouts.call import Op
from persample.layouts.find import motion
from persample.layouts.layout import Layout, Lost, from_ids, sample_ids
from persample.layouts.motion import Motion

_BAG_ARGUMENTS = ("input", "weight", "offsets")


@motion(F.embedding_bag)
def _motion_of_bags(op: Op) -> Motion:
    """A bag belongs to the sample whose rows are looked up in it, or whose offset says where it begins."""
    where = {id(t): w for t, w in zip(op.tensors, op.where, strict=True)}
    call = {**dict(zip(_BAG_ARGUMENTS, op.args, strict=False)), **op.kwargs}
    input, offsets = call["input"], call.get("offsets")
    if isinstance(where[id(call["weight"])], Layout):
        return Motion((Lost("embedding_bag looks up rows of samples"),))
    bag, count = find_bags(input, offsets, call.get("include_last_offset", False))
    owner = torch.full((count,), -1, dtype=torch.int32, device=input.device)
    lookers = [t for t in (input, call.get("per_sample_weights")) if t is not None]
    claims = [(bag, sample_ids(t, where.get(id(t)), op.batch).reshape(-1)) for t in lookers]
    if offsets is not None:
        claims.append((torch.arange(count), sample_ids(offsets, where.get(id(offsets)), op.batch)[:count]))
    for bags, samples_of in claims:
        there = samples_of >= 0
        bags, samples_of = bags[there], samples_of[there]
        taken = owner[bags]
        if bool(((taken >= 0) & (taken != samples_of)).any()):
            return Motion((Lost("embedding_bag puts rows of several samples into one bag"),))
        owner[bags] = samples_of
        if not torch.equal(owner[bags], samples_of):
            return Motion((Lost("embedding_bag puts rows of several samples into one bag"),))
    return Motion((from_ids(owner, op.batch),))
