"""How terms become `grad_sample`, and how a rule in the convention of expanded weights runs under a tracker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.function import FunctionMeta

from persample.backward import Receiver
from persample.errors import PerSampleError, get_op_name
from persample.expanded_weights.helpers import add_grad_sample
from persample.expanded_weights.tensor import ExpandedWeight
from persample.forward import Tracker
from persample.layouts import Call, Layout
from persample.rules import register_adapter
from persample.terms import Dense, Term, sum_dense


def to_grad_sample(batch_size: int, loss_reduction: str) -> Receiver:
    """Takes terms as `parameter.grad_sample`, multiplied by the batch size if the loss was a mean."""

    def deliver(parameter: Tensor, terms: Sequence[Term]) -> None:
        add_grad_sample(parameter, sum_dense(terms).to(parameter.dtype), batch_size, loss_reduction)

    return Receiver(deliver)


def run_registered_function(tracker: Tracker, function: Any, call: Call, weights: Mapping[int, Tensor]) -> Any:
    """Run a use by an `autograd.Function` that was registered with `implements_per_sample_grads`."""
    layouts = [(t, where) for t, where in zip(call.tensors, call.where, strict=True) if isinstance(where, Layout)]
    dims = {where.dim for _, where in layouts if where.inner == 1 and where.ids is None}
    if tracker.batch == 1:  # any dimension of size 1 may be the batch dimension
        dims = {next((dim for dim in (0, 1) if layouts[0][0].shape[dim : dim + 1] == (1,)), 2)}
    if len(dims) != 1 or not dims <= {0, 1}:
        raise PerSampleError(
            f"The rule {function.__name__} registered for {get_op_name(call.func)} expects the batch in dim 0 or 1 of "
            f"its input, but in {tracker.place()} the samples lie elsewhere."
        )

    def expand(weight: Tensor) -> ExpandedWeight:
        result = ExpandedWeight(weight, tracker.batch, tracker.counted.given_reduction or "sum")
        result.set_batch_first(dims == {0})
        result.receive = lambda rows: tracker.collector.receive(weight, Dense(rows))
        return result

    given: list[Tensor] = [expand(t) if i in weights else t for i, t in enumerate(call.tensors)]
    args, kwargs = call.fill(given)
    return function.apply(tuple(kwargs), call.func, *args, *kwargs.values())


register_adapter(FunctionMeta, run_registered_function)
