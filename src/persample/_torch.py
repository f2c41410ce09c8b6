"""Every private name of torch that persample uses.

No other module may use one (`tests/test_structure.py`). Each entry says what the name gives and which feature needs it.
If the installed torch lacks a name, `import persample` still works: the first use of the name raises a PerSampleError
that names the feature.
"""

from __future__ import annotations

import importlib
import math
import platform
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial, wraps
from operator import attrgetter
from types import FrameType
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from persample._version import TESTED_TORCH
from persample.errors import PerSampleError

P = ParamSpec("P")
R = TypeVar("R")


def warn_if_untested(version: str) -> None:
    """Warn if the tests have not been run with a version of torch."""
    if not version.startswith(tuple(f"{tested}." for tested in TESTED_TORCH)):
        warnings.warn(
            f"persample was not tested with torch {version}, but with {', '.join(TESTED_TORCH)}. It may refuse what it "
            "records with these: every private name of torch is looked up when it is first used.",
            stacklevel=2,
        )


warn_if_untested(torch.__version__)


class _Missing:
    """Stands for a private name that the installed torch does not have; any use of it raises."""

    def __init__(self, path: str, feature: str) -> None:
        self.__dict__.update(path=path, feature=feature)

    def _raise(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise PerSampleError(
            f"{self.__dict__['feature']} needs {self.__dict__['path']}, a private name of torch that torch "
            f"{torch.__version__} does not have. Install another version: docs/reference/versions.md lists the names "
            f"that the tested versions have ({', '.join(TESTED_TORCH)})."
        )

    __call__ = __enter__ = __getattr__ = __mro_entries__ = _raise

    def __instancecheck__(self, instance: object) -> bool:
        return False


def _find(path: str, feature: str) -> Any:
    """The object with this dotted name, or a `_Missing` in its place."""
    names = path.split(".")
    found: Any = torch
    for i, name in enumerate(names[1:], start=2):
        try:
            found = getattr(found, name)
        except AttributeError:
            try:
                found = importlib.import_module(".".join(names[:i]))
            except ImportError:
                return _Missing(path, feature)
    return found


def _read(owner: Any, name: str, feature: str) -> Any:
    """A private attribute of one of torch's objects."""
    try:
        return getattr(owner, name)
    except AttributeError:
        return _Missing(f"{type(owner).__name__}.{name}", feature)._raise()


# ---- modes of torch functions ----

# Context manager in which torch functions do not reach modes or subclasses.
DisableTorchFunction: Any = _find("torch._C.DisableTorchFunction", "Every recording")


class _Stacks(threading.local):
    """Whether a stack of modes is being read or changed in this thread, and what shall be removed afterwards."""

    is_busy = False

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []


_stacks = _Stacks()


def _undisturbed(function: Callable[P, R]) -> Callable[P, R]:
    """While `function` runs, no mode is removed.

    The garbage collector may free a watched model at any time, and its mode then has to leave the stack.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        is_outermost, _stacks.is_busy = not _stacks.is_busy, True
        try:
            return function(*args, **kwargs)
        finally:
            if is_outermost:
                _stacks.is_busy = False
                while _stacks.waiting:
                    _stacks.waiting.pop()()

    return run


def _removing(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """The function, which waits if a stack of modes is being read or changed."""
    remove = _undisturbed(function)

    @wraps(function)
    def run(mode: Any) -> None:
        if _stacks.is_busy:
            _stacks.waiting.append(partial(remove, mode))
        else:
            remove(mode)

    return run


_list_function_modes: Callable[[], list[TorchFunctionMode]] = _find(
    "torch.overrides._get_current_function_mode_stack", "Every recording"
)
_count_function_modes: Callable[[], int] = _find("torch._C._len_torch_function_stack", "watch()")
_push_function_mode: Callable[[TorchFunctionMode], None] = _find("torch.overrides._push_mode", "watch()")
_pop_function_mode: Callable[[], TorchFunctionMode] = _find("torch.overrides._pop_mode", "watch()")
_default_device: Any = _find("torch._GLOBAL_DEVICE_CONTEXT", "watch()")


@_undisturbed
def get_function_modes() -> list[TorchFunctionMode]:
    """All active function modes, the outermost first."""
    return _list_function_modes()


@_undisturbed
def insert_outermost_mode(mode: TorchFunctionMode) -> None:
    """Enter `mode` outside all other function modes, whose own blocks then still end in order.

    torch requires the mode of the default device to stay the outermost one.
    """
    inner = _pop_function_modes()
    if inner and inner[-1] is getattr(_default_device, "device_context", None):
        _push_function_mode(inner.pop())
    _push_function_mode(mode)
    for other in reversed(inner):
        _push_function_mode(other)


@_removing
def remove_mode(mode: TorchFunctionMode) -> None:
    """Leave `mode`, wherever it is on the stack."""
    if not any(other is mode for other in get_function_modes()):
        return
    for other in reversed(_pop_function_modes()):
        if other is not mode:
            _push_function_mode(other)


def _pop_function_modes() -> list[TorchFunctionMode]:
    """Empty the stack, the innermost mode first."""
    modes = []
    while _count_function_modes():
        modes.append(_pop_function_mode())
    return modes


_list_dispatch_modes: Callable[[], list[Any]] = _find(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack", "Every recording"
)


@_undisturbed
def get_dispatch_modes() -> list[Any]:
    """All active dispatch modes, the outermost first."""
    return _list_dispatch_modes()


def is_default_device(mode: TorchFunctionMode) -> bool:
    """Whether a function mode is the one of `torch.set_default_device`."""
    return mode is getattr(_default_device, "device_context", None)


# ---- products ----

# Computes `a @ b.mT` for two matrices.
Product = Callable[[Tensor, Tensor], Tensor]

_multiply_and_apply: Any = _find("torch.ops.mkldnn._linear_pointwise", "A product of matrices by oneDNN")


@cache
def find_onednn_product() -> Product | None:
    """oneDNN's product of float32 matrices; None if this torch does not have it, or not on this kind of processor."""
    is_supported = platform.machine().lower() in ("x86_64", "amd64") and torch.backends.mkldnn.is_available()
    if not is_supported or isinstance(_multiply_and_apply, _Missing):
        return None
    function = _multiply_and_apply.default
    return lambda a, b: function(a, b, None, "none", [], "")


# The precision of float32 operations of a backend ("none" and "ieee" are the full one), as it is in effect.
_get_precision: Callable[[str, str], str] = _find("torch._C._get_fp32_precision_getter", "Every recording")
set_precision: Callable[[str, str, str], None] = _find("torch._C._set_fp32_precision_setter", "Every recording")

_BACKENDS = ("mkldnn", "cuda") if torch.backends.cuda.is_built() else ("mkldnn",)
_PRODUCTS = tuple((backend, operation) for backend in _BACKENDS for operation in ("matmul", "conv"))


def find_reduced_precision() -> list[tuple[str, str, str]]:
    """The settings that let products of float32 round their factors: backend, operation, precision."""
    return [(*product, set_to) for product in _PRODUCTS if (set_to := _get_precision(*product)) not in ("none", "ieee")]


# Whether autocast is on for any device.
is_any_autocast_enabled: Callable[[], bool] = _find("torch._C._is_any_autocast_enabled", "Every recording")


# ---- autograd ----

# The number of the backward pass that runs in this thread, -1 if there is none.
get_backward_pass: Callable[[], int] = _find("torch._C._current_graph_task_id", "Every recording")

# Whether the running backward pass will execute a node: not so if `autograd.grad` asks for other inputs.
will_run_node: Callable[[Any], bool] = _find("torch._C._will_engine_execute_node", "Every recording")

_engine: Any = _find("torch.autograd.Variable._execution_engine", "Every recording")


def count_gradient_bytes(node: Any) -> int:
    """The size of the gradients that a node of the graph receives in a backward pass; 0 if torch does not tell."""
    return sum(math.prod(each.shape) * each.dtype.itemsize for each in getattr(node, "_input_metadata", ()))


# The innermost pair of `saved_tensors_hooks`, None if there is none. It is called for every op.
get_saved_tensor_hooks: Callable[[], Any] = partial(
    _find("torch._C._autograd._top_saved_tensors_default_hooks", "Recording a checkpointed model"), False
)

# The number of in-place changes that autograd counts for a tensor.
get_version: Callable[[Tensor], int] = attrgetter("_version")

# Makes a tensor subclass that shares its data with a tensor.
make_subclass: Callable[..., Any] = _find("torch.Tensor._make_subclass", "ExpandedWeight")


# Sets the number of in-place changes that autograd counts for each of some tensors.
set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = _find(
    "torch._C._autograd._unsafe_set_version_counter", "Verifying a recording"
)


def clone_lazily(tensor: Tensor) -> Tensor:
    """A copy of a tensor on the CPU that takes memory when one of both is written to."""
    clone = getattr(tensor, "_lazy_clone", None)
    return tensor.clone() if clone is None or type(tensor) is not Tensor or tensor.device.type != "cpu" else clone()


def _hand_over_backward() -> None:
    """Have function modes see calls of `torch.autograd.backward`, which torch 2.10 hides from them."""
    original = torch.autograd.backward
    if "handle_torch_function" in original.__code__.co_names:
        return

    @wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        if has_torch_function(roots):
            return handle_torch_function(backward, roots, tensors, *args, **kwargs)
        return original(tensors, *args, **kwargs)

    torch.autograd.backward = backward


_hand_over_backward()


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call a function when the running backward pass has ended."""
    _engine.queue_callback(callback)


def read_saved(node: Any, name: str) -> Any:
    """An argument of an op that its autograd node keeps, such as `dim`."""
    return _read(node, f"_saved_{name}", "A weight that is used through a view or a transpose")


def count_results(node: Any) -> int:
    """The number of results of the op behind an autograd node."""
    return len(_read(node, "_input_metadata", "A weight that is used through unbind()"))


def get_storage_id(tensor: Tensor) -> int:
    """An id of the memory that a tensor and its views share."""
    return get_storage_key(tensor.untyped_storage())


def get_storage_key(storage: torch.UntypedStorage) -> int:
    """An id of a storage, as long as it or a weak reference to it exists."""
    return _read(storage, "_cdata", "Every recording")


def get_address(storage: torch.UntypedStorage) -> int:
    """The address of a storage, 0 if it has no memory."""
    try:
        return storage.data_ptr()
    except RuntimeError:
        return 0


_count_owners: Callable[[int], int] = _find("torch._C._storage_Use_Count", "Every recording")


def count_owners(storage: torch.UntypedStorage) -> int:
    """The number of tensors with this memory, and of other objects that keep it, besides `storage` itself."""
    return _count_owners(get_storage_key(storage)) - 1


def get_storage(ref: Any) -> torch.UntypedStorage | None:
    """The storage behind a `StorageWeakRef`, None if it was freed."""
    return torch.UntypedStorage._new_with_weak_ptr(ref.cdata)


def find_storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor, None if it has none of its own (sparse tensors, wrappers of torch.func)."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
    return None if is_wrapped_by_transform(tensor) else storage


_get_transforms: Callable[[], Any] = _find("torch._C._functorch.peek_interpreter_stack", "Every recording")

# Whether a tensor is the wrapper of a transform of torch.func (vmap, grad, jvp, functionalize) around another tensor.
is_wrapped_by_transform: Callable[[Tensor], bool] = _find(
    "torch._C._functorch.is_functorch_wrapped_tensor", "Every recording"
)


def is_inside_transform() -> bool:
    """Whether a transform of torch.func is running."""
    return _get_transforms() is not None


def is_inside_forward_ad() -> bool:
    """Whether a level of forward-mode AD is active."""
    return _read(forward_ad, "_current_level", "Every recording") >= 0


def has_tangent(tensor: Tensor) -> bool:
    """Whether forward-mode AD runs through a tensor."""
    return is_inside_forward_ad() and forward_ad.unpack_dual(tensor).tangent is not None


# The functions by which forward-mode AD joins a tensor and its tangent.
DUAL_FUNCTIONS: set[Any] = {_find(f"torch.{name}", "Forward-mode AD") for name in ("_make_dual", "_unpack_dual")}


def find_storage_id(tensor: Tensor) -> int | None:
    """An id of the memory that a tensor and its views share, None if the tensor has no memory of its own (sparse)."""
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:
        return None


def is_foreign_memory(tensor: Tensor) -> bool:
    """Whether the memory of a tensor belongs to another library, such as numpy."""
    try:
        return not tensor.untyped_storage().resizable()
    except NotImplementedError:
        return False


def get_gradient_hooks(parameter: Tensor) -> tuple[dict[int, Any] | None, ...]:
    """The hooks on the gradient of a leaf: those of `register_hook`, and those that run when it was accumulated."""
    return parameter._backward_hooks, parameter._post_accumulate_grad_hooks


def forget_gradient_hooks(result: Tensor) -> None:
    """Remove the hooks on the gradient of a tensor that is no leaf."""
    if hooks := result._backward_hooks:
        hooks.clear()


def has_gradient_hooks(parameters: Iterable[Any]) -> bool:
    """Whether any of some leaves has a hook on its gradient."""
    return any([p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters])


def get_checkpoint_frame(pack: Any) -> Any:
    """What a non-reentrant checkpoint keeps for its recomputation, given its hook for saved tensors, else None."""
    names = getattr(getattr(pack, "__code__", None), "co_freevars", ())
    if pack is None or "frame" not in names:
        return None
    frame = pack.__closure__[names.index("frame")].cell_contents
    return frame if hasattr(frame, "recompute_fn") else None


_reentrant_forward: Any = _find("torch.utils.checkpoint.CheckpointFunction.forward", "Recording a checkpointed model")


def is_in_reentrant_checkpoint() -> bool:
    """Whether a reentrant checkpoint is running its function for the first time, without gradients."""
    code = _reentrant_forward.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


# ---- torch functions without a public name ----

pack_padded_sequence: Any = _find("torch._pack_padded_sequence", "PackedSequence")
pad_packed_sequence: Any = _find("torch._pad_packed_sequence", "PackedSequence")
pad_sequence: Any = _find("torch._C._nn.pad_sequence", "pad_sequence")
grouped_mm: Any = _find("torch._grouped_mm", "grouped_mm")
cudnn_rnn_flatten_weight: Any = _find("torch._cudnn_rnn_flatten_weight", "ExpandedWeight in recurrent layers")

_OpOverload: Any = _find("torch._ops.OpOverload", "Operators of torch.ops")
_OpOverloadPacket: Any = _find("torch._ops.OpOverloadPacket", "Operators of torch.ops")


def get_operator_name(func: Any) -> str | None:
    """The name "library::operator" of an operator of `torch.ops`, None for any other function."""
    if isinstance(func, _OpOverload):
        func = func.overloadpacket
    return str(func._qualified_op_name) if isinstance(func, _OpOverloadPacket) else None


def get_schema(operator: Any) -> Any:
    """The arguments and results that an operator of `torch.ops` declares."""
    return _read(operator, "_schema", "persample.compile")


def find_signatures(name: str) -> list[dict[str, Any]]:
    """The parameters of each overload of an operator of torch, with their defaults."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    return [{a.name: a.default_value for a in get_schema(overload).arguments} for overload in overloads]


# torch.tensordot with two lists of dimensions, which torch.tensordot calls.
tensordot: Callable[..., Any] = _find("torch._VF.tensordot", "tensordot() with weights")

# Whether all or any entries are true; torch.distributions and compiled code call them.
TRUTH_FUNCTIONS: list[Callable[..., Any]] = [
    _find(f"torch.{name}", "torch.distributions") for name in ("_is_all_true", "_is_any_true")
]

# Draws random numbers for each row; torch.distributions calls it.
sample_dirichlet: Callable[..., Any] = _find("torch._sample_dirichlet", "torch.distributions")

# Draw random numbers for each entry; torch.distributions calls them.
RANDOM_FUNCTIONS: list[Callable[..., Any]] = [
    _find(f"torch.{name}", "torch.distributions")
    for name in ("_standard_gamma", "_standard_gamma_grad", "_dirichlet_grad")
]


@cache
def is_mutating(operator: Any) -> bool:
    """Whether an operator of `torch.ops` declares that it writes into an argument."""
    schema = getattr(operator, "_schema", None)
    return schema is not None and schema.is_mutable


# ---- modules ----


def get_parameters(module: nn.Module) -> dict[str, Tensor | None]:
    """The dict in which a module keeps its own parameters."""
    return _read(module, "_parameters", "persample.compile")


def list_members(modules: list[Any]) -> list[dict[str, Any]]:
    """The dicts in which modules keep their own parameters, then those in which they keep their children."""
    return [*[module._parameters for module in modules], *[module._modules for module in modules]]


def walk_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules, each once, with the prefix of their parameters' names; a module may be its own child."""
    found: dict[int, tuple[str, Any]] = {}
    pending: list[tuple[str, Any]] = [("", model)]
    while pending:
        entry = prefix, module = pending.pop()
        if id(module) not in found:
            found[id(module)] = entry
            if children := module._modules:
                pending += [(f"{prefix}{name}.", child) for name, child in children.items() if child is not None][::-1]
    return list(found.values())


def get_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The dict in which a module keeps its own buffers."""
    return _read(module, "_buffers", "Restoring a model's buffers")


# Runs in each call of a module, with the module as `self`.
_call_module: Any = _find("torch.nn.Module._call_impl", "Recording a loss with tensors from outside the model")


def iterate_running_modules() -> Iterator[nn.Module]:
    """The modules that are being called in this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    code = _call_module.__code__
    while frame is not None:
        if frame.f_code is code:
            yield frame.f_locals["self"]
        frame = frame.f_back


def is_running(module: nn.Module) -> bool:
    """Whether a call of a module is running in this thread, below the one whose hooks are running now."""
    frame: FrameType | None = sys._getframe(1)
    calls = 0
    while frame is not None and calls < 2:
        calls += frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module
        frame = frame.f_back
    return calls == 2


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether hooks run before or after a module's forward."""
    feature = "Transformer layers in eval()"
    return bool(_read(module, "_forward_hooks", feature) or _read(module, "_forward_pre_hooks", feature))


_module_implementation: Any = _find("torch.nn.modules.module", "Verifying a recording")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)


