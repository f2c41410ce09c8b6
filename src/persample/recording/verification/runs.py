"""Extra runs of a model: why they are not made, and runs on copies from the state before a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call

from persample import _torch
from persample._internal.copies import copy_values
from persample._internal.dropout import NoDropoutMode
from persample._internal.precision import to_double, widen
from persample._internal.rng import RngState
from persample._internal.state import ModuleState, Writes, keep_tensors
from persample._internal.tree import iterate_tensors
from persample.errors import PerSampleError
from persample.forward import Audit, FollowMode
from persample.recording.options import Options
from persample.recording.verification.sample_calls import Call

NOT_REPEATABLE = "a second run of the same batch gives other outputs"


class NotVerified(Exception):
    """The model cannot be verified; the message says why."""


def describe(reason: NotVerified, options: Options, is_late: bool = False) -> str:
    """What `repr` says of a pass; `is_late`: earlier passes of this kind were verified."""
    if options.verify == "always":
        raise PerSampleError(f"The option verify='always' is given, but the samples cannot be verified: {reason}.")
    return f"not verified in this step: {reason}" if is_late else f"not verified: {reason}"


def check_unnoticed_by_modes() -> None:
    modes = [mode for mode in _torch.get_function_modes() if not isinstance(mode, FollowMode)]
    dispatch_modes = [mode for mode in _torch.get_dispatch_modes() if not isinstance(mode, Audit)]
    if not all(map(_torch.is_default_device, modes)) or dispatch_modes:
        raise NotVerified("a mode of torch is active, which would see more calls; verify='first' allows it")


def check_unnoticed_by_hooks(model: nn.Module) -> None:
    if _torch.get_global_hooks() or any(not _is_own(hook) for m in model.modules() for hook in _torch.get_hooks(m)):
        raise NotVerified("the model has hooks, which would run more often; verify='first' allows it")
    if any(map(_torch.is_compiled, model.modules())):
        raise NotVerified("the model is compiled; verify='first' allows it")


def _is_own(hook: Any) -> bool:
    """Whether a hook belongs to persample or to torch, such as that of `spectral_norm`."""
    owner = getattr(hook, "__module__", None) or type(hook).__module__
    return str(owner).partition(".")[0] in ("persample", "torch")


def shorten(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


class _NoSavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """Frees what a forward pass saves for its backward pass. `was_needed`: the forward pass itself asked for it."""

    def __init__(self) -> None:
        super().__init__(lambda tensor: None, self._refuse)
        self.was_needed = False

    def _refuse(self, saved: None) -> NoReturn:
        self.was_needed = True
        raise RuntimeError("The saved tensors of this pass were freed.")


class Runs:
    """Runs the model from the state in which it was before the forward pass.

    If the forward pass drew random numbers, dropout is off and no graph is kept. Else gradients are enabled as they are
    now, because modules may compute in another way without them; what they save for a backward pass is freed at once,
    unless the forward pass computes gradients itself.
    """

    def __init__(
        self, model: nn.Module, before: ModuleState, random_before: RngState, writes: Writes, is_random: bool
    ) -> None:
        self.model = model
        self.is_random = is_random
        self.convert: Callable[[Tensor], Tensor] | None = None  # to the dtype of the runs
        self.inputs: list[Tensor] = []  # tensors in the arguments of the last run that require grad
        self._keeps_saved = False
        self._before, self._random = before, random_before
        self._writes = writes

    @property
    def rounding(self) -> float:
        """The eps of the least precise dtype so far."""
        return self._writes.rounding

    def run(self, call: Call, hook: Callable[..., None] | None = None) -> dict[int, Tensor]:
        """The tensors in the output of a call, by position. `hook` is called after the forward of each submodule."""
        found, hooks = None, _NoSavedTensors()
        if not self._keeps_saved:
            try:
                with hooks:
                    found = self._run(call, hook)
            except Exception as error:
                if not (hooks.was_needed or "saved tensor hooks" in str(error)):
                    raise
            self._keeps_saved = found is None or hooks.was_needed  # the model may have caught the error
        if self._keeps_saved:
            found = self._run(call, hook)
        assert found is not None
        return {position: tensor.detach() for position, tensor in found.items()}

    def run_with_graph(self, call: Call) -> dict[int, Tensor]:
        """The tensors in the output of a call, by position, with a graph that can be used after the extra passes."""
        try:
            with self._save_state():
                return self._run(call, None)
        except Exception as error:
            if "saved tensor hooks" not in str(error):
                raise
        return self._run(call, None)

    def run_in_double(self, call: Call) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """The same in float64, and what took the place of parameters and buffers in that run, by their ids."""
        self.convert = to_double
        try:
            named, weights = self._name_tensors(), self._convert_weights()
            with self._save_state():
                return self._run(call, None, weights), {id(named[name]): wide for name, wide in weights.items()}
        finally:
            self.convert = None

    def _save_state(self) -> AbstractContextManager[Any]:
        """Inside the block, graphs keep copies of buffers, which are restored after a pass."""
        of_weights = {_torch.find_storage_id(parameter) for parameter in self._before.parameters}
        memory = {*map(_torch.find_storage_id, self._before.tensors)} - of_weights

        def save(tensor: Tensor) -> Tensor:  # the graph keeps this function
            if tensor.is_leaf and tensor.requires_grad:
                return tensor
            own = tensor.detach()
            return own.clone() if _torch.find_storage_id(tensor) in memory else own

        return torch.autograd.graph.saved_tensors_hooks(save, return_same)

    def _run(
        self, call: Call, hook: Callable[..., None] | None, weights: dict[str, Tensor] | None = None
    ) -> dict[int, Tensor]:
        self.inputs = []
        self._before.restore()
        if self.is_random:
            self._random.restore()
        with ExitStack() as stack:
            for device in filter(torch.is_autocast_enabled, ("cpu", "cuda") if self.convert else ()):
                stack.enter_context(torch.autocast(device, enabled=False))
            if self.is_random:
                self._turn_off_dropout(stack)
            if hook is not None:
                for module in list(self.model.modules())[1:]:
                    stack.callback(module.register_forward_hook(hook).remove)
            with _torch.disable_dispatch_modes():  # the dtypes of what is copied do not count
                args, kwargs = copy_values(call, self._copy)
                if weights is None:
                    weights = self._convert_weights() if self.convert else {}
            output = functional_call(self.model, weights, args, kwargs) if weights else self.model(*args, **kwargs)
        return dict(enumerate(iterate_tensors(output)))

    def _copy(self, tensor: Tensor) -> Tensor:
        own = tensor.detach().clone()
        if self.convert:
            own = self.convert(own)
        if tensor.requires_grad:
            self.inputs.append(own.requires_grad_())
        return own

    def _convert_weights(self) -> dict[str, Tensor]:
        """The parameters and buffers that have another dtype in these runs, in that dtype."""
        assert self.convert is not None
        named = self._name_tensors()
        wide = {name: self.convert(tensor.detach()) for name, tensor in named.items()}
        changed = [name for name in named if wide[name].dtype != named[name].dtype]
        return {name: wide[name].requires_grad_(named[name].requires_grad) for name in changed}

    def _name_tensors(self) -> dict[str, Tensor]:
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def _turn_off_dropout(self, stack: ExitStack) -> None:
        stack.enter_context(torch.no_grad())
        stack.enter_context(NoDropoutMode())
        for module in self.model.modules():
            name = type(module).__name__.lower()
            if "drop" in name or "stochastic" in name:  # DropPath, StochasticDepth and the like
                module.training = False

    def read_random_state(self) -> RngState:
        """The state of the random number generators now."""
        return RngState(self._before.generators)

    def can_repeat(self, state: RngState) -> bool:
        """Whether the last run has drawn the same random numbers as one that left the generators in `state`.

        The numbers of a GPU are drawn in parallel, and its state does not tell how many they were.
        """
        is_same_on_gpu = all(map(torch.equal, state.devices[1:], self._random.devices[1:]))
        return is_same_on_gpu and self.read_random_state() == state

    @contextmanager
    def compute_precisely(self) -> Iterator[None]:
        """Compute in float32 at least in all runs from now on, unless the block raises."""
        dtypes = self._writes.replace_dtypes(set())
        self.convert = widen
        try:
            yield
        except Exception:
            self.convert = None
            self._writes.replace_dtypes(dtypes)
            raise


def return_same(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def open_extra_passes(
    model: nn.Module, before: tuple[ModuleState, RngState] | None = None, is_random: bool = False
) -> Iterator[Runs]:
    """Restores everything that extra passes change: state of the model, random numbers, settings of torch.

    The passes start from the state `before`, or from the state now. `is_random`: the forward pass draws random numbers,
    also if the generators do not show it.
    """
    after = ModuleState(model)
    random_after = RngState(after.generators)
    state, random_state = before or (after, random_after)
    random_now = random_after if before is None else RngState(state.generators)
    had_cache = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # casts of the extra passes must not be used by others
    try:
        with ExitStack() as stack:
            if _torch.get_saved_tensor_hooks() is not None:  # a checkpoint counts what is saved
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(return_same, return_same))
            writes = stack.enter_context(keep_tensors(after))
            yield Runs(model, state, random_state, writes, is_random or random_now != random_state)
    finally:
        torch.set_autocast_cache_enabled(had_cache)
        after.restore()
        for now in (random_now, random_after):
            if not now.is_current():
                now.restore()
