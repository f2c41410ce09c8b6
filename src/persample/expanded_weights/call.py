"""Call a module so that backward leaves the per-sample gradients in its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from persample import _torch
from persample._internal.graph import refuse_parameter_hooks
from persample._internal.tree import iterate_tensors
from persample.backward import Collector
from persample.batches import Arguments, BatchSizesDiffer, NoSamplesFound, WrongBatchSize
from persample.errors import PerSampleError
from persample.expanded_weights.helpers import LAYOUT_OPTIONS, batch_size_error, to_grad_sample
from persample.forward import Tracker, guard_output, make_advice

_ADVICE = make_advice(LAYOUT_OPTIONS)


def call_for_per_sample_grads(
    module: nn.Module, *, batch_size: int | None = None, loss_reduction: str = "sum", batch_first: bool = True
) -> Callable[..., Any]:
    """A function that returns what `module(...)` returns, and whose backward fills `p.grad_sample`.

    After `.backward()` on a loss of the result, every trainable parameter p that was used has `p.grad_sample`, of
    shape `(batch, *p.shape)`; `p.grad` is not touched. Backward passes add to `grad_sample`, as they add to `p.grad`;
    clear it (`del p.grad_sample`) before the next call.

    Args:
        module: the model; frozen parameters are left alone.
        batch_size: the number of samples; by default all tensors in the arguments must agree on it.
        loss_reduction: how the loss combines the samples, "sum" or "mean". With "mean", what is stored is multiplied by
            the batch size, so that a row is always the gradient of its sample's own loss.
        batch_first: whether the samples lie in dim 0 of the arguments, or in dim 1.

    Raises:
        RuntimeError: an argument is wrong, or a parameter still has a `grad_sample`.

    >>> model = nn.Linear(3, 2)
    >>> x, y = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    >>> logits = call_for_per_sample_grads(model, loss_reduction="mean")(x)
    >>> nn.functional.cross_entropy(logits, y).backward()
    >>> model.weight.grad_sample.shape
    torch.Size([5, 2, 3])
    """
    _check_arguments(module, batch_size, loss_reduction)
    _check_cleared(module)
    batch_dim = 0 if batch_first else 1

    @wraps(module.forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        _check_cleared(module)
        arguments = Arguments(module.forward, args, kwargs, batch_dim)
        with _errors_of_torch():
            batch = arguments.find_batch_size(opens_objects=False) if batch_size is None else batch_size
        if batch == 0:
            raise RuntimeError(
                "0 is not a valid batch size for Expanded Weights but got input tensor of that batch size"
            )
        tracker = _make_tracker(module, batch, loss_reduction)
        with _errors_of_torch():
            arguments.add_to(tracker, search=batch_size is not None)
        outputs = _run(module, args, kwargs, tracker)
        replaced = [output is not guard_output(output, tracker) for output in iterate_tensors(outputs)]
        if any(replaced):  # the model returned a parameter
            outputs = _torch.pytree.tree_map_only(Tensor, partial(guard_output, context=tracker), outputs)
        return outputs

    return call


def _make_tracker(module: nn.Module, batch: int, loss_reduction: str) -> Tracker:
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    refuse_parameter_hooks(trainable)
    collector = Collector(trainable.values(), to_grad_sample(batch, loss_reduction))
    return Tracker(collector, module, batch=batch, loss_reduction=loss_reduction, advice=make_advice(LAYOUT_OPTIONS))


def _run(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tracker: Tracker) -> Any:
    """The outputs of the module. After an error, its buffers and the random numbers are as before."""
    rng_state = torch.get_rng_state()
    try:
        with tracker.mode:
            tracker.begin_audit()
            return module(*args, **kwargs)
    except BaseException:
        tracker.restore_buffers()
        torch.set_rng_state(rng_state)
        raise


def _check_arguments(module: Any, batch_size: Any, loss_reduction: Any) -> None:
    if loss_reduction not in ("sum", "mean"):
        raise RuntimeError(f"Expected loss_reduction argument to be sum or mean, got {loss_reduction}")
    if not isinstance(module, nn.Module):
        raise RuntimeError(f"Module passed must be nn.Module, got {type(module).__name__}")
    if batch_size is not None and (not isinstance(batch_size, int) or isinstance(batch_size, bool)):
        raise RuntimeError(f"Batch size passed must be None or an integer, got {type(batch_size).__name__}")
    if batch_size is not None and batch_size < 1:
        raise RuntimeError(f"Batch size must be positive, got {batch_size}")
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise PerSampleError(
                f"'{name}' is a ScriptModule, whose ops cannot be followed. Pass the module as it was before scripting."
            )
    if torch.distributed.is_available() and _torch.get_fsdp_states(module):
        raise PerSampleError("grad_sample cannot be sharded like the parameters of fully_shard: use persample.record.")


@contextmanager
def _errors_of_torch() -> Iterator[None]:
    """Raise errors about the batch size with the texts of torch's expanded weights."""
    try:
        yield
    except NoSamplesFound as error:
        raise RuntimeError(
            "Unable to find a tensor in the passed args and kwargs. They may not be pytree-able and so ExpandedWeights "
            "cannot compute the batch size from the inputs. Please specify it explicitly"
        ) from error
    except BatchSizesDiffer as error:
        first, second, *_ = error.sizes
        raise RuntimeError(
            f"When computing batch size, found at least one input with batch size {first} and one with batch size "
            f"{second}. Please specify it explicitly using the batch size kwarg in call_for_per_sample_grads"
        ) from error
    except WrongBatchSize as error:
        raise RuntimeError(batch_size_error(error.found, error.expected)) from error


def _check_cleared(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if getattr(parameter, "grad_sample", None) is not None:
            raise RuntimeError(
                "Current Expanded Weights accumulates the gradients, which will be incorrect for multiple calls "
                f"without clearing gradients. Please clear out the grad_sample parameter of {name}"
            )
