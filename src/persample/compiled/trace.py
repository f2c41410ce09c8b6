"""While a step is traced for `persample.compile`, its tensors have shapes but no values.

How the samples lie is found all the same: outside of the trace, with made-up tensors standing in for those of the step.
Where their values would matter it is not known where the samples are. What only the run can tell is left to it: the
trace notes a requirement, which the compiled step checks each time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from persample import _torch
from persample._internal import tracing
from persample._internal.tree import find_tensors, map_tensors
from persample.errors import PerSampleError, find_place
from persample.layouts import Call

_LARGEST_CONSTANT = 2**20
_PACKAGES = tuple(str(Path(module.__file__).parent) for module in (torch, sys.modules["persample"]))  # type: ignore[arg-type]


class Trace(_torch.TorchDispatchMode):
    """Sees every op that is traced, and refuses what a graph cannot repeat with other values.

    Of tensors that are made of nothing but numbers (`arange(n)[:, None]`), the values are known, whatever the step is
    given; they are computed along with the trace.
    """

    def __init__(self, names: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self.requirements: list[tuple[Tensor, str]] = []  # what has to hold in a run, and what to say if it does not
        self.refused: PerSampleError | None = None  # which the user's code may have caught
        self.drawn = 0  # how many ops have drawn random numbers
        self._names = names
        self._values: Any = WeakIdKeyDictionary()
        self._overwritten: set[int] = set()  # memory of which the values are no longer known
        self._made_up: set[int] = set()  # memory of the tensors that stand in for others

    @contextmanager
    def active(self) -> Iterator[None]:
        """The time of the trace."""
        with tracing.activate(self), self:
            yield

    # ---- each op ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = list(find_tensors((args, kwargs)))
        foreign = [t for t in tensors if not isinstance(t, _torch.FakeTensor)]
        random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        self.drawn += random
        if foreign and func is not torch.ops.aten.lift_fresh.default:
            self._refuse(
                f"uses a tensor of shape {tuple(foreign[0].shape)} that is neither an argument of the step nor a "
                "parameter or buffer of the model: its values would be fixed. Pass it to the step, or register it as a "
                "buffer"
            )
        if random and _torch.get_backward_pass() >= 0:
            self._refuse(
                "draws random numbers in the backward pass (a checkpoint that computes dropout again), which would not "
                "be those of the forward pass. Do without the checkpoint: the compiler decides what to keep"
            )
        known = not random and all(self._value(t) is not None for t in tensors)
        try:
            result = _simply(func, args, kwargs)
        except _torch.VALUE_READ_ERRORS as error:
            if not known:
                self._refuse(f"goes by the values of a tensor ({error.func}), which are another's in each run", error)
            return map_tensors(tracing.lift, self._of_values(func, args, kwargs))
        if known and all(t.numel() <= _LARGEST_CONSTANT for t in find_tensors(result)):
            values = self._of_values(func, args, kwargs)
            for made, of_made in zip(find_tensors(result), find_tensors(values), strict=True):
                self._values[made] = of_made
        elif _torch.get_schema(func).is_mutable:
            values = [value for t in tensors if (value := self._value(t)) is not None]
            self._overwritten |= set(map(_torch.get_storage_id, values))
        return result

    def _refuse(self, cause: str, error: Exception | None = None) -> None:
        self.refused = PerSampleError(f"This step cannot be compiled: {find_place(self._names)}{_line()} {cause}.")
        raise self.refused from error

    def _of_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an op gives for tensors whose values are known."""
        with tracing.suspend(), torch.no_grad():
            return func(*map_tensors(self._value, args), **map_tensors(self._value, kwargs))

    def _value(self, tensor: Tensor) -> Tensor | None:
        value = self._values.get(tensor) if isinstance(tensor, _torch.FakeTensor) else tensor
        return None if value is None or _torch.get_storage_id(value) in self._overwritten else value

    # ---- for those who look for the samples ----

    def stand_in(self, call: Call) -> Call:
        """The same call with tensors that have values: their own if these are known, else made-up ones."""
        self._made_up = set()
        return call.with_tensors([self._stand_in(t) for t in call.tensors])

    def _stand_in(self, tensor: Tensor) -> Tensor:
        value = self._value(tensor)
        if value is not None:
            return value
        # Zeros are indices and targets that any op takes. They lie in memory as the tensor's do, as strides may matter.
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        numbers = tensor.is_floating_point() or tensor.is_complex()
        with torch.random.fork_rng([]):
            memory = (torch.rand if numbers else torch.zeros)(size, device=tensor.device).to(tensor.dtype)
        made_up = memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).detach()
        made_up.requires_grad_(tensor.requires_grad)
        self._made_up.add(_torch.get_storage_id(made_up))
        with torch.enable_grad():
            return made_up if tensor.is_leaf else made_up.view_as(made_up)

    def is_invented(self, tensor: Tensor) -> bool:
        """Whether the values of a tensor, or of what it is a view of, are not those that a run will have."""
        return _torch.get_storage_id(tensor) in self._made_up

    def require(self, holds: Tensor, otherwise: str) -> None:
        """Has each run of the step check that something holds."""
        self.requirements.append((holds, otherwise))


def _simply(func: Any, args: Any, kwargs: Any) -> Any:
    """An op, by others that leave less for a compiler to take apart.

    What is written into one of several views that were made at once would be written into all of them anew.
    """
    if func is torch.ops.aten.unbind.int:
        tensor, dim = (*args, 0)[:2]
        return [torch.ops.aten.select.int(tensor, dim, i) for i in range(tensor.shape[dim])]
    if func is torch.ops.aten.split.Tensor:
        tensor, size, dim = (*args, 0)[:3]
        starts = range(0, max(1, tensor.shape[dim]), max(1, size))
        return [torch.ops.aten.slice.Tensor(tensor, dim, i, min(i + size, tensor.shape[dim])) for i in starts]
    functional = _without_out(func)
    if functional is None:
        return func(*args, **kwargs)
    names = [argument.name for argument in _torch.get_schema(func).arguments if argument.is_out]
    results = functional(*args, **{name: value for name, value in kwargs.items() if name not in names})
    for name, result in zip(names, [results] if isinstance(results, Tensor) else results, strict=True):
        if kwargs[name].shape != result.shape:
            raise PerSampleError(f"{func}: in a compiled step, out= must have the shape of the result")
        torch.ops.aten.copy_.default(kwargs[name], result)
    return kwargs[names[0]] if len(names) == 1 else tuple(kwargs[name] for name in names)


@cache
def _without_out(func: Any) -> Any:
    """The form of an op that makes its result, if it is one that writes it into given memory."""
    arguments = _torch.get_schema(func).arguments
    if not any(argument.is_out for argument in arguments):
        return None
    given = [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out]
    for name in func.overloadpacket.overloads():
        form = getattr(func.overloadpacket, name)
        schema = _torch.get_schema(form)
        if not schema.is_mutable and [(a.name, str(a.type)) for a in schema.arguments] == given:
            return form
    return None


def _line() -> str:
    """The line of the user's code that is running, in words."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((*_PACKAGES, "<")):
        frame = frame.f_back
    return f", at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}," if frame is not None else ""
