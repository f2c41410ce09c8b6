"""Facts about torch functions: one record for each operator, which all of its spellings share.

A function with a declared motion gets its record there (`@declare("add", is_linear=True)` in `layouts/algebra`), any
other function in `_internal/functions.py`. CONTRIBUTING.md says how to add a function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from persample.errors import get_op_name

T: Any = torch.Tensor

# The operators that torch gives several names.
_SYNONYMS: dict[str, tuple[str, ...]] = {
    "abs": ("absolute",), "acos": ("arccos",), "acosh": ("arccosh",), "asin": ("arcsin",), "asinh": ("arcsinh",),
    "atan": ("arctan",), "atan2": ("arctan2",), "atanh": ("arctanh",), "cat": ("concat", "concatenate"),
    "clamp": ("clip",), "div": ("divide", "true_divide", "truediv"), "ge": ("greater_equal",),
    "gt": ("greater",), "le": ("less_equal",), "lt": ("less",), "movedim": ("moveaxis",), "mul": ("multiply",),
    "ne": ("not_equal",), "neg": ("negative",), "outer": ("ger",), "pos": ("positive",), "sub": ("subtract",),
    "transpose": ("swapaxes", "swapdims"), "trunc": ("fix",), "vstack": ("row_stack",),
}  # fmt: skip

# The operators that do the same if their arguments are exchanged. The reflected forms of others are operators: "rsub".
_COMMUTATIVE = {"add", "mul", "and", "or", "xor"}


@dataclass(frozen=True, slots=True)
class Facts:
    """What an operator of torch does."""

    operator: str = ""  # its name, the same for all spellings
    moves_entries: bool = False  # only moves, repeats or drops entries of its first argument, or of the tensors in it
    picks_entries: bool = False  # moves entries, selected by an index or a mask
    reshapes: bool = False  # moves entries, and keeps all of them in their order
    writes_entries: bool = False  # writes entries of one tensor into another, or adds them to it
    lists_entries: bool = False  # lists the positions of entries, or the values that occur
    sorts: bool = False  # puts entries in order
    casts: bool = False  # returns the same entries with another dtype, or on another device
    imports_data: bool = False  # brings data into torch: its result is as foreign as a tensor from outside
    makes_like: bool = False  # makes a tensor with the shape of its argument, and reads none of its values
    # makes_new: makes a tensor with the dtype and device of its first argument, and reads nothing else of it
    makes_new: bool = False
    makes_sized: bool = False  # makes a tensor of a size that is given by numbers
    takes_sizes: bool = False  # the arguments after the first one are sizes
    is_pointwise: bool = False  # computes each entry of the result from entries at the same place, with broadcasting
    reads_positions: bool = False  # computes something else for a row at another position
    is_size_free: bool = False  # the motion of most calls does not depend on sizes
    # size_free_if: tells of which calls that is true, if not of all in which the samples lie in patterns
    size_free_if: Callable[[Any], bool] | None = None
    by_shape: Callable[..., Any] | None = None  # finds the layout of the result from shapes, in place of the motion
    handles_any_layout: bool = False  # the declaration is asked first, whatever is known about the arguments
    is_linear: bool = False  # is linear in all arguments at once
    is_bilinear: bool = False  # is linear in one argument at a time
    is_additive: bool = False  # can reduce over the batch to a sum over the samples, or to a mean
    is_plain_sum: bool = False  # adds up entries or their products, and divides by no number of rows
    norm_orders: tuple[Any, ...] = ()  # of a norm: those with which it is Euclidean; the last one is the default
    is_pointwise_loss: bool = False  # a loss with one entry for each entry of its arguments, which are broadcast
    has_entries: bool = False  # a loss that sums up, or averages, the entries that it returns without a reduction
    divides_by_weights: bool = False  # a loss whose mean is divided by the sum of the weights
    averages_targets: bool = False  # a loss whose mean is taken over the targets that are not `ignore_index`
    class_weights: str = ""  # the argument of a loss that has an entry for each class
    combines_pairs: bool = False  # combines entries of two tensors of one shape
    shares_weights: bool = False  # no dimension of a weight belongs to the samples
    is_random: bool = False  # draws random numbers
    training_at: int = 0  # the position of the argument that turns dropout on
    statistics_at: int = 0  # the position of the running mean that it updates; the running variance follows
    replaces_memory: bool = False  # replaces the memory of its first argument
    exposes_memory: bool = False  # gives the memory of a tensor to code outside torch
    reads_values: bool = False  # returns values of a tensor as Python numbers or as an array
    reads_metadata: bool = False  # returns no tensor and reads no values
    reads_size: bool = False  # returns how many entries or rows a tensor has, besides other metadata or none
    compares_tensors: bool = False  # returns whether two tensors are equal as a whole
    differentiates: bool = False  # runs a backward pass
    returns_argument: bool = False  # returns its argument itself, unchanged
    registers_hook: bool = False  # registers a hook on the gradient of a tensor

    @property
    def keeps_sums(self) -> bool:
        """Whether the function makes a sum over the samples of such a sum and constants, or of such sums."""
        return self.is_linear or self.is_bilinear or self.moves_entries

    @property
    def is_division(self) -> bool:
        """Whether the function divides its first argument by the second one."""
        return self.operator == "div"


_UNKNOWN = Facts()
_RECORDS: dict[Any, Facts] = {}
_collected: set[str] = set()  # the fields of which a set was made


def facts(func: Any) -> Facts:
    """The record of a function; all fields are false for a function without a record.

    >>> facts(torch.true_divide).operator, facts(T.__itruediv__).is_bilinear
    ('div', True)
    """
    return _RECORDS.get(func, _UNKNOWN)


def all_with(field: str) -> frozenset[Any]:
    """All functions of which a field is true. To be called after the last `describe`, which otherwise raises."""
    _collected.add(field)
    return frozenset(function for function, record in _RECORDS.items() if getattr(record, field))


def describe(*functions: Any, **known: Any) -> list[Any]:
    """Add the record of some functions; a name stands for all spellings of an operator. Returns the functions."""
    described = []
    if early := _collected & known.keys():
        raise ValueError(f"all_with() has collected {sorted(early)} before {functions} were described")
    record = Facts(**known)
    for function in functions:
        is_name = isinstance(function, str)
        spelled = replace(record, operator=function if is_name else get_op_name(function))
        for each in find_functions(function) if is_name else [function]:
            if _RECORDS.setdefault(each, spelled) != spelled:
                raise ValueError(f"{get_op_name(each)} has two records: as {_RECORDS[each].operator} and {function}")
            described.append(each)
    return described


def find_functions(*names: str) -> list[Any]:
    """All spellings of operators: functions, methods, properties, aliases, `__add__`, in-place forms, copies.

    >>> torch.add in find_functions("add"), T.__iadd__ in find_functions("add"), torch.divide in find_functions("div")
    (True, True, True)
    """
    found = (function for name in names for each in (name, *_SYNONYMS.get(name, ())) for function in _spell(each))
    return list(dict.fromkeys(found))


def _spell(name: str) -> Iterator[Any]:
    spellings = (name, f"{name}_", f"{name}_copy", f"unsafe_{name}")
    places = [(owner, spelling) for owner in (torch, T, F, torch.special) for spelling in spellings]
    places += [(T, f"__{prefix}{name}__") for prefix in ("", "i", *(["r"] if name in _COMMUTATIVE else []))]
    for owner, spelling in places:
        found = getattr(owner, spelling, None)
        function = getattr(found, "__get__", None) if owner is T and not callable(found) else found
        if callable(function) and not isinstance(function, type):
            yield function
