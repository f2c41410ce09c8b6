"""A copy of the user's model, to be run again and again from the state that it was given in."""

from __future__ import annotations

import copy
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from persample import _torch
from persample._internal.dtypes import to_double
from persample._internal.graph import preserve_grads
from persample._internal.tree import find_tensors
from persample.backward.collector import asked_sources
from persample.batches import Batch
from persample.errors import PerSampleError
from persample.gradients import PerSampleGradients
from persample.losses import loss_of
from persample.recording.record import record

Gradient = dict[str, Tensor]

_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
}  # fmt: skip


_DROPOUT_MODULES = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class Subject:
    """What is checked: it gives the loss of some samples, its plain gradient, or a recording of it.

    Every run starts with the parameters and buffers of the user's model and with random numbers from a seed. In
    `double` the copy, the batch and what torch makes by default are in float64.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any], batch: Batch, options: Any, double: bool) -> None:
        self.model = copied(model)
        self.loss_fn = copied(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn
        self.batch = batch
        self.options = options
        self.double = double
        self.dropout = True  # in functions; that of modules is theirs
        if double:
            for module in (self.model, self.loss_fn):
                if isinstance(module, nn.Module):
                    _torch.apply_to_tensors(module, to_double)
        self.reached: set[str] = set()  # the parameters that a loss has depended on
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._places = [(m, name, b) for m in self.model.modules() for name, b in _torch.get_buffers(m).items()]
        given = [*model.parameters(), *model.buffers()]
        self._values = list(zip([*self.model.parameters(), *self.model.buffers()], given, strict=True))

    # ---- runs ----

    def loss(self, start: int, stop: int, seed: int = 0, watch: Any = None) -> Tensor:
        """The loss of the samples from `start` to `stop`, as a batch of their own."""
        part = self._part(start, stop)
        with self._run(seed), watch or nullcontext():
            return self._loss(part)

    def gradient(self, start: int, stop: int) -> Gradient:
        """Its gradient by plain autograd."""
        part = self._part(start, stop)
        with self._run():
            self._backward(self._loss(part))
        self.reached |= {name for name, p in self.parameters.items() if p.grad is not None}
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self.parameters.items()}
        return {name: grad.to_dense() for name, grad in grads.items()}

    def recorded(self, stop: int) -> tuple[PerSampleGradients, dict[str, list[str]]]:
        """A recording of the first samples, and the names of the rules that gave each parameter's terms."""
        sources: dict[int, set[str]] = {}
        part = self._part(0, stop)
        token = asked_sources.set(sources)
        try:
            with self._run(), record(self.model, **self.options) as grads:
                self._backward(self._loss(part))
        finally:
            asked_sources.reset(token)
        return grads, {name: sorted(sources.get(id(p), ())) for name, p in self.parameters.items()}

    def is_random(self, stop: int) -> bool:
        """Whether the loss depends on the seed."""
        one, other = (self.loss(0, stop, seed).detach() for seed in (0, 1))
        rounding = torch.finfo(one.dtype).eps ** 0.75  # of kernels that do not always add up in the same order
        return not torch.allclose(one, other, rtol=rounding, atol=0, equal_nan=True)

    def narrowest(self, stop: int) -> torch.dtype:
        """The floating type with the fewest digits that a run computes in."""
        types = _Types()
        try:
            self.loss(0, stop, watch=types)
        except Exception:  # it does not run under a mode of torch, which a recording is too, and will say
            types.seen = {self.loss(0, stop).dtype}
        return max(types.seen, key=lambda dtype: torch.finfo(dtype).eps)

    def turn_off_dropout(self, stop: int) -> bool:
        """Whether the loss no longer depends on the seed once what is called dropout is turned off, as it then is."""
        for module in self.model.modules():
            if isinstance(module, _DROPOUT_MODULES):
                module.p = 0.0
            for name, value in list(vars(module).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(module, name, 0.0)
        self.dropout = not self.is_random(stop)  # functions that are called with a number of their own remain
        return self.dropout or not self.is_random(stop)

    # ---- inside ----

    def _part(self, start: int, stop: int) -> Any:
        return self.batch.part(start, stop, to_double if self.double else lambda tensor: tensor)

    def _loss(self, part: Any) -> Tensor:
        loss = loss_of(self.model, part, self.loss_fn)
        if not isinstance(loss, Tensor):
            raise PerSampleError(f"loss_fn gave a {type(loss).__name__}; a tensor of one number is needed.")
        if loss.numel() != 1:
            raise PerSampleError(
                f"loss_fn gave a tensor of shape {tuple(loss.shape)}; one number is needed, the mean or the sum over "
                "the samples."
            )
        return loss

    def _backward(self, loss: Tensor) -> None:
        """Backward, after which nobody but the copy has another gradient than before."""
        if not loss.requires_grad:
            raise PerSampleError("The loss depends on no parameter that requires grad.")
        with preserve_grads(loss, but={id(p) for p in self.parameters.values()}):
            loss.backward()

    @contextmanager
    def _run(self, seed: int = 0) -> Iterator[None]:
        self._reset()
        seed_all(seed)
        default = torch.get_default_dtype()
        with ExitStack() as around:
            if self.double:
                around.callback(torch.set_default_dtype, default)
                torch.set_default_dtype(torch.float64)
            if not self.dropout:
                around.enter_context(_NoDropout())
            yield

    def _reset(self) -> None:
        """Gives parameters and buffers the values that they have in the user's model: a forward may change them."""
        with torch.no_grad():
            for module, name, buffer in self._places:
                _torch.get_buffers(module)[name] = buffer
            for mine, given in self._values:
                mine.copy_(given)
        for p in self.parameters.values():
            p.grad = None


def copied(model: nn.Module) -> Any:
    """A deep copy, also where a module keeps what it computes from its parameters (an old-style weight norm)."""
    computed = {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in find_tensors(list(vars(module).values()))
        if not value.is_leaf
    }
    try:
        return copy.deepcopy(model, dict(computed))
    except Exception as error:
        raise PerSampleError(
            f"{type(model).__name__} cannot be copied, and a check runs on a copy to leave the model alone: {error}"
        ) from error


@contextmanager
def untouched(*modules: Any) -> Iterator[None]:
    """Puts back what a run may change around the copies: random numbers, and buffers of the modules themselves."""
    modules = tuple(m for m in modules if isinstance(m, nn.Module))
    before = [(b, b._version, b.detach().clone()) for m in modules for b in m.buffers()]
    numpy: Any = sys.modules.get("numpy")
    of_python, of_numpy = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(of_python)
        if numpy and of_numpy:
            numpy.random.set_state(of_numpy)
        with torch.no_grad():
            for buffer, version, value in before:
                if buffer._version != version:
                    buffer.copy_(value)


def seed_all(seed: int) -> None:
    """Seeds whatever draws random numbers; as `torch.manual_seed`, which takes a hundred times as long."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


class _NoDropout(TorchFunctionMode):
    """Calls the dropouts of torch as in evaluation."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "dropout_p" in kwargs:  # of an attention
            kwargs["dropout_p"] = 0.0
        if func not in _DROPOUTS:
            return func(*args, **kwargs)
        call = inspect.signature(func).bind(*args, **kwargs)
        call.arguments["training"] = False
        return func(*call.args, **call.kwargs)


class _Types(TorchFunctionMode):
    """Notes the floating types of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen |= {t.dtype.to_real() for t in find_tensors(result) if t.is_floating_point() or t.is_complex()}
        return result
