"""One call of a torch function, and the keys under which its effect is kept: equal keys stand for equal effects.

One walk over the arguments (`describe_arguments`) finds what the keys are made of. There are three kinds of keys:

- without sizes (`make_size_free_key`), for functions whose motion depends on layouts and numbers of dimensions alone:
  the function, its arguments other than tensors, and for each tensor its layout, its number of dimensions and whether
  it requires grad. Floats are part of the key if the call uses parameters: they do not decide where samples lie, but
  gradients depend on them (`eps`).
- with sizes (`make_key`), for all other functions whose effect does not depend on values: the batch size, the shapes
  and dtypes besides.
- for a trial (`make_trial_key`), which observes a call: the strides and the flags of torch besides. The trial of a
  function that could read anything else has no key.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from numbers import Integral, Real
from types import EllipsisType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import get_overridable_functions

from persample._internal.facts import Facts, facts
from persample._internal.functions import find_results, is_inplace
from persample._internal.precision import find_autocast
from persample._internal.tree import map_tensors
from persample.layouts.counts import CountedSizes
from persample.layouts.layout import Layout, Where

# ---- keys ----


# A key can be unhashable, if an argument is.
Key = tuple[Any, ...]

# What the tensors of a call are: constants have neither bit.
HAS_SAMPLES, HAS_PARAMETERS = 1, 2

# Stands for a parameter of the model in a key without sizes.
_PARAMETER = "parameter"

# Arguments of other types, besides numbers and sequences, can change, or are not described by their values.
_PLAIN = {
    int, bool, complex, str, NoneType, EllipsisType, torch.dtype, torch.device, torch.layout, torch.memory_format,
}  # fmt: skip
_SEQUENCES = {tuple, list, torch.Size}


class Arguments(NamedTuple):
    """What the arguments of a call are, besides their tensors.

    Attributes:
        fields: the type and value of each argument, with its name before it if it has one. Sequences and dicts have
            their length in place of a value, and then their parts. Tensors and floats have their type only.
        numbers: the floats.
        is_plain: whether that says all about them: there is no object that can change, and no tensor of another class.
    """

    fields: tuple[Any, ...]
    numbers: tuple[float, ...]
    is_plain: bool


def describe_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Arguments:
    """Describe the arguments of a call, and append their tensors to `tensors`, in the order of `find_tensors`."""
    fields: list[Any] = []
    numbers: list[float] = []
    is_plain = _describe_parts(args, fields, numbers, tensors)
    for name in kwargs:
        fields.append(name)
        is_plain &= _describe_parts((kwargs[name],), fields, numbers, tensors)
    return Arguments(tuple(fields), tuple(numbers), is_plain)


def _describe_parts(values: Iterable[Any], fields: list[Any], numbers: list[float], tensors: list[Tensor]) -> bool:
    """Describe some values; returns whether the fields say all about them."""
    is_plain = True
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is nn.Parameter:
            tensors.append(value)
            fields.append(Tensor)
        elif kind is float:
            fields.append(float)
            numbers.append(value)
        elif kind in _PLAIN:
            fields += (kind, value)
        elif isinstance(value, (tuple, list)):
            fields += (kind, len(value))
            is_plain &= _describe_parts(value, fields, numbers, tensors) and kind in _SEQUENCES
        elif isinstance(value, dict):
            fields += (kind, len(value))
            for name, part in value.items():
                fields.append(name)
                is_plain &= _describe_parts((part,), fields, numbers, tensors)
        elif isinstance(value, slice):
            fields.append(slice)
            is_plain &= _describe_parts((value.start, value.stop, value.step), fields, numbers, tensors)
        elif isinstance(value, Tensor):
            tensors.append(value)
            fields.append(kind)
            is_plain = False
        else:
            fields += (kind, value)
            is_plain = False
    return is_plain


def _mark(where: Where | None) -> Any:
    """What stands for a layout in a key: of a pattern, an object that is compared by identity."""
    return where.token or where if type(where) is Layout else where


def make_key(call: Call) -> Key:
    """The key of a call with sizes."""
    fields, numbers, _ = call.arguments
    tensors = [
        (tensor.shape, tensor.dtype, tensor.layout, tensor.requires_grad, _mark(where))
        for tensor, where in zip(call.tensors, call.where, strict=True)
    ]
    return call.func, call.batch, fields, numbers, *tensors


def make_size_free_key(
    call: Call, parameters: Container[int], are_constants_allowed: bool, may_have_rows: bool = False
) -> tuple[Key, int] | None:
    """The key of a call without sizes, and what its tensors are; None if its effect may depend on sizes.

    Args:
        parameters: the ids of the parameters of the model.
        are_constants_allowed: whether a call with constants may have a key.
        may_have_rows: whether a constant with a row for each sample makes a difference.
    """
    fields, numbers, is_plain = call.arguments
    if not is_plain:
        return None
    contents = 0
    constants: list[Tensor] = []
    tensors: list[Any] = []
    for tensor, where in zip(call.tensors, call.where, strict=True):
        has_grad = tensor.requires_grad
        if where is not None:
            token = where.token if type(where) is Layout else None
            if token is None or tensor.layout is not torch.strided:
                return None
            contents |= HAS_SAMPLES
            tensors.append((token, tensor.dim(), has_grad))
        elif has_grad and id(tensor) in parameters:  # the model may freeze it for a while
            contents |= HAS_PARAMETERS
            tensors.append((_PARAMETER, tensor.dim()))
        elif has_grad or not are_constants_allowed:
            return None
        else:
            constants.append(tensor)
            tensors.append((None, tensor.dim()))
    if may_have_rows and constants and _may_have_rows(constants, call):
        return None
    return (call.func, fields, numbers if contents & HAS_PARAMETERS else None, *tensors), contents


def _may_have_rows(constants: Sequence[Tensor], call: Call) -> bool:
    """Whether a constant may have rows for each sample.

    Beside samples, it then has their size in one of its dimensions; alone, a multiple of the batch size.
    """
    pairs = zip(call.tensors, call.where, strict=True)
    sizes = {tensor.shape[where.dim] for tensor, where in pairs if isinstance(where, Layout)}
    found = [size in sizes if sizes else size % call.batch == 0 for tensor in constants for size in tensor.shape]
    return any(found)


# ---- trials ----


def make_trial_key(call: Call) -> Key | None:
    """The key under which the result of a trial is kept; None if something else could decide about it.

    The function must be one of torch, and its arguments plain values and tensors of numbers.
    """
    is_decided_by_numbers = all(t.is_floating_point() or t.is_complex() for t in call.tensors)
    if not is_decided_by_numbers or call.func not in _find_torch_functions() or not call.arguments.is_plain:
        return None
    flags = _read_flags(call.tensors[0].device.type)
    return "trial", call.key, tuple([tensor.stride() for tensor in call.tensors]), flags


@cache
def _find_torch_functions() -> frozenset[Any]:
    return frozenset(function for functions in get_overridable_functions().values() for function in functions)


def _read_flags(device: str) -> tuple[Any, ...]:
    """The flags of torch that a function may read."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        find_autocast(device),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cudnn.enabled,
        cudnn.benchmark,
        torch.backends.mkldnn.enabled,
    )


