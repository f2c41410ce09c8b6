"""What the code around the model does in private training after it has read numbers of the samples.

A number that Python has read (`item`, `tolist`, numpy, `if`) leaves torch, and nobody can follow it. It may come back
as a factor, a constant or a decision, and then each sample changes the gradients of all others. So once a number was
read, the calls up to the end of `backward` must be those of earlier steps, with the same numbers: then the numbers of
this step had no influence. The first step with such calls has nothing to compare with: its samples do not count.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, NoReturn

import torch
from torch import Tensor

from persample import _torch
from persample._internal.calling_code import find_raising_value
from persample._internal.facts import facts
from persample._internal.tree import find_tensors
from persample.errors import PerSampleError, SamplesMixed, get_op_name
from persample.forward import Context, Detector, TensorMap, is_own_function, is_refused
from persample.isolation.exposed import ExposedMemory
from persample.isolation.places import Places
from persample.layouts import Call, Layout, Lost, Reduced, Where

_GRAD_FN: Any = Tensor.grad_fn.__get__  # type: ignore[union-attr]

# Calls before a number is read are only counted; these are kept from then on.
_Calls = tuple[Any, ...]

# Errors that no value causes.
_WITHOUT_VALUES = (PerSampleError, TypeError, AttributeError, NotImplementedError)

# The size of what they make depends on values, or is that of another argument.
_SIZED_BY_VALUES = {"repeat_interleave", "one_hot", "bincount"}
_SIZED_AS = {"expand_as", "view_as", "reshape_as"}

_MOST_ENTRIES = 4096  # of constants whose values are compared

_ADVICE = (
    "Read numbers of samples after backward(): then they cannot change the step. If they do not influence the loss, "
    "the code between the first of them and backward() must do the same in each step."
)

# Methods whose results say nothing of values.
_NO_READS = {
    "backward", "register_hook", "register_post_accumulate_grad_hook", "__setitem__", "__get__", "__set__", "type",
    "__hash__", "element_size", "_is_view", "has_names", "can_cast",
    "result_type", "broadcast_shapes",
}  # fmt: skip


class LossCode(Detector):
    """The calls around the model in the steps of one private training.

    Args:
        places: knows the random numbers of the step.

    Attributes:
        is_open: whether a number of this step was read, and no backward pass has begun.
        is_first: whether the last backward pass had calls that there is nothing to compare with.
        exposed: memory of samples that code outside torch has got.
    """

    wraps_calls = True

    def __init__(self, places: Places) -> None:
        self._places = places
        self.exposed = ExposedMemory()
        self._known: set[_Calls] = set()  # sequences of calls of earlier steps
        self._calls: list[Any] = []
        self._made: TensorMap[int] = TensorMap()  # the numbers of results among those of this step
        self._count = 0
        self._cause = ""
        self.is_open = False
        self.is_first = False
        self._raised = ""  # the call of this step that has raised an error because of values

    def start(self, context: Context) -> None:
        """Forget the calls of the last step."""
        self._calls, self._made, self._count = [], TensorMap(), 0
        self.is_open = self.is_first = False
        self._raised = ""

    # ---- the calls of a step ----

    def run_outside(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], context: Context, run: Callable[..., Any]
    ) -> Any:
        """Run a call outside the model, and note what it reads and makes."""
        refuse_saved_hooks(context)
        if context.path.reads.has_values:  # inside the model, which may have kept them
            self._open("the model", context)
        sizes = self._note_sizes(func, args, kwargs, context)
        if self.is_open:
            self._calls += sizes
            self._calls.append((func, self._describe(func, args, context), self._describe(func, kwargs, context)))
        result = run(func, args, kwargs, context)
        if _is_number(func, result) and _has_samples((args, kwargs), context):
            self._note_read(func, result, context)
            self.exposed.note(func, args[0] if args else None)
        for made in find_tensors(result):
            self._count += 1
            if made.numel():  # else it may get its values unseen, as `torch.load` does
                self._made[made] = self._count
        return result

    def _note_read(self, func: Any, result: Any, context: Context) -> None:
        """Note a number of samples that Python has read. A check of torch that passes decides nothing."""
        raising = find_raising_value() if isinstance(result, bool) else None
        if raising is None or raising is result:
            self._open(f"{get_op_name(func)}, in {context.place()}", context)
        if raising is not None and raising is result:
            self._raised = self._raised or get_op_name(func)

    def note_error(self, error: Exception, func: Any, args: Any, kwargs: Any, context: Context) -> None:
        """Note that a call of samples has raised an error, which tells values of them if the program catches it."""
        if not isinstance(error, _WITHOUT_VALUES) and _has_samples((args, kwargs), context):
            self._raised = self._raised or get_op_name(func)

    def _note_sizes(self, func: Any, args: Any, kwargs: Any, context: Context) -> list[Any]:
        """Note a call that makes a tensor whose size depends on values of the samples; return the sizes it takes."""
        name, sizes = get_op_name(func), []
        if facts(func).makes_like or name in _SIZED_AS:
            sizes = [tensor.shape for tensor in find_tensors(args) if _is_picked(tensor, context)]
        by_values = name in _SIZED_BY_VALUES and _has_samples((args, kwargs), context)
        if sizes or (by_values and not (name == "one_hot" and _has_classes(args, kwargs))):
            self._open(f"the size that {name} gives its result, in {context.place()}", context)
        return sizes

    def read_attribute(self, func: Any, args: tuple[Any, ...], result: Any, context: Context) -> Any:
        """Guard nodes of the graph, and note sizes, which depend on values if a mask has picked the entries."""
        if func == _GRAD_FN:
            return guard_node(result)
        if not context.is_inside and facts(func).reads_size and args and args[0].dim() and _is_picked(args[0], context):
            self._open(f"the size of a tensor of picked entries, in {context.place()}", context)
        return result

    def start_call(self, context: Context) -> None:
        self._calls += ["the model"] if self.is_open else []

    def _open(self, cause: str, context: Context) -> None:
        if not self.is_open and context.batch:
            self.is_open, self._cause = True, cause

    def prepare(self, call: Call, context: Context) -> Call:
        """Replace hooks on gradients that could act on what was read, or on all samples together."""
        if call.func is not Tensor.register_hook:
            return call
        is_open = self.is_open and not context.is_inside
        if not is_open and not isinstance(call.where[0], (Lost, Reduced)):
            return call
        return replace(call, args=(call.args[0], _refuse_changes(call.args[1], context.place())))

    def check_function(self, tensor: Tensor, layout: Where, context: Context) -> None:
        """Refuse an `autograd.Function` whose backward nothing compares with that of samples alone."""
        if (context.is_inside and isinstance(layout, Layout)) or is_own_function(tensor.grad_fn):
            return
        what = "outside the model" if not context.is_inside else "with a result for all samples together"
        raise SamplesMixed(
            f"{type(tensor.grad_fn).__name__}, an autograd.Function, is called {what}, in {context.place()}. What its "
            "backward does with the samples is not verified there: call it inside the model's forward(), with a row "
            "for each sample."
        )

    def before_backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor], context: Context) -> None:
        """Refuse the step if it has other calls than the steps before."""
        if any(is_refused(context.find_known_layout(output)) for output in outputs):
            return  # the backward pass says why
        self.is_first = False
        if context.path.reads.has_values:
            self._open("the model", context)
        if self._raised:
            raise SamplesMixed(
                f"A call or a check of torch, {self._raised}, has raised an error in this step, and the step goes on. "
                "A sample may have caused the error, and then it changes what others do. Let the error end the step, "
                "or turn off the check (validate_args=False)."
            )
        if self.exposed.has_changed(lambda tensor: _has_samples(tensor, context)):
            raise SamplesMixed(
                "Code outside torch, such as NumPy, has written into a tensor with samples of this step, so that "
                "nobody knows which samples it has. Do it in the data set, or by functions of torch."
            )
        if not self.is_open:
            return
        last = (Tensor.backward, self._describe(None, (outputs, gradients), context))
        self.is_open, calls = False, (*self._calls, last)
        self.is_first = not self._known
        if calls not in self._known and self._known:
            self._refuse(calls)
        self._known.add(calls)

    def _refuse(self, calls: _Calls) -> NoReturn:
        known = min(self._known, key=lambda other: -_count_common(calls, other))
        position = min(_count_common(calls, known), len(calls) - 1)
        raise SamplesMixed(
            f"After numbers of the samples were read by {self._cause}, the code around the model does not do what it "
            f"did in the steps before: {get_op_name(calls[position][0])} is new there, or has other numbers or "
            "tensors. The numbers may have decided it, and then one sample changes the gradients of all others. "
            f"{_ADVICE}"
        )

    # ---- what a call is described by ----

    def _describe(self, func: Any, value: Any, context: Context) -> Any:
        if isinstance(value, Tensor):
            return self._describe_tensor(value, context)
        if isinstance(value, (list, tuple)):
            return tuple([self._describe(func, each, context) for each in value])
        if isinstance(value, dict):
            return tuple([(name, self._describe(func, each, context)) for name, each in value.items()])
        if isinstance(value, slice):
            return "slice", self._describe(func, (value.start, value.stop, value.step), context)
        if hasattr(value, "tobytes") and hasattr(value, "shape"):  # an array or a number of NumPy
            return _digest(value)
        if type(value) is int and (facts(func).reshapes or (facts(func).makes_sized and _is_size(value, context))):
            return "size"
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return Number(value, context.batch)
        return value if isinstance(value, (bool, str, complex, type(None), torch.dtype)) else type(value).__name__

    def _describe_tensor(self, tensor: Tensor, context: Context) -> Any:
        """A weight or a result of the step by its number, a constant by its values."""
        if id(tensor) in context.collector.parameters:
            return "weight", id(tensor), tensor.requires_grad
        number = self._made.get(tensor)
        where = context.known.get_layout(tensor)
        is_drawn = self._places.is_drawn(tensor)  # by a seed that may be a number
        if (number is None or is_drawn) and where is None and not tensor.requires_grad:
            return _describe_values(tensor)
        return "result", number, type(where).__name__, tensor.dtype, tensor.requires_grad


class Number:
    """A number in the calls of a step: equal to one of another step if both can be the same function of the batch size.

    >>> Number(0.25, 4) == Number(0.5, 2), Number(4, 4) == Number(4, 2), Number(100 / 3, 3) == Number(50.0, 2)
    (True, True, True)
    >>> Number(0.25, 4) == Number(2, 2)
    False
    """

    def __init__(self, value: float, batch: int) -> None:
        meanings = {"batch": batch, "1 / batch": 1 / max(1, batch), "100 / batch": 100 / max(1, batch)}
        self._meanings = {repr(value), *(name for name, meant in meanings.items() if value == meant)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Number) and not self._meanings.isdisjoint(other._meanings)

    def __hash__(self) -> int:
        return hash(Number)


def _describe_values(tensor: Tensor) -> Any:
    storage = _torch.find_storage(tensor)
    if not 0 < tensor.numel() <= _MOST_ENTRIES or tensor.is_meta or storage is None or not storage.nbytes():
        return tensor.dtype, tensor.dim()
    with _torch.DisableTorchFunction(), torch.no_grad():
        first = tensor.detach().flatten()[0]
        if tensor.numel() > 1 and bool((tensor == first).all()):
            return tensor.dtype, first.item()
        return _digest(tensor.detach().cpu().float().numpy())


def _digest(array: Any) -> Any:
    return array.shape, hashlib.sha256(array.tobytes()).hexdigest()


def _count_common(calls: _Calls, others: Iterable[Any]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(calls, others, strict=False)))


def _is_number(func: Any, result: Any) -> bool:
    """Whether a call has returned something that is no tensor and may tell values of its arguments."""
    if result is None or isinstance(result, Tensor):
        return False
    name = getattr(func, "__name__", "")
    if name in _NO_READS or (name.startswith("is_") and name != "is_nonzero"):
        return False
    return not any(True for _ in find_tensors(result))


def _has_samples(value: Any, context: Context) -> bool:
    return any(context.find_known_layout(tensor) is not None for tensor in find_tensors(value))


def _is_picked(tensor: Tensor, context: Context) -> bool:
    """Whether the size of a tensor may depend on values: a mask has picked its entries, or samples are mixed in it."""
    where = context.known.get_layout(tensor)
    return where is not None and (not isinstance(where, Layout) or where.loose)


def _has_classes(args: Any, kwargs: Any) -> bool:
    """Whether a call of `one_hot` says how many classes there are."""
    return (args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) != -1


def _is_size(value: int, context: Context) -> bool:
    """Whether a number is a size that no value decides: of a tensor with whole samples, or a product of two."""
    sizes = {
        size
        for tensor, (where, _) in context.known.items()
        if isinstance(where, Layout) and not where.loose
        for size in tensor.shape
    }
    return value in sizes or any(size > 1 and value % size == 0 and value // size in sizes for size in sizes)


def refuse_saved_hooks(context: Context) -> None:
    """Refuse hooks that could change what the graph of the loss keeps."""
    hooks = _torch.get_saved_tensor_hooks()
    if hooks is None or all(str(hook.__module__).partition(".")[0] in ("torch", "persample") for hook in hooks):
        return
    raise SamplesMixed(
        f"torch.autograd.graph.saved_tensors_hooks is entered around the loss, in {context.place()}. Its functions see "
        "all samples and may change the gradients of others, so private training refuses them. Enter it inside the "
        "model's forward(), or use save_on_cpu or a checkpoint of torch."
    )


def _refuse_changes(hook: Callable[[Tensor], Tensor | None], place: str) -> Any:
    """A hook on the gradient of a sum over the samples that does the same and refuses to change the gradient."""

    def check(gradient: Tensor) -> None:
        if hook(gradient) is not None:
            raise SamplesMixed(
                f"The hook {getattr(hook, '__qualname__', hook)!r}, of {place}, returns another gradient of a sum over "
                "the samples, and so changes the gradients of all of them. Let it return None, or scale the loss."
            )

    return check


class GuardedNode:
    """A node of the graph to which no hooks can be added: they would see and change the gradients of all samples."""

    def __init__(self, node: Any) -> None:
        self._node = node

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._node)

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            raise SamplesMixed(
                f"grad_fn.{name}() is called in private training. Such a hook sees the gradients of all samples, and "
                "what it returns is not followed. Use Tensor.register_hook."
            )
        found = getattr(self._node, name)
        if name == "next_functions":
            return tuple((node if node is None else GuardedNode(node), number) for node, number in found)
        return found

    def __eq__(self, other: Any) -> bool:
        return bool(self._node == getattr(other, "_node", other))

    def __hash__(self) -> int:
        return hash(self._node)


def guard_node(node: Any) -> Any:
    """The node of the graph that a program reads: guarded if the program is neither torch nor persample."""
    if node is None:
        return None
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_of_mode(frame):
        frame = frame.f_back
    return node if _get_module(frame).partition(".")[0] in ("torch", "persample") else GuardedNode(node)


def _is_of_mode(frame: Any) -> bool:
    return frame.f_code.co_name == "__torch_function__" or _get_module(frame) in _OF_MODES


_OF_MODES = {__name__, "persample.forward.mode", "persample._internal.dynamo", "torch.overrides"}


def _get_module(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", ""))
