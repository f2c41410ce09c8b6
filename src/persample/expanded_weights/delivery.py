"""How terms become `grad_sample`, and how a rule in the old convention takes its place among ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from persample.backward.collector import Deliver
from persample.errors import PerSampleError, op_name
from persample.expanded_weights.helpers import add_grad_sample
from persample.expanded_weights.tensor import ExpandedWeight
from persample.forward.tracker import Tracker
from persample.layouts import Op
from persample.layouts.layout import Layout
from persample.terms import Dense, Term, sum_dense


def to_grad_sample(batch_size: int, loss_reduction: str) -> Deliver:
    """Delivers terms as `parameter.grad_sample`, times the batch size where the loss was a mean."""

    def deliver(parameter: Tensor, terms: Sequence[Term]) -> None:
        add_grad_sample(parameter, sum_dense(terms).to(parameter.dtype), batch_size, loss_reduction)

    return deliver


def legacy_use(loss_reduction: str) -> Callable[[Tracker, Any, Op, Mapping[int, Tensor]], Any]:
    """Calls an `autograd.Function` registered with `implements_per_sample_grads` for a use found by a tracker."""

    def use(tracker: Tracker, rule: Any, op: Op, weights: Mapping[int, Tensor]) -> Any:
        layouts = [(t, where) for t, where in zip(op.tensors, op.where, strict=True) if isinstance(where, Layout)]
        dims = {where.dim for _, where in layouts if where.inner == 1 and where.ids is None}
        if tracker.batch == 1:  # then any dim of size 1 may be the batch's
            dims = {next((dim for dim in (0, 1) if layouts[0][0].shape[dim : dim + 1] == (1,)), 2)}
        if len(dims) != 1 or not dims <= {0, 1}:
            raise PerSampleError(
                f"The rule {rule.__name__} registered for {op_name(op.func)} expects the batch in dim 0 or 1 of its "
                f"input, but in {tracker.place()} it lies otherwise."
            )

        def expanded(weight: Tensor) -> ExpandedWeight:
            result = ExpandedWeight(weight, tracker.batch, loss_reduction)
            result.set_batch_first(dims == {0})
            result.receive = lambda rows: tracker.collector.receive(weight, Dense(rows))
            return result

        given: list[Tensor] = [expanded(t) if i in weights else t for i, t in enumerate(op.tensors)]
        args, kwargs = op.filled(given)
        return rule.apply(tuple(kwargs), op.func, *args, *kwargs.values())

    return use