# ---- the call ----


@dataclass(slots=True)
class Call:
    """One call of a torch function: `where[i]` says where the samples lie in `tensors[i]`.

    `tensors` are the tensors in the arguments, in the order of `find_tensors`.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[Tensor, ...]
    where: tuple[Where | None, ...]
    batch: int
    counted: CountedSizes = field(default_factory=CountedSizes)
    # Not copied: a copy may have other arguments.
    _arguments: Arguments | None = field(default=None, init=False, repr=False)
    _key: Key | None = field(default=None, init=False, repr=False)

    @property
    def arguments(self) -> Arguments:
        """What the arguments are, besides their tensors."""
        if self._arguments is None:
            self._arguments = describe_arguments(self.args, self.kwargs, [])
        return self._arguments

    @property
    def key(self) -> Key:
        """The key of the call with sizes."""
        if self._key is None:
            self._key = make_key(self)
        return self._key

    @property
    def facts(self) -> Facts:
        """What is known about the function."""
        return facts(self.func)

    @property
    def is_inplace(self) -> bool:
        """Whether the call changes its first argument."""
        return is_inplace(self.func)

    @property
    def numbers(self) -> list[int | float]:
        """The numbers among the arguments, also those of NumPy."""
        given = [arg for arg in (*self.args, *self.kwargs.values()) if not isinstance(arg, bool)]
        return [int(a) if isinstance(a, Integral) else float(a) for a in given if isinstance(a, Real)]

    @property
    def pairs(self) -> list[tuple[Tensor, Where | None]]:
        """Each tensor, and where the samples lie in it."""
        return list(zip(self.tensors, self.where, strict=True))

    def find_samples(self) -> set[int]:
        """The samples that the arguments hold."""
        found: set[int] = set()
        for tensor, where in self.pairs:
            if isinstance(where, Layout):
                is_whole_batch = where.ids is None and tensor.shape[where.dim] > 0
                found |= set(range(self.batch) if is_whole_batch else where.ids or ())
        return found - {-1}

    def has_loose_rows(self) -> bool:
        """Whether an argument has rows whose order depends on all samples."""
        return any(isinstance(where, Layout) and where.loose for where in self.where)

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors in the result of the same call with other tensors."""
        args, kwargs = self.fill(tensors)
        return find_results(self.func(*args, **kwargs), args)

    def fill(self, tensors: Sequence[Any]) -> tuple[Any, Any]:
        """The positional and keyword arguments with other values in the places of the tensors."""
        supply = iter(tensors)
        return map_tensors(lambda _: next(supply), (self.args, self.kwargs))

    def with_tensors(self, tensors: Sequence[Tensor]) -> Call:
        """The same call with other tensors in the places of its tensors."""
        args, kwargs = self.fill(tensors)
        return replace(self, args=args, kwargs=kwargs, tensors=tuple(tensors))


def make_call(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch: int,
    find_layout: Callable[[Tensor], Where | None],
    counted: CountedSizes | None = None,
) -> Call:
    """Find the tensors of a call and their layouts, and what its keys are made of, in one walk over the arguments."""
    tensors: list[Tensor] = []
    arguments = describe_arguments(args, kwargs, tensors)
    where = tuple([find_layout(tensor) for tensor in tensors])
    call = Call(func, args, kwargs, tuple(tensors), where, batch, counted or CountedSizes())
    call._arguments = arguments
    return call
