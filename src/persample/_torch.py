"""Every private name of torch that persample uses.

No other module may use one (`tests/test_structure.py`). Each entry says what the name gives and which feature needs it.
If the installed torch lacks a name, `import persample` still works: the first use of the name raises a PerSampleError
that names the feature.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from persample.errors import PerSampleError


class _Missing:
    """Stands for a private name that the installed torch does not have; any use of it raises."""

    def __init__(self, path: str, feature: str) -> None:
        self.__dict__.update(path=path, feature=feature)

    def _raise(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise PerSampleError(
            f"{self.__dict__['feature']} needs {self.__dict__['path']}, a private name of torch that torch "
            f"{torch.__version__} does not have. Install a version of torch that persample is tested with: "
            "torch>=2.13,<2.14."
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

# All active function modes, the outermost first.
get_function_modes: Callable[[], list[TorchFunctionMode]] = _find(
    "torch.overrides._get_current_function_mode_stack", "Every recording"
)

_count_function_modes: Callable[[], int] = _find("torch._C._len_torch_function_stack", "watch()")
_push_function_mode: Callable[[TorchFunctionMode], None] = _find("torch.overrides._push_mode", "watch()")
_pop_function_mode: Callable[[], TorchFunctionMode] = _find("torch.overrides._pop_mode", "watch()")
_default_device: Any = _find("torch._GLOBAL_DEVICE_CONTEXT", "watch()")


def insert_outermost_mode(mode: TorchFunctionMode) -> None:
    """Enter `mode` outside all other function modes, whose own blocks then still end in order.

    torch requires the mode of the default device to stay the outermost one.
    """
    inner = [_pop_function_mode() for _ in range(_count_function_modes())]
    if inner and inner[-1] is getattr(_default_device, "device_context", None):
        _push_function_mode(inner.pop())
    _push_function_mode(mode)
    for other in reversed(inner):
        _push_function_mode(other)


def remove_mode(mode: TorchFunctionMode) -> None:
    """Leave `mode`, wherever it is on the stack."""
    modes = [_pop_function_mode() for _ in range(_count_function_modes())]
    for other in reversed(modes):
        if other is not mode:
            _push_function_mode(other)


# ---- autograd ----

# The number of the backward pass that runs in this thread, -1 if there is none.
get_backward_pass: Callable[[], int] = _find("torch._C._current_graph_task_id", "Every recording")

# Whether the running backward pass will execute a node: not so if `autograd.grad` asks for other inputs.
will_run_node: Callable[[Any], bool] = _find("torch._C._will_engine_execute_node", "Every recording")

_engine: Any = _find("torch.autograd.Variable._execution_engine", "Every recording")

# The innermost pair of `saved_tensors_hooks`, None if there is none.
_get_saved_tensor_hooks: Callable[[bool], Any] = _find(
    "torch._C._autograd._top_saved_tensors_default_hooks", "Recording a checkpointed model"
)

# Makes a tensor subclass that shares its data with a tensor.
make_subclass: Callable[..., Any] = _find("torch.Tensor._make_subclass", "ExpandedWeight")


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call a function when the running backward pass has ended."""
    _engine.queue_callback(callback)


def get_saved_tensor_hooks() -> Any:
    """The innermost pair of `saved_tensors_hooks`, None if there is none."""
    return _get_saved_tensor_hooks(False)


def read_saved(node: Any, name: str) -> Any:
    """An argument of an op that its autograd node keeps, such as `dim`."""
    return _read(node, f"_saved_{name}", "A weight that is used through a view or a transpose")


def count_results(node: Any) -> int:
    """The number of results of the op behind an autograd node."""
    return len(_read(node, "_input_metadata", "A weight that is used through unbind()"))


def get_storage_id(tensor: Tensor) -> int:
    """An id of the memory that a tensor and its views share."""
    return _read(tensor.untyped_storage(), "_cdata", "Every recording")


def get_checkpoint_frame(pack: Any) -> Any:
    """What a non-reentrant checkpoint keeps for its recomputation, given its hook for saved tensors, else None."""
    names = getattr(getattr(pack, "__code__", None), "co_freevars", ())
    if pack is None or "frame" not in names:
        return None
    frame = pack.__closure__[names.index("frame")].cell_contents
    return frame if hasattr(frame, "recompute_fn") else None


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


# ---- modules ----


def get_parameters(module: nn.Module) -> dict[str, Tensor | None]:
    """The dict in which a module keeps its own parameters."""
    return _read(module, "_parameters", "persample.compile")


def get_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The dict in which a module keeps its own buffers."""
    return _read(module, "_buffers", "Restoring a model's buffers")


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether hooks run before or after a module's forward."""
    feature = "Transformer layers in eval()"
    return bool(_read(module, "_forward_hooks", feature) or _read(module, "_forward_pre_hooks", feature))


def apply_to_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter and buffer of a module by a function of it."""
    _read(module, "_apply", "check()")(function)


# ---- nested containers ----

# A pytree library: tree_flatten, tree_leaves, tree_map and so on.
pytree: Any = _find("torch.utils._pytree", "Models with nested arguments or outputs")


# ---- the compiler ----

TorchDispatchMode: Any = _find("torch.utils._python_dispatch.TorchDispatchMode", "persample.compile")

# Context manager in which no dispatch mode is active.
disable_dispatch_modes: Callable[[], Any] = _find(
    "torch.utils._python_dispatch._disable_current_modes", "persample.compile"
)


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


def get_active_ddp() -> Any:
    """The DistributedDataParallel wrapper whose forward is running, None if there is none."""
    return _read(DistributedDataParallel, "_get_active_ddp_module", "Recording under DistributedDataParallel")()


def get_fsdp_states(model: nn.Module) -> list[Any]:
    """The states of `fully_shard` in a model, each once."""
    implementation = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    if implementation is None:
        return []
    find_state = _read(implementation, "_get_module_fsdp_state", _FSDP)
    states = [find_state(module) for module in model.modules()]
    return list({id(state): state for state in states if state is not None}.values())


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
    path = "torch.distributed.fsdp._fully_shard._fsdp_param_group.RegisterPostBackwardFunction"
    return _find(path, _FSDP).apply(group, *tensors)


def get_grad_tensors(value: Any) -> list[Tensor]:
    """The tensors with gradients in a module's arguments, in the order that `fully_shard` uses."""
    return list(_find("torch.distributed.fsdp._common_utils.collect_grad_tensors", _FSDP)(value))


def replace_grad_tensors(value: Any, tensors: Iterable[Tensor]) -> Any:
    """The same arguments with other tensors in these places."""
    return _find("torch.distributed.fsdp._common_utils.replace_grad_tensors", _FSDP)(value, iter(tensors))


def reset_fsdp_after_error(context: Any) -> None:
    """Prepare `fully_shard` for the next step after one that failed."""
    _read(context.all_states[0], "_reset_iter_state", _FSDP)()


def finish_fsdp_backward(context: Any) -> None:
    """Have `fully_shard` reduce and shard the gradients, as it does at the end of a backward pass."""
    _read(context.all_states[0], "_root_post_backward_final_callback", _FSDP)()


def is_managed_by_other_parallelism(module: nn.Module) -> bool:
    """Whether FSDP1 or `replicate` runs a module."""
    states = sys.modules.get("torch.distributed._composable_state")
    contract = sys.modules.get("torch.distributed._composable.contract")
    applied: Mapping[str, Any] | None = None if contract is None else _read(contract, "_get_registry", _FSDP)(module)
    return "replicate" in (applied or ()) or (
        states is not None and _read(states, "_get_module_state", _FSDP)(module) is not None
    )
