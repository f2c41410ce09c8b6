"""The trace of a step for `persample.compile`, in which tensors have shapes but no values.

Layouts are found outside the trace, with invented tensors in place of the tensors of the step. If their values would
matter, the layout is unknown. A condition that depends on the values of a run is computed in each run of the compiled
step (`Trace.require`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from persample import _torch
from persample._internal import tracing
from persample._internal.rng import fork_rng
from persample._internal.tree import find_tensors, map_tensors
from persample.errors import PerSampleError, find_place
from persample.layouts import Call

_LARGEST_CONSTANT = 2**20  # entries of a tensor whose values are computed during the trace

# The folders of code that is not the user's.
_LIBRARIES = tuple(str(Path(module.__file__).parent) for module in (torch, sys.modules["persample"]))  # type: ignore[arg-type]


class Trace(_torch.TorchDispatchMode):
    """Sees every op of a trace, and refuses ops that a graph cannot repeat with other values.

    The values of tensors that are computed from numbers alone (`arange(n)[:, None]`) are the same in each run. They are
    computed along with the trace.

    Attributes:
        requirements: conditions that each run must check, and the error message for each.
        refusal: the error that was raised, even if the user's code caught it.
        drawn: the number of ops that drew random numbers.
    """

    def __init__(self, names: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self.requirements: list[tuple[Tensor, str]] = []
        self.refusal: PerSampleError | None = None
        self.drawn = 0
        self._names = names
        self._real_values: Any = WeakIdKeyDictionary()  # fake tensor -> tensor with its values
        self._overwritten: set[int] = set()  # storages of known values that are no longer valid
        self._invented: set[int] = set()  # storages of invented tensors

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Make this the current trace inside the block."""
        with tracing.activate(self), self:
            yield

    # ---- each op ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = list(find_tensors((args, kwargs)))
        foreign = [t for t in tensors if not isinstance(t, _torch.FakeTensor)]
        is_random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        self.drawn += is_random
        if foreign and func is not torch.ops.aten.lift_fresh.default:
            self._refuse(
                f"uses a tensor of shape {tuple(foreign[0].shape)} that is neither an argument of the step nor a "
                "parameter or buffer of the model, so its values would be constants of the graph. Pass it to the step, "
                "or register it as a buffer"
            )
        if is_random and _torch.get_backward_pass() >= 0:
            self._refuse(
                "draws random numbers in the backward pass (a checkpoint that recomputes dropout), which would differ "
                "from the random numbers of the forward pass. Remove the checkpoint: the compiler decides which "
                "activations to keep"
            )
        is_known = not is_random and all(self._get_value(t) is not None for t in tensors)
        try:
            result = _run_simplified(func, args, kwargs)
        except _torch.VALUE_READ_ERRORS as error:
            if not is_known:
                self._refuse(f"reads the values of a tensor ({error.func}), which are different in each run", error)
            return map_tensors(tracing.lift, self._compute_values(func, args, kwargs))
        if is_known and all(t.numel() <= _LARGEST_CONSTANT for t in find_tensors(result)):
            values = self._compute_values(func, args, kwargs)
            for made, value in zip(find_tensors(result), find_tensors(values), strict=True):
                self._real_values[made] = value
        elif _torch.get_schema(func).is_mutable:
            known = [old for t in tensors if (old := self._get_value(t)) is not None]
            self._overwritten |= set(map(_torch.get_storage_id, known))
        return result

    def _refuse(self, cause: str, error: Exception | None = None) -> NoReturn:
        place = find_place(self._names) + _describe_line()
        self.refusal = PerSampleError(f"This step cannot be compiled: {place} {cause}.")
        raise self.refusal from error

    def _compute_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an op whose arguments have known values."""
        with tracing.suspend(), torch.no_grad():
            return func(*map_tensors(self._get_value, args), **map_tensors(self._get_value, kwargs))

    def _get_value(self, tensor: Tensor) -> Tensor | None:
        """A tensor with the values of `tensor`, None if they are not known."""
        value = self._real_values.get(tensor) if isinstance(tensor, _torch.FakeTensor) else tensor
        return None if value is None or _torch.get_storage_id(value) in self._overwritten else value

    # ---- for the search of layouts ----

    def stand_in(self, call: Call) -> Call:
        """The same call with tensors that have values: their own where these are known, else invented ones."""
        self._invented = set()
        return call.with_tensors([self._stand_in_tensor(t) for t in call.tensors])

    def _stand_in_tensor(self, tensor: Tensor) -> Tensor:
        value = self._get_value(tensor)
        if value is not None:
            return value
        # Every function accepts zeros as indices and targets. The strides are kept, because they may matter.
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        is_number = tensor.is_floating_point() or tensor.is_complex()
        with fork_rng():
            memory = (torch.rand if is_number else torch.zeros)(size, device=tensor.device).to(tensor.dtype)
        invented = memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).detach()
        invented.requires_grad_(tensor.requires_grad)
        self._invented.add(_torch.get_storage_id(invented))
        with torch.enable_grad():
            return invented if tensor.is_leaf else invented.view_as(invented)

    def is_invented(self, tensor: Tensor) -> bool:
        """Whether the values of a tensor, or of its base, are invented."""
        return _torch.get_storage_id(tensor) in self._invented

    def require(self, condition: Tensor, message: str) -> None:
        """Have each run of the step check a condition, and raise with this message if it does not hold."""
        self.requirements.append((condition, message))


def _run_simplified(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an op, computed by ops that the compiler can handle.

    Several views that one op returns become views by one op each: the compiler would repeat a write into one of them in
    all of them. An op with `out=` becomes one without it, and a copy.
    """
    if func is torch.ops.aten.unbind.int:
        tensor, dim = (*args, 0)[:2]
        return [torch.ops.aten.select.int(tensor, dim, i) for i in range(tensor.shape[dim])]
    if func is torch.ops.aten.split.Tensor:
        tensor, size, dim = (*args, 0)[:3]
        starts = range(0, max(1, tensor.shape[dim]), max(1, size))
        return [torch.ops.aten.slice.Tensor(tensor, dim, i, min(i + size, tensor.shape[dim])) for i in starts]
    functional = _find_functional_form(func)
    if functional is None:
        return func(*args, **kwargs)
    names = [argument.name for argument in _torch.get_schema(func).arguments if argument.is_out]
    results = functional(*args, **{name: value for name, value in kwargs.items() if name not in names})
    for name, result in zip(names, [results] if isinstance(results, Tensor) else results, strict=True):
        if kwargs[name].shape != result.shape:
            raise PerSampleError(
                f"{func} in a compiled step: out= has shape {tuple(kwargs[name].shape)}, and the result has shape "
                f"{tuple(result.shape)}. The shapes must be equal."
            )
        torch.ops.aten.copy_.default(kwargs[name], result)
    return kwargs[names[0]] if len(names) == 1 else tuple(kwargs[name] for name in names)


def _find_functional_form(func: Any) -> Any:
    """For an op that writes into `out=`, the overload that returns its result; None for all other ops."""
    arguments = _torch.get_schema(func).arguments
    if not any(argument.is_out for argument in arguments):
        return None
    inputs = [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out]
    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        schema = _torch.get_schema(overload)
        if not schema.is_mutable and [(a.name, str(a.type)) for a in schema.arguments] == inputs:
            return overload
    return None


def _describe_line() -> str:
    """The line of the user's code that is running, as part of an error message."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
        frame = frame.f_back
    return f", at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}," if frame is not None else ""
