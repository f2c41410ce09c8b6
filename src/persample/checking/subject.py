"""Copy of the user's model that can be run repeatedly from the same state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from persample import _torch
from persample._internal.dropout import NoDropoutMode
from persample._internal.functions import find_dropped
from persample._internal.graph import preserve_grads
from persample._internal.precision import to_double
from persample._internal.rng import seed_all
from persample._internal.tree import find_tensors
from persample.backward import asked_sources
from persample.batches import Batch
from persample.errors import PerSampleError
from persample.gradients import PerSampleGradients
from persample.losses import check_is_scalar, compute_loss
from persample.recording import record

Gradient = dict[str, Tensor]

_DROPOUT_MODULES = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class Subject:
    """The model under check: computes the loss of some samples, its plain gradient, or a recording.

    Every run starts with the parameters and buffers of the user's model and with seeded random numbers. With `double`,
    the copy, the batch and the default dtype of torch are float64.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any], batch: Batch, options: Any, double: bool) -> None:
        self.model = copy_module(model)
        self.loss_fn = copy_module(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn
        self.batch = batch
        self.options = options
        self.double = double
        self.dropout = True  # whether dropout functions are active; dropout modules have their own setting
        if double:
            for module in (self.model, self.loss_fn):
                if isinstance(module, nn.Module):
                    _torch.apply_to_tensors(module, to_double)
        self.reached: set[str] = set()  # parameters that received a gradient in some run
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._buffers = [(m, name, b) for m in self.model.modules() for name, b in _torch.get_buffers(m).items()]
        originals = [*model.parameters(), *model.buffers()]
        self._values = list(zip([*self.model.parameters(), *self.model.buffers()], originals, strict=True))

    # ---- runs ----

    def compute_loss(self, start: int, stop: int, seed: int = 0, mode: Any = None) -> Tensor:
        """Loss of the batch that consists of the samples from `start` to `stop`, computed under a torch `mode`."""
        part = self._take_samples(start, stop)
        with self._prepare_run(seed), mode or nullcontext():
            return self._call_loss(part)

    def compute_gradient(self, start: int, stop: int) -> Gradient:
        """Gradient of that loss by plain autograd."""
        part = self._take_samples(start, stop)
        with self._prepare_run():
            self._run_backward(self._call_loss(part))
        self.reached |= {name for name, p in self.parameters.items() if p.grad is not None}
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self.parameters.items()}
        return {name: grad.to_dense() for name, grad in grads.items()}

    def record(self, stop: int) -> tuple[PerSampleGradients, dict[str, list[str]]]:
        """Record the first `stop` samples; return the gradients, and for each parameter the names of its rules."""
        sources: dict[int, set[str]] = {}
        part = self._take_samples(0, stop)
        token = asked_sources.set(sources)
        try:
            with self._prepare_run(), record(self.model, **self.options) as grads:
                self._run_backward(self._call_loss(part))
        finally:
            asked_sources.reset(token)
        return grads, {name: sorted(sources.get(id(p), ())) for name, p in self.parameters.items()}

    def is_random(self, stop: int) -> bool:
        """Whether the loss depends on the seed."""
        one, other = (self.compute_loss(0, stop, seed).detach() for seed in (0, 1))
        rounding = torch.finfo(one.dtype).eps ** 0.75  # some kernels do not always add up in the same order
        return not torch.allclose(one, other, rtol=rounding, atol=0, equal_nan=True)

    def find_narrowest_dtype(self, stop: int) -> torch.dtype:
        """The least precise floating-point type of a run."""
        types = _DtypeMode()
        try:
            self.compute_loss(0, stop, mode=types)
        except Exception:  # the model does not run under a torch mode: the recording will fail as well, and report it
            types.seen = {self.compute_loss(0, stop).dtype}
        return max(types.seen, key=lambda dtype: torch.finfo(dtype).eps)

    def turn_off_dropout(self, stop: int) -> bool:
        """Turn off dropout; return whether the loss no longer depends on the seed."""
        for module in self.model.modules():
            if isinstance(module, _DROPOUT_MODULES):
                module.p = 0.0
            for name, value in list(vars(module).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(module, name, 0.0)
        self.dropout = not self.is_random(stop)  # still random: functions may be called with a fixed probability
        return self.dropout or not self.is_random(stop)

    # ---- inside ----

    def _take_samples(self, start: int, stop: int) -> Any:
        return self.batch.take_samples(start, stop, to_double if self.double else lambda tensor: tensor)

    def _call_loss(self, part: Any) -> Tensor:
        loss = compute_loss(self.model, part, self.loss_fn)
        check_is_scalar(loss, "a tensor with one element, the mean or the sum over the samples")
        return loss

    def _run_backward(self, loss: Tensor) -> None:
        """Run the backward pass. Gradients of tensors outside the copy are restored afterwards."""
        if not loss.requires_grad:
            raise PerSampleError("The loss depends on no parameter that requires grad.")
        with preserve_grads(loss, but={id(p) for p in self.parameters.values()}):
            loss.backward()

    @contextmanager
    def _prepare_run(self, seed: int = 0) -> Iterator[None]:
        self._reset()
        seed_all(seed)
        default = torch.get_default_dtype()
        with ExitStack() as stack:
            if self.double:
                stack.callback(torch.set_default_dtype, default)
                torch.set_default_dtype(torch.float64)
            if not self.dropout:
                stack.enter_context(NoDropoutMode())
            yield

    def _reset(self) -> None:
        """Copy parameters and buffers from the user's model again: a forward pass may have changed them."""
        with torch.no_grad():
            for module, name, buffer in self._buffers:
                _torch.get_buffers(module)[name] = buffer
            for copied, original in self._values:
                copied.copy_(original)
        for p in self.parameters.values():
            p.grad = None


def copy_module(module: nn.Module) -> Any:
    """Deep copy of a module, which may hold tensors that it computed from parameters (old-style weight norm)."""
    computed = {
        id(value): value.detach().clone()
        for part in module.modules()
        for value in find_tensors(list(vars(part).values()))
        if not value.is_leaf
    }
    try:
        return copy.deepcopy(module, dict(computed))
    except Exception as error:
        raise PerSampleError(
            f"{type(module).__name__} cannot be copied: {error}. The check runs on a copy so that the module does not "
            "change. Remove the attribute that cannot be copied, or define __deepcopy__."
        ) from error


class _DtypeMode(TorchFunctionMode):
    """Collects the floating-point types of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}), **find_dropped(func))
        self.seen |= {t.dtype.to_real() for t in find_tensors(result) if t.is_floating_point() or t.is_complex()}
        return result


# ---- the error of rows, relative to their scale ----


# Lower bound of the scale of a row, relative to the largest gradient entry of the same sample. Some gradients are zero
# except for rounding, such as the gradient of a bias before a softmax: their own entries are no scale for errors.
LEAST_SCALE = 1e-3


def compute_error(got: Tensor, want: Tensor, scale: Tensor) -> float:
    """Largest difference between rows, relative to their scales. NaN in both tensors counts as equal."""
    same = (got == want) | (got.isnan() & want.isnan())
    difference = (got - want).abs().masked_fill(same, 0)
    return float((_find_largest(difference.nan_to_num(torch.inf, torch.inf)) / scale).max())


def compute_scales(rows: Gradient) -> dict[str, Tensor]:
    """Scale of each row: its largest entry, but at least `LEAST_SCALE` times the largest entry of the sample."""
    own = {name: find_largest_finite(part) for name, part in rows.items()}
    tiny = torch.tensor(torch.finfo(torch.float64).tiny, dtype=torch.float64)
    least = LEAST_SCALE * torch.stack([*own.values(), tiny.expand_as(next(iter(own.values())))]).amax(0)
    return {name: torch.maximum(part, least) for name, part in own.items()}


def find_largest_finite(rows: Tensor) -> Tensor:
    return _find_largest(rows.abs().nan_to_num(0, 0, 0))


def _find_largest(rows: Tensor) -> Tensor:
    """Largest entry of each row, shape `(batch,)`; zero for rows without entries."""
    matrix = rows.reshape(len(rows), rows[0].numel()).cpu().double()
    return matrix.amax(1) if matrix.numel() else matrix.new_zeros(len(matrix))
