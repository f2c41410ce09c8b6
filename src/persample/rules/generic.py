"""The generic rule, for any function: the function's own derivative, taken for each sample as a batch of one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from persample import _torch
from persample._internal.functions import find_results, is_inplace
from persample._internal.tree import put_in_tensors
from persample.errors import ROWS_ADVICE, PerSampleError, get_op_name, raise_if_out_of_memory


def compute_generic_gradients(
    func: Callable[..., Any],
    call: tuple[Any, Any],
    tensors: Sequence[Tensor],
    batched: Sequence[bool],
    weights: Sequence[int],
    grads: Sequence[Tensor | None],
) -> list[Tensor]:
    """The per-sample gradients of the tensors at the positions `weights`.

    Args:
        func: The torch function.
        call: The args and kwargs of the call, with slots in place of tensors (`tree.take_out_tensors`).
        tensors: The tensors for the slots, with the samples in dimension 0 where `batched` is true.
        batched: Whether each tensor depends on the batch.
        weights: The positions of the weights among the tensors.
        grads: The gradients of the tensors in the result, with the samples in dimension 0, or None.
    """
    inplace = is_inplace(func)
    batched_positions = [i for i, is_batched in enumerate(batched) if is_batched]
    wanted = [i for i, grad in enumerate(grads) if grad is not None]
    wanted_grads = [grad for grad in grads if grad is not None]

    def run(sample: Sequence[Tensor], weight_values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Call the function with the tensors of one sample and with the weights."""
        given = dict(enumerate(tensors))
        given.update(zip(batched_positions, sample, strict=True))
        given.update(zip(weights, weight_values, strict=True))
        if inplace:
            given[0] = given[0].clone()
        args, kwargs = put_in_tensors(call, given)
        results = find_results(func(*args, **kwargs), args)
        return tuple(results[i] for i in wanted)

    def vjp(sample: Sequence[Tensor], weight_values: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return torch.func.vjp(lambda *w: run(sample, w), *weight_values)[1](tuple(grads))

    samples = [tensors[i] for i in batched_positions]
    weight_values = [tensors[i] for i in weights]
    dims = [0 if batched[i] else None for i in weights]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # the fallback loop of vmap is fine here
            return list(torch.func.vmap(vjp, in_dims=(0, dims, 0))(samples, weight_values, wanted_grads))
    except RuntimeError:  # no batching rule, control flow that depends on values, or a write in place
        with _advise_on_rules(func):
            return _loop_over_samples(func, run, samples, weight_values, dims, wanted_grads)


@contextmanager
def _advise_on_rules(func: Callable[..., Any]) -> Iterator[None]:
    """Say in errors of a function that was called with a batch of one what could be done."""
    try:
        yield
    except PerSampleError:
        raise
    except Exception as error:
        raise_if_out_of_memory(error)
        raise PerSampleError(
            f"{get_op_name(func)} has no rule, so it is called with each sample as a batch of one. That "
            f"failed: {error}\nAdd a rule for it with persample.register_rule, or make it accept a batch of one. "
            f"{ROWS_ADVICE}"
        ) from error


def _loop_over_samples(
    func: Callable[..., Any],
    run: Callable[..., tuple[Tensor, ...]],
    samples: Sequence[Tensor],
    weight_values: Sequence[Tensor],
    dims: Sequence[int | None],
    grads: Sequence[Tensor],
) -> list[Tensor]:
    rows = []
    for n in range(len(grads[0])):
        with torch.enable_grad():
            leaves = [
                (w if dim is None else w[n]).detach().requires_grad_()
                for w, dim in zip(weight_values, dims, strict=True)
            ]
            results = run([t[n].detach().clone() for t in samples], leaves)
        sample_grads = [g[n] for g in grads]
        if any(r.shape != g.shape for r, g in zip(results, sample_grads, strict=True)):
            raise PerSampleError(
                f"{get_op_name(func)} returns shapes {[tuple(r.shape) for r in results]} for one sample alone, but "
                f"{[tuple(g.shape) for g in sample_grads]} for the same sample in the batch, so the gradients of its "
                "weights cannot be computed per sample. Add a rule for it with persample.register_rule. "
                f"{ROWS_ADVICE}"
            )
        rows.append(_torch.pull_back(results, leaves, sample_grads))
    return [torch.stack(parts) for parts in zip(*rows, strict=True)]