def get_hooks(module: nn.Module) -> list[Any]:
    """The hooks that run before and after a module's forward and backward."""
    return [hook for name in _HOOKS for hook in _read(module, name, "Verifying a recording").values()]


def get_custom_function(node: Any) -> type:
    """The `autograd.Function` that a node of the graph belongs to; the type of the node if that is not known."""
    found: type = getattr(node, "_forward_cls", type(node))
    return found


def get_backward_hooks(module: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """The hooks that run before and after a module's backward, by their ids."""
    return module._backward_hooks, module._backward_pre_hooks


def find_modules_with_backward_hooks(modules: list[Any]) -> list[nn.Module]:
    """Those of some modules that have hooks before or after their backward."""
    return [module for module in modules if module._backward_hooks or module._backward_pre_hooks]


def get_global_hooks() -> list[Any]:
    """The hooks that run before and after the forward and backward of every module."""
    return [hook for name in _GLOBAL_HOOKS for hook in getattr(_module_implementation, name).values()]


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` or `module.compile()` was called on a module."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def apply_to_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter and buffer of a module by a function of it."""
    _read(module, "_apply", "check()")(function)


# ---- nested containers ----

# A pytree library: tree_flatten, tree_leaves, tree_map and so on.
pytree: Any = _find("torch.utils._pytree", "Models with nested arguments or outputs")


# ---- the compiler ----

TorchDispatchMode: Any = _find("torch.utils._python_dispatch.TorchDispatchMode", "persample.compile")


def make_dispatch_mode(run: Callable[[Any, Any, Any], Any]) -> Any:
    """A dispatch mode that calls `run(operator, args, kwargs)` for each op.

    torch would import its compiler at the first op, which takes seconds: code under this mode is not compiled.
    """

    class Mode(TorchDispatchMode):
        supports_higher_order_operators = True

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return run(func, args, kwargs or {})

    return Mode()


# Context manager in which no dispatch mode is active.
disable_dispatch_modes: Callable[[], Any] = _find(
    "torch.utils._python_dispatch._disable_current_modes", "persample.compile"
)


_count_dispatch_modes: Callable[[], int] = _find("torch._C._len_torch_dispatch_stack", "Every recording")
_push_dispatch_mode: Callable[[Any], None] = _find("torch.utils._python_dispatch._push_mode", "Every recording")
_pop_dispatch_mode: Callable[[], Any] = _find("torch.utils._python_dispatch._pop_mode", "Every recording")


@_undisturbed
def insert_outermost_dispatch_mode(mode: Any) -> None:
    """Enter a dispatch mode outside all others, whose own blocks then still end in order."""
    for other in (mode, *reversed(_pop_dispatch_modes())):
        _push_dispatch_mode(other)


@_removing
def remove_dispatch_mode(mode: Any) -> None:
    """Leave a dispatch mode, wherever it is on the stack; nothing happens if it is not there."""
    if not any(other is mode for other in get_dispatch_modes()):
        return
    for other in reversed(_pop_dispatch_modes()):
        if other is not mode:
            _push_dispatch_mode(other)


def _pop_dispatch_modes() -> list[Any]:
    """Empty the stack, the innermost mode first."""
    modes = []
    while _count_dispatch_modes():
        modes.append(_pop_dispatch_mode())
    return modes


def draws_random_numbers(function: Callable[[], Any]) -> bool:
    """Whether a function draws from torch's generators, in this thread. The function is called."""
    is_random = False

    class RandomOps(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal is_random
            is_random |= torch.Tag.nondeterministic_seeded in func.tags
            return func(*args, **(kwargs or {}))

    with RandomOps():
        function()
    return is_random


FakeTensor: Any = _find("torch._subclasses.fake_tensor.FakeTensor", "persample.compile")
FakeTensorMode: Any = _find("torch._subclasses.fake_tensor.FakeTensorMode", "persample.compile")

# What a fake tensor raises if its values, or a shape that depends on values, are read.
VALUE_READ_ERRORS: Any = (
    _find("torch._subclasses.fake_tensor.DataDependentOutputException", "persample.compile"),
    _find("torch._subclasses.fake_tensor.DynamicOutputShapeException", "persample.compile"),
)
FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"

# Sets what torch.compile does with Python frames, and returns what it was.
set_eval_frame: Callable[[Any], Any] = _find("torch._C._dynamo.eval_frame.set_eval_frame", "Every recording")

# Sets what compiles backward passes, and returns what it was.
set_autograd_compiler: Callable[..., Any] = _find(
    "torch._C._dynamo.compiled_autograd.set_autograd_compiler", "Every recording"
)

_set_code_exec_strategy: Any = _find("torch._C._dynamo.eval_frame.set_code_exec_strategy", "Every recording")
_FrameAction: Any = _find("torch._C._dynamo.eval_frame._FrameAction", "Every recording")
_FrameExecStrategy: Any = _find("torch._C._dynamo.eval_frame._FrameExecStrategy", "Every recording")


def is_dynamo_loaded() -> bool:
    """Whether torch.compile has been used: its import takes a second, and is left to the user."""
    return "torch._dynamo" in sys.modules


def is_compiled_autograd_running() -> bool:
    """Whether the running backward pass is a graph of compiled autograd."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and module.in_compiled_autograd_region


def allow_nested_trace() -> Any:
    """Context manager in which a trace may look into compiled functions; torch.compile must be loaded."""
    return _find("torch._dynamo.config", "persample.compile").patch(error_on_nested_fx_trace=False)


def do_not_trace(function: Any, reason: str) -> None:
    """Have compiled functions call a function without tracing into it."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = reason


def do_not_compile(function: Any, with_callees: bool) -> None:
    """Have torch.compile skip the frames of a function and, `with_callees`, of all that it calls.

    Without the private names for it torch.compile looks at these frames, and leaves them by itself.
    """
    if isinstance(_set_code_exec_strategy, _Missing) or isinstance(_FrameExecStrategy, _Missing):
        return
    callees = _FrameAction.SKIP if with_callees else _FrameAction.DEFAULT
    _set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, callees))


def get_uncompiled(function: Any) -> Any:
    """The function behind a compiled one, None for any other."""
    return getattr(function, "_torchdynamo_orig_callable", None)


# ---- several processes ----

_FSDP = "Recording under fully_shard"
_COLLECT = "torch.distributed.fsdp._common_utils.collect_grad_tensors"
_REPLACE = "torch.distributed.fsdp._common_utils.replace_grad_tensors"
_HOOK = "torch.distributed.fsdp._fully_shard._fsdp_param_group.RegisterPostBackwardFunction"


def get_default_store() -> Any:
    """The store that the processes of the default process group share."""
    return _find("torch.distributed.distributed_c10d._get_default_store", "Private training in several processes")()


def get_active_ddp() -> Any:
    """The DistributedDataParallel wrapper whose forward is running, None if there is none."""
    return _read(DistributedDataParallel, "_get_active_ddp_module", "Recording under DistributedDataParallel")()


def get_fsdp_states(model: nn.Module) -> list[Any]:
    """The states of `fully_shard` in a model, each once."""
    implementation = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    if implementation is None:
        return []
    find_state = _read(implementation, "_get_module_fsdp_state", _FSDP)
    states = {id(state): state for state in map(find_state, model.modules()) if state is not None}
    for state in states.values():
        _require_fsdp(state)
    return list(states.values())


def _require_fsdp(state: Any) -> None:
    """Raise before anything is recorded if a name is missing that is needed later, or only after an error."""
    for name in ("_fsdp_param_groups", "_reset_iter_state", "_root_post_backward_final_callback"):
        _read(state, name, _FSDP)
    for path in (_COLLECT, _REPLACE, _HOOK):
        if isinstance(missing := _find(path, _FSDP), _Missing):
            missing()


def get_fsdp_groups(state: Any) -> list[Any]:
    """The groups of parameters that a state of `fully_shard` gathers and shards together."""
    return list(_read(state, "_fsdp_param_groups", _FSDP))


def get_fsdp_modules(state: Any) -> list[nn.Module]:
    """The modules that a state of `fully_shard` belongs to."""
    return list(_read(state, "_modules", _FSDP))


def get_fsdp_context(state: Any) -> Any:
    """What all states of one root module share."""
    return _read(state, "_state_ctx", _FSDP)


def is_unsharded_once(managed: Any) -> bool:
    """Whether a parameter of `fully_shard` has been gathered before, so that its unsharded tensor exists."""
    return hasattr(managed, "_unsharded_param")


def get_fsdp_forms(managed: Any) -> list[Tensor]:
    """The tensors that a module may hold for one parameter."""
    after_forward = getattr(managed, "_sharded_post_forward_param", None)
    return [managed.sharded_param, managed.unsharded_param, *([] if after_forward is None else [after_forward])]


def set_fsdp_hook_registration(group: Any, register: Callable[..., Any] | None) -> None:
    """Replace how a group attaches its backward hook to its module's inputs; None restores torch's own way."""
    _read(group, "_register_post_backward_hook", _FSDP)
    if register is None:
        vars(group).pop("_register_post_backward_hook", None)
    else:
        group._register_post_backward_hook = register


def attach_fsdp_hook(group: Any, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The tensors, passed through the node by which a group notices the end of its module's backward."""
    return _find(_HOOK, _FSDP).apply(group, *tensors)


def get_grad_tensors(value: Any) -> list[Tensor]:
    """The tensors with gradients in a module's arguments, in the order that `fully_shard` uses."""
    return list(_find(_COLLECT, _FSDP)(value))


def replace_grad_tensors(value: Any, tensors: Iterable[Tensor]) -> Any:
    """The same arguments with other tensors in these places."""
    return _find(_REPLACE, _FSDP)(value, iter(tensors))


def reset_fsdp_after_error(context: Any) -> None:
    """Prepare `fully_shard` for the next step after one that failed."""
    _read(context.all_states[0], "_reset_iter_state", _FSDP)()


def finish_fsdp_backward(context: Any) -> None:
    """Have `fully_shard` reduce and shard the gradients, as it does at the end of a backward pass.

    torch 2.15 notes at the start of a pass whether the user ends it, and forgets this at the first end.
    """
    if getattr(context, "manual_backward_finalization_active", False) is None:
        context.manual_backward_finalization_active = context.manual_backward_finalization
    _read(context.all_states[0], "_root_post_backward_final_callback", _FSDP)()


def is_managed_by_other_parallelism(module: nn.Module) -> bool:
    """Whether FSDP1 or `replicate` runs a module."""
    states = sys.modules.get("torch.distributed._composable_state")
    contract = sys.modules.get("torch.distributed._composable.contract")
    applied: Mapping[str, Any] | None = None if contract is None else _read(contract, "_get_registry", _FSDP)(module)
    return "replicate" in (applied or ()) or (
        states is not None and _read(states, "_get_module_state", _FSDP)(module) is not None
    )
