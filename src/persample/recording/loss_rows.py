"""`rows`: the gradient of each entry of a vector of losses, by one backward pass for each entry."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction

from persample import _torch
from persample._internal.graph import find_leaves, find_nodes, preserve_grads, put_grads_aside, refuse_parameter_hooks
from persample._internal.memory import find_free_memory
from persample._internal.models import SeveralModels, combine_models
from persample.backward import is_tap
from persample.distributed import Processes, find_processes
from persample.errors import PerSampleError
from persample.gradients import (
    BatchRows,
    KeptTerms,
    NonFinite,
    PerSampleGradients,
    RecordedBatch,
    UnitIds,
    UnitReduction,
)
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
    batched by `torch.func.vmap` if all functions in the graph allow it, and run one after the other if not, or if the
    graph has an `autograd.Function` of yours, which may run a backward pass of its own.

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
    rows = BatchRows(recorded.values(), Processes(), options.unit_options)
    intake = KeptTerms(RecordedBatch(recorded, rows, nonfinite=nonfinite))
    rows.start(len(losses))
    passes = _Passes(losses, list(recorded.values()), trainable)
    passes.run(memory, retain_graph)
    for p, values in zip(recorded.values(), passes.rows, strict=True):
        intake.receive(p, Dense(values))
    intake.finish()
    intake.notes.note_verification(f"the gradients of {len(losses)} losses, by a backward pass for each")
    return PerSampleGradients(intake)


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
    if any(map(_may_hide_weights, find_nodes(losses))):
        refuse_parameter_hooks(trainable)  # they would run once for each row
    elif not any(id(leaf) in own for leaf in find_leaves(losses)):
        raise PerSampleError("The losses depend on no parameter of the model that requires grad.")


class _Passes:
    """The backward passes over the graph of the losses; `rows` is `(B, *shape)` for each of the wanted tensors."""

    def __init__(self, losses: Tensor, wanted: list[Tensor], trainable: Mapping[str, Tensor]) -> None:
        self.rows = [p.new_zeros(len(losses), *p.shape) for p in wanted]
        self._losses, self._wanted, self._trainable = losses, wanted, trainable
        self._may_hide_weights = any(map(_may_hide_weights, find_nodes(losses)))

    def run(self, memory: int | None, retain_graph: bool) -> None:
        """Compute all rows."""
        if not self._wanted or not len(self._losses):
            return
        # If the graph is to be freed, the last pass does that. It is not batched: a batched pass may fail half-way.
        last = len(self._losses) if retain_graph else len(self._losses) - 1
        block = 1 if self._may_hide_weights else self._find_block_size(memory)
        done = 0
        while done < last:
            end = min(done + block, last)
            if block == 1 or not self._run_batched(done, end):
                block, end = 1, done + 1
                self._run_one(done, retain_graph=True)
            done = end
        if not retain_graph:
            self._run_one(last, retain_graph=False)

    def _find_block_size(self, memory: int | None) -> int:
        """The number of passes at a time."""
        if memory is None:
            free = find_free_memory(p.device for p in self._wanted)
            memory = _UNKNOWN if free is None else free // 2
        largest = max(map(_torch.count_gradient_bytes, find_nodes(self._losses)), default=0)
        return max(1, memory // max(1, sum(p.nbytes for p in self._wanted) + _KEPT_AT_A_TIME * largest))

    def _run_batched(self, start: int, end: int) -> bool:
        """Compute some rows at once; False if a function in the graph does not allow that, or if memory is short."""
        losses = self._losses
        chosen = torch.eye(len(losses), dtype=losses.dtype, device=losses.device)[start:end]
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop")  # vmap's own loop is fine here
                parts = torch.autograd.grad(
                    losses, self._wanted, chosen, retain_graph=True, allow_unused=True, is_grads_batched=True
                )
        except Exception:  # the passes run one by one then, and raise what is not due to vmap
            return False
        self._keep(slice(start, end), parts)
        return True

    def _run_one(self, row: int, retain_graph: bool) -> None:
        chosen = torch.zeros_like(self._losses)
        chosen[row] = 1
        if self._may_hide_weights:
            self._keep(row, self._run_backward(chosen, retain_graph))
        else:
            options: dict[str, Any] = {"retain_graph": retain_graph, "allow_unused": True}
            self._keep(row, torch.autograd.grad(self._losses, self._wanted, chosen, **options))

    def _run_backward(self, chosen: Tensor, retain_graph: bool) -> list[Tensor | None]:
        """The gradients by `backward`, with `.grad` of all leaves put aside: other ways do not reach hidden weights."""
        leaves = list(self._trainable.values())
        with put_grads_aside(leaves), preserve_grads(self._losses, but={*map(id, leaves)}):
            self._losses.backward(chosen, retain_graph=retain_graph)
            return [p.grad for p in self._wanted]

    def _keep(self, index: int | slice, parts: Sequence[Tensor | None]) -> None:
        for rows_of_p, part in zip(self.rows, parts, strict=True):
            if part is not None:
                rows_of_p[index] = part.to_dense() if part.layout is not torch.strided else part


def _may_hide_weights(node: Any) -> bool:
    """Whether a node may run a backward pass of its own, to weights that are not in the graph: a custom function."""
    if not isinstance(node, BackwardCFunction):
        return False
    function = _torch.get_custom_function(node)
    return function is CheckpointFunction or function.__module__.partition(".")[0] != "torch"
