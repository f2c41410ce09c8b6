"""`rows`: the gradient of each entry of a vector of losses, by one backward pass for each entry."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from persample import _torch
from persample._internal.free_memory import find_free_memory
from persample._internal.graph import find_leaves, find_nodes
from persample._internal.several_models import SeveralModels, combine_models
from persample.backward.tap import is_tap
from persample.distributed import Processes, find_processes
from persample.errors import PerSampleError
from persample.gradients import LossReduction, NonFinite, PerSampleGradients, UnitIds, UnitReduction
from persample.recording.options import Model, Options, Selection, get_trainable
from persample.recording.session import is_recording
from persample.terms import Dense

# Largest size of the gradients that some backward passes at a time keep, if the free memory is not known.
_UNKNOWN = 2**30

# Gradients of activations that a backward pass keeps at a time, in sizes of the largest one.
_KEPT_AT_A_TIME = 4


def rows(
    losses: Tensor,
    model: Model,
    *,
    parameters: Selection | None = None,
    nonfinite: NonFinite = "raise",
    units: UnitIds | None = None,
    num_units: int | None = None,
    unit_reduction: UnitReduction = "sum",
    memory: int | None = None,
    retain_graph: bool = True,
) -> PerSampleGradients:
    """The gradient of each entry of a vector of losses: row n is that of `losses[n]`, however it was computed.

    This takes B backward passes over the graph of the losses, and memory for all B gradients. It works where `record`
    has no way: losses that contain gradients (PINNs, WGAN-GP, Hamiltonian networks), graphs that share a dimension,
    and samples that influence each other, as by BatchNorm in training mode or in a contrastive loss. The row of a
    sample is then the gradient of its entry of the losses, through the activations of all samples. The passes are
    batched by `torch.func.vmap` if all functions in the graph allow it, and run one after the other if not.

    Call it outside of any recording. `.grad` is not touched.

    Args:
        losses: `(B,)`, one loss for each row, as with `reduction="none"`.
        model: the model, or a list or dict of models; then names start with the model's index or key.
        parameters: as in `record`. A parameter that the losses do not depend on has rows of zeros.
        nonfinite: as in `record`. An infinity in the graph that the losses share can be part of all rows.
        units: as in `record`.
        num_units: as in `record`.
        unit_reduction: as in `record`.
        memory: bytes that the batched passes may take at a time, beside the answer; half of the free memory by default.
        retain_graph: keep the graph of the losses, for a `backward()` or another call. False frees it.

    Raises:
        PerSampleError: the losses are no vector with a graph, or were computed in a recording.

    >>> model, x = torch.nn.Linear(2, 1), torch.randn(4, 2, requires_grad=True)
    >>> (slopes,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
    >>> grads = rows(slopes.square().sum(1), model)
    >>> grads.norms().shape, grads.clip(1.0)["weight"].shape
    (torch.Size([4]), torch.Size([1, 2]))
    """
    options = Options(
        parameters=parameters,
        nonfinite=nonfinite,
        units=units,
        num_units=num_units,
        unit_reduction=unit_reduction,
    )
    trainable = _find_trainable(model)
    recorded = options.select(trainable)
    _check_losses(losses, trainable)
    grads = PerSampleGradients(recorded, LossReduction(), Processes(), nonfinite, options.unit_options)
    grads.start(len(losses))
    found = _compute_rows(losses, list(recorded.values()), memory, retain_graph)
    for p, values in zip(recorded.values(), found, strict=True):
        grads.receive(p, Dense(values))
    grads.finish()
    grads.verification = f"the gradients of {len(losses)} losses, by a backward pass for each"
    return grads


def _find_trainable(model: Model) -> dict[str, Tensor]:
    whole = combine_models(model)
    for each in whole.children() if isinstance(whole, SeveralModels) else [whole]:
        if type(find_processes(each)) is not Processes:
            raise PerSampleError("rows() is not available under several processes. Pass it the model of one process.")
    return get_trainable(whole)


def _check_losses(losses: Tensor, trainable: Mapping[str, Tensor]) -> None:
    if is_recording():
        raise PerSampleError(
            "rows() is called inside a recording, whose weights are not in the graph. Compute the losses and call "
            "rows() outside of the block."
        )
    if not isinstance(losses, Tensor):
        raise PerSampleError(f"rows() needs a tensor of losses, got {type(losses).__name__}. Use torch.stack(losses).")
    if losses.dim() != 1 or not losses.is_floating_point():
        raise PerSampleError(
            f"rows() needs a vector of real losses, one for each row; got shape {tuple(losses.shape)} and "
            f"{losses.dtype}. Use reduction='none', and sum over all dimensions but the samples'."
        )
    if not losses.requires_grad:
        raise PerSampleError("rows() needs losses with a graph; these do not require grad.")
    if any(map(is_tap, find_nodes(losses))):
        raise PerSampleError(
            "The losses were computed inside a recording, whose weights are not in the graph. Compute them outside of "
            "the block, or of a watched model's step."
        )
    own = {id(p) for p in trainable.values()}
    if not any(id(leaf) in own for leaf in find_leaves(losses)):
        raise PerSampleError("The losses depend on no parameter of the model that requires grad.")


def _compute_rows(losses: Tensor, wanted: list[Tensor], memory: int | None, retain_graph: bool) -> list[Tensor]:
    """`(B, *shape)` for each of the wanted tensors."""
    found = [p.new_zeros(len(losses), *p.shape) for p in wanted]
    if not wanted or not len(losses):
        return found
    # If the graph is to be freed, the last pass does that. It is not batched, because a batched pass may fail half-way.
    last = len(losses) if retain_graph else len(losses) - 1
    block = _find_block_size(losses, wanted, memory)
    done = 0
    while done < last:
        end = min(done + block, last)
        if block == 1 or not _run_batched(losses, wanted, done, end, found):
            block, end = 1, done + 1
            _run_one(losses, wanted, done, found, retain_graph=True)
        done = end
    if not retain_graph:
        _run_one(losses, wanted, last, found, retain_graph=False)
    return found


def _find_block_size(losses: Tensor, wanted: list[Tensor], memory: int | None) -> int:
    """The number of passes at a time."""
    if memory is None:
        free = find_free_memory(p.device for p in wanted)
        memory = _UNKNOWN if free is None else free // 2
    largest = max(map(_torch.count_gradient_bytes, find_nodes(losses)), default=0)
    return max(1, memory // max(1, sum(p.nbytes for p in wanted) + _KEPT_AT_A_TIME * largest))


def _run_batched(losses: Tensor, wanted: list[Tensor], start: int, end: int, found: list[Tensor]) -> bool:
    """Compute some rows at once; False if a function in the graph does not allow that, or if memory is short."""
    chosen = torch.eye(len(losses), dtype=losses.dtype, device=losses.device)[start:end]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # the fallback loop of vmap is fine here
            parts = torch.autograd.grad(
                losses, wanted, chosen, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
    except Exception:  # the passes run one by one then, and raise what is not due to vmap
        return False
    for rows_of_p, part in zip(found, parts, strict=True):
        if part is not None:
            rows_of_p[start:end] = part
    return True


def _run_one(losses: Tensor, wanted: list[Tensor], row: int, found: list[Tensor], retain_graph: bool) -> None:
    chosen = torch.zeros_like(losses)
    chosen[row] = 1
    parts = torch.autograd.grad(losses, wanted, chosen, retain_graph=retain_graph, allow_unused=True)
    for rows_of_p, part in zip(found, parts, strict=True):
        if part is not None:
            rows_of_p[row] = part.to_dense() if part.layout is not torch.strided else part
