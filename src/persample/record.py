"""Recording the per-sample gradients of a model that is called as usual."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from persample.collector import Collector
from persample.distributed import Processes, processes_of
from persample.errors import PerSampleError
from persample.expanded_weights.delivery import legacy_use
from persample.gradients import PerSampleGradients
from persample.inputs import BatchDim, Inputs
from persample.streaming import StreamedClip, StreamedNorms, backward_twice
from persample.terms import Term, together
from persample.tracker import Tracker
from persample.uncompiled import not_traced, skipped

Chosen = Iterable[str] | Callable[[str, Tensor], bool]


@not_traced
@contextmanager
@skipped(inside=False)
def record(
    model: nn.Module,
    *,
    batch_size: int | None = None,
    batch_dim: BatchDim = 0,
    loss_reduction: str = "mean",
    parameters: Chosen | None = None,
    keep_grad: bool = False,
    keep: Literal["everything", "norms", "clip"] = "everything",
    max_norm: float | None = None,
    passes: Literal[1, 2] | None = None,
    memory: int = 2**30,
) -> Iterator[PerSampleGradients]:
    """Inside the block the model is called as usual; a backward of its loss, there or later, fills the gradients.

    `batch_dim` is the dim of the samples in the model's inputs: one number, or one for each argument, by position or
    name. `loss_reduction` says how the loss that is back-propagated was reduced over the batch, "mean" or "sum", so
    that row n is always the gradient of sample n's own loss. `parameters` restricts the recording to some, by their
    names or by a predicate of name and parameter. `p.grad` stays as it was, unless `keep_grad`. Several forward and
    backward passes in a block add up, as they do in `p.grad`.

    Under DistributedDataParallel and FSDP2 the rows are those of the samples of this process, and sums over samples are
    over those of all processes, which all have to ask for them; `keep_grad` gives `p.grad` what a plain backward pass
    would have: the mean over the processes.

    Where it is known beforehand what will be asked, `keep` says so, and each term is reduced as it arrives and freed:
    "norms", or "clip" with `max_norm`, for a memory close to that of a plain backward. The clipped sum takes one
    backward pass that keeps its factors to the end, or two `passes` that keep nothing; by default one, unless the
    factors would take more than `memory` bytes. `repr(grads)` says which it was. Two passes need the backward inside
    the block.

    >>> model = nn.Linear(3, 2)
    >>> x, y = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    >>> with record(model) as grads:
    ...     nn.functional.cross_entropy(model(x), y).backward()
    >>> grads.norms().shape, grads.clip(1.0)["weight"].shape
    (torch.Size([5]), torch.Size([2, 3]))
    """
    if loss_reduction not in ("mean", "sum"):
        raise PerSampleError(f"loss_reduction must be 'mean' or 'sum', got {loss_reduction!r}")
    if not isinstance(model, nn.Module):
        raise PerSampleError(f"record takes an nn.Module, got {type(model).__name__}")
    if any(isinstance(mode, Tracker) for mode in _get_current_function_mode_stack()):
        raise PerSampleError("Recordings cannot be nested: leave the one block before the next.")
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    recorded = _chosen(trainable, parameters)
    over = processes_of(model)
    grads = _gradients(recorded, loss_reduction, over, keep, max_norm, passes, memory)

    def deliver(parameter: Tensor, terms: Sequence[Term]) -> None:
        term = together(terms)
        grads.receive(parameter, term)
        if keep_grad and not (isinstance(grads, StreamedClip) and grads.first_of_two):
            total = term.sum(torch.ones(grads.batch_size, device=parameter.device)).to(parameter.dtype)
            over.add_to_grad(parameter, total)

    collector = Collector(map(over.used, trainable.values()), deliver, grads.finish, early=keep != "everything")
    tracker = Tracker(0, collector, model, legacy_use(loss_reduction))
    tracker.inside = False
    tracker.over = over

    def backward(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(grads, StreamedClip) and grads.choose(collector.factor_bytes) == 2:
            return backward_twice(tracker.anchor, func, args, kwargs)
        return func(*args, **kwargs)

    tracker.on_backward = backward

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with torch._C.DisableTorchFunction():
            over.forward_starts()
            inputs = Inputs(over.called(model).forward, args, kwargs, batch_dim)
            inputs.check_dims()
            tracker.batch = grads.start(inputs.batch_size("record") if batch_size is None else batch_size)
            inputs.tell(tracker, told=batch_size is not None)
        tracker.inside = True

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        tracker.inside = False

    hooks = [
        model.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        model.register_forward_hook(after, always_call=True),
    ]
    for name, p in recorded.items():
        forms = {id(form): form for form in (p, over.used(p))}
        hooks += [form.register_hook(_unrecorded(name, collector)) for form in forms.values()]
    rng_state = torch.get_rng_state()
    try:
        with over.recording(tracker, keep_grad), tracker:
            yield grads
    except PerSampleError:
        tracker.restore()
        torch.set_rng_state(rng_state)
        raise
    finally:
        tracker.on_backward = None  # which knows the tracker, and with it all that was recorded
        for hook in hooks:
            hook.remove()


def _unrecorded(name: str, collector: Collector) -> Callable[[Tensor | None], None]:
    """Refuses an ordinary gradient of a recorded parameter: it comes by a way that was not recorded."""

    def refuse(grad: Tensor | None) -> None:
        if grad is not None and not collector.pulling_back:
            raise PerSampleError(
                f"'{name}' receives a gradient from a use that was not recorded: a submodule or forward() called "
                "directly, a penalty on the weights, or a use inside of torch.func.vmap. Call the model itself, and "
                "keep penalties out of the block."
            )

    return refuse


def _gradients(
    recorded: Mapping[str, Tensor],
    loss_reduction: str,
    over: Processes,
    keep: str,
    max_norm: float | None,
    passes: int | None,
    memory: int,
) -> PerSampleGradients:
    if passes not in (None, 1, 2) or (passes and keep != "clip"):
        raise PerSampleError(f"passes is 1 or 2 and goes with keep='clip', got {passes}")
    if max_norm is not None and not max_norm > 0:
        raise PerSampleError(f"max_norm must be positive, got {max_norm}")
    if (max_norm is not None) != (keep == "clip"):
        raise PerSampleError("max_norm goes with keep='clip', and keep='clip' with a max_norm")
    if keep == "clip":
        assert max_norm is not None
        return StreamedClip(recorded, loss_reduction, max_norm, passes, memory, over)
    if keep == "norms":
        return StreamedNorms(recorded, loss_reduction, over)
    if keep == "everything":
        return PerSampleGradients(recorded, loss_reduction, over)
    raise PerSampleError(f"keep must be 'everything', 'norms' or 'clip', got {keep!r}")


def _chosen(trainable: Mapping[str, Tensor], parameters: Chosen | None) -> Mapping[str, Tensor]:
    if parameters is None:
        return trainable
    if callable(parameters):
        return {name: p for name, p in trainable.items() if parameters(name, p)}
    names = [parameters] if isinstance(parameters, str) else list(parameters)
    for name in names:
        if name not in trainable:
            raise PerSampleError(f"'{name}' is no trainable parameter of the model")
    return {name: p for name, p in trainable.items() if name in names}
