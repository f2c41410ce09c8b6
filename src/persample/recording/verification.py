"""Verify a recording with real samples: run some alone and compare their outputs with those of the batch.

This finds what the tracker cannot see: code that no mode sees, values that leave torch and come back, and errors in
declarations. It takes two forward passes of one sample, in the first recording of a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call

from persample import _torch
from persample._internal import tracing
from persample._internal.dropout import NoDropoutMode
from persample._internal.dtypes import widen
from persample._internal.rng import RngState
from persample._internal.state import ModuleState, Writes, keep_tensors
from persample.batches import Arguments, Call, has_attributes, iterate_tensors
from persample.distributed import Processes
from persample.errors import PerSampleError, SamplesMixed
from persample.forward.audit import Audit
from persample.forward.isolation import refuse_state
from persample.forward.tracker import Tracker
from persample.layouts import Layout, Reduced, has_equal_shares, take_sample
from persample.recording.differences import (
    Difference,
    Part,
    find_difference,
    make_part,
    match_any_layout,
)
from persample.recording.options import Options

# What was found for each model, by what the forward pass depends on: "verified ..." or "not verified: ...".
_found: WeakKeyDictionary[nn.Module, dict[Any, str]] = WeakKeyDictionary()


# How many samples are run alone, besides the last one, if the model has read values of samples.
_MAX_SAMPLES = 8


class NotVerified(Exception):
    """The model cannot be verified; the message says why."""


def start_verification(
    model: nn.Module, options: Options, processes: Processes, tracker: Tracker, arguments: Arguments
) -> Verification | str:
    """Prepare the verification of a forward pass that is about to run, or return what is already known.

    The tracker must know where the samples lie in the arguments.
    """
    if options.verify is False:
        return "not verified: verify=False"
    try:
        _check_can_verify(processes)
        known = _found.setdefault(model, {})
        key = _make_key(model, options, arguments)
        if key in known and options.verify != "always":
            return known[key]
        if options.verify is None:
            _check_unnoticed_by_modes()
        if tracker.batch < 2:
            return "not verified: the batch has fewer than two samples"
    except NotVerified as reason:
        return _describe(reason, options)
    try:
        if options.verify is None:
            _check_unnoticed_by_hooks(model)
        return Verification(model, arguments, tracker, lambda status: known.__setitem__(key, status))
    except NotVerified as reason:
        known[key] = _describe(reason, options)
        return known[key]


def start_late_verification(
    model: nn.Module, options: Options, tracker: Tracker, arguments: Arguments, is_random: bool
) -> Verification | None:
    """Prepare the verification of a forward pass that has just run, None if it cannot be verified.

    For a pass that may do something else than the first one: with a new sequence of functions, or with numbers that
    were read from samples. Extra passes start from the state after the pass. If it was another one before, a second run
    of the batch gives other outputs, and the pass is not verified.
    """
    if options.verify is False or tracker.batch < 2 or is_random:
        return None
    try:
        if options.verify is None:
            _check_unnoticed_by_modes()
            _check_unnoticed_by_hooks(model)
        return Verification(model, arguments, tracker, lambda status: None)
    except NotVerified:
        return None


def _describe(reason: NotVerified, options: Options) -> str:
    if options.verify == "always":
        raise PerSampleError(f"The option verify='always' is given, but the samples cannot be verified: {reason}.")
    return f"not verified: {reason}"


def _make_key(model: nn.Module, options: Options, arguments: Arguments) -> tuple[Any, ...]:
    autocast = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    call = len(arguments.args), *arguments.kwargs
    return options.verify, model.training, call, repr(options.batch_dim), options.batch_size is None, autocast


# ---- where the extra passes are not allowed ----


def _check_can_verify(processes: Processes) -> None:
    if tracing.get_trace() is not None:
        raise NotVerified("the step is compiled")
    if type(processes) is not Processes:
        raise NotVerified("several processes share the batch")


def _check_unnoticed_by_modes() -> None:
    modes = [mode for mode in _torch.get_function_modes() if not isinstance(mode, Tracker)]
    dispatch_modes = [mode for mode in _torch.get_dispatch_modes() if not isinstance(mode, Audit)]
    if not all(map(_torch.is_default_device, modes)) or dispatch_modes:
        raise NotVerified("a mode of torch is active, which would see more calls; verify='first' allows it")


def _check_unnoticed_by_hooks(model: nn.Module) -> None:
    if _torch.get_global_hooks() or any(not _is_own(hook) for m in model.modules() for hook in _torch.get_hooks(m)):
        raise NotVerified("the model has hooks, which would run more often; verify='first' allows it")
    if any(map(_torch.is_compiled, model.modules())):
        raise NotVerified("the model is compiled; verify='first' allows it")


def _is_own(hook: Any) -> bool:
    """Whether a hook belongs to persample or to torch, such as that of `spectral_norm`."""
    owner = getattr(hook, "__module__", None) or type(hook).__module__
    return str(owner).partition(".")[0] in ("persample", "torch")


# ---- one forward pass ----


class Verification:
    """The verification of one forward pass: made before it, finished after it.

    Args:
        model: the model that is about to run.
        arguments: its arguments.
        tracker: knows where the samples lie in the arguments and, after the forward pass, in the outputs.
        remember: called with what was found, unless memory ran out or the batch tells nothing about others.

    Attributes:
        is_telling: False if the outputs are not finite or, in private training, if all samples are equal.
    """

    def __init__(
        self, model: nn.Module, arguments: Arguments, tracker: Tracker, remember: Callable[[str], None]
    ) -> None:
        self.model, self.arguments = model, arguments
        self.batch = tracker.batch
        self.outputs = 0  # how many tensors the forward pass returned
        self.is_telling = True
        self.checks_places = tracker.isolation is not None  # whether a sample's number in the batch must not count
        self.find_layout, self.advice = tracker.find_layout, tracker.advice
        self._tracker, self._remember = tracker, remember
        self.samples: dict[int, Call] = {}
        self._add_samples((0, self.batch - 1))
        given = iterate_tensors((arguments.args, arguments.kwargs))
        self._versions = [(t, t._version) for t in given if not t.is_inference()]
        try:
            self.before = ModuleState(model)
        except Exception as error:
            raise NotVerified(f"the state of the model cannot be copied: {_shorten(error)}") from error
        self.random_before = RngState(self.before.generators)

    def _add_samples(self, numbers: Iterable[int]) -> None:
        """Take these samples from the arguments, to run them alone."""
        for n in numbers:
            with torch.no_grad(), _torch.disable_dispatch_modes():  # an audit must not see it
                call = self.arguments.take_sample(n, self.batch, self.find_layout)
            if call is None:
                raise NotVerified("the arguments cannot be cut into samples")
            self.samples.setdefault(n, call)

    def finish(self, output: Any, options: Options) -> str:
        """Run samples alone, compare their outputs, and leave the model as it was.

        Returns:
            What was found, in words.

        Raises:
            SamplesMixed: the output of a sample alone differs from its part of the output of the batch.
        """
        try:
            with _torch.DisableTorchFunction():
                parts = self._find_parts(output)
                if not parts and not self._find_sums(output):
                    raise NotVerified("no output has a part for each sample, or is a sum over them")
                if self._tracker.has_read_samples and not self.has_changed_arguments:  # each may take another branch
                    self._add_samples(range(0, self.batch, -(-self.batch // _MAX_SAMPLES)))
            with self._open_extra_passes() as runs:
                comparison = _Comparison(self, runs, parts)
                status = comparison.run() if parts else comparison.compare_sums(self._find_sums(output))
        except NotVerified as reason:
            status = _describe(reason, options)
        except torch.OutOfMemoryError:
            return "not verified: out of memory"  # not remembered
        if self.is_telling:
            self._remember(status)
        return status

    def _find_parts(self, output: Any) -> list[Part]:
        """The outputs in which the samples lie in known places."""
        parts = []
        self.outputs = sum(1 for _ in iterate_tensors(output))
        for position, tensor in enumerate(iterate_tensors(output)):
            if tensor.dim() and tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
                try:
                    layout = self.find_layout(tensor)
                except PerSampleError:  # refused when it is used
                    continue
                if isinstance(layout, Layout):
                    parts.append(make_part(position, tensor, layout))
        return parts

    def _find_sums(self, output: Any) -> dict[int, Tensor]:
        """The outputs that are sums or means over the samples, such as a loss, by position."""
        layouts = (
            (position, tensor, self.find_layout(tensor)) for position, tensor in enumerate(iterate_tensors(output))
        )
        return {
            position: tensor.detach()
            for position, tensor, where in layouts
            if isinstance(where, Reduced) and where.kind != "mixed" and tensor.numel() == 1
        }

    @property
    def has_changed_arguments(self) -> bool:
        """Whether the forward pass has changed its arguments in place."""
        return any(tensor._version != version for tensor, version in self._versions)

    @contextmanager
    def _open_extra_passes(self) -> Iterator[_Runs]:
        """Restores everything that the extra passes change: state of the model, random numbers, settings of torch."""
        after = ModuleState(self.model)
        random_after = RngState(self.before.generators)
        had_cache = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # casts of the extra passes must not be used by others
        try:
            with ExitStack() as stack:
                if _torch.get_saved_tensor_hooks() is not None:  # a checkpoint counts what is saved
                    stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_return_same, _return_same))
                writes = stack.enter_context(keep_tensors(after))
                yield _Runs(self, writes, is_random=random_after != self.random_before)
        finally:
            torch.set_autocast_cache_enabled(had_cache)
            after.restore()
            if RngState(self.before.generators) != random_after:
                random_after.restore()


def _return_same(tensor: Tensor) -> Tensor:
    return tensor


class _NoSavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """Frees what a forward pass saves for its backward pass. `was_needed`: the forward pass itself asked for it."""

    def __init__(self) -> None:
        super().__init__(lambda tensor: None, self._refuse)
        self.was_needed = False

    def _refuse(self, saved: None) -> NoReturn:
        self.was_needed = True
        raise RuntimeError("The saved tensors of this pass were freed.")


class _Runs:
    """Runs the model from the state in which it was before the forward pass.

    If the forward pass drew random numbers, dropout is off and no graph is kept. Else gradients are enabled as they are
    now, because modules may compute in another way without them; what they save for a backward pass is freed at once,
    unless the forward pass computes gradients itself.
    """

    def __init__(self, verification: Verification, writes: Writes, is_random: bool) -> None:
        self.model = verification.model
        self.is_random = is_random
        self.is_precise = False  # without autocast, and in float32 at least
        self._keeps_saved = False
        self._before, self._random = verification.before, verification.random_before
        self._writes = writes

    @property
    def rounding(self) -> float:
        """The eps of the least precise dtype so far."""
        return self._writes.rounding

    def run(self, call: Call, hook: Callable[..., None] | None = None) -> dict[int, Tensor]:
        """The tensors in the output of a call, by position. `hook` is called after the forward of each submodule."""
        if not self._keeps_saved:
            hooks = _NoSavedTensors()
            try:
                with hooks:
                    found = self._run(call, hook)
                if not hooks.was_needed:  # else the model has caught the error
                    return found
            except Exception as error:
                if not (hooks.was_needed or "saved tensor hooks" in str(error)):
                    raise
            self._keeps_saved = True
        return self._run(call, hook)

    def _run(self, call: Call, hook: Callable[..., None] | None) -> dict[int, Tensor]:
        self._before.restore()
        if self.is_random:
            self._random.restore()
        with ExitStack() as stack:
            for device in get_autocast_devices() if self.is_precise else ():
                stack.enter_context(torch.autocast(device, enabled=False))
            if self.is_random:
                self._turn_off_dropout(stack)
            if hook is not None:
                for module in list(self.model.modules())[1:]:
                    stack.callback(module.register_forward_hook(hook).remove)
            with _torch.disable_dispatch_modes():  # the dtypes of what is copied do not count
                args, kwargs = _torch.pytree.tree_map_only(Tensor, self._copy, call)
                weights = self._widen_weights() if self.is_precise else {}
            output = functional_call(self.model, weights, args, kwargs) if weights else self.model(*args, **kwargs)
        return {position: tensor.detach() for position, tensor in enumerate(iterate_tensors(output))}

    def _copy(self, tensor: Tensor) -> Tensor:
        own = tensor.detach().clone()
        return (widen(own) if self.is_precise else own).requires_grad_(tensor.requires_grad)

    def _widen_weights(self) -> dict[str, Tensor]:
        """The parameters and buffers in half precision, in float32."""
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        wide = {name: widen(tensor.detach()) for name, tensor in named.items()}
        changed = [name for name in named if wide[name].dtype != named[name].dtype]
        return {name: wide[name].requires_grad_(named[name].requires_grad) for name in changed}

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
        dtypes = self._writes.dtypes
        self.is_precise, self._writes.dtypes = True, set()
        try:
            yield
        except Exception:
            self.is_precise, self._writes.dtypes = False, dtypes
            raise


def get_autocast_devices() -> list[str]:
    """The devices on which autocast is enabled."""
    return [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]


class _Comparison:
    """Compares a batch with samples of it alone.

    Rounding changes the last digits if the kernels for one sample are other ones than for the batch. A small difference
    is accepted, and after a larger one further passes decide.
    """

    def __init__(self, verification: Verification, runs: _Runs, parts: list[Part]) -> None:
        self.verification, self.runs, self.parts = verification, runs, parts
        self.batch = verification.batch
        self._whole: Call = (verification.arguments.args, verification.arguments.kwargs)
        self._needs_copies = False  # a sample alone raises

    def run(self) -> str:
        """Compare each sample; return what was found, in words."""
        random = None
        if self.runs.is_random:
            self.parts = self._select_parts(self._run_batch())
            random = self.runs.read_random_state()
        compared = False
        buffers: dict[str, Tensor] = {}
        for sample, call in self.verification.samples.items():
            found = self._compare_alone(sample, call)
            if self.verification.checks_places and not self._needs_copies:
                buffers = self._compare_buffers(buffers, sample)
            if random is not None and not self.runs.can_repeat(random):
                raise NotVerified("the forward pass draws random numbers other than those of dropout")
            compared |= found is not None
            if found is not None and found.relative > self._tight:
                self._judge(sample, call, found)
        if not compared:
            self.verification.is_telling = self._is_finite()
            raise NotVerified("the outputs of a sample alone have another form, or are not finite")
        if self.verification.checks_places:
            self._compare_rotated()
            self.verification.is_telling = not self._are_samples_equal()
        return f"verified with {len(self.verification.samples)} samples"

    def _compare_buffers(self, before: Mapping[str, Tensor], sample: int) -> dict[str, Tensor]:
        """The buffers after a run of one sample; raises if they differ from those after a run of another sample."""
        model, first = self.verification.model, next(iter(self.verification.samples))
        with _torch.DisableTorchFunction(), torch.no_grad():
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            for name in buffers.keys() & before.keys():
                a, b = buffers[name], before[name]
                if a.layout != torch.strided or a.is_nested or torch.equal(a, b):
                    continue
                if a.shape != b.shape or not ((a == b) | ((a != a) & (b != b))).all():
                    cause = f"the model writes other values into it with sample {sample} alone than with sample {first}"
                    refuse_state(name, cause, model)
        return buffers

    def compare_sums(self, sums: dict[int, Tensor]) -> str:
        """Compare sums over the samples with those of two other batches, which together have each sample twice."""
        whole = self._run_batch() if self.runs.is_random else sums
        random = self.runs.read_random_state()
        half = self.batch // 2
        middle = [half] * (self.batch % 2)
        first, last = list(range(half)), list(range(self.batch - half, self.batch))
        found = [self._run_replaced([*part, *middle, *part]) for part in (first, last)]
        if self.runs.is_random and not self.runs.can_repeat(random):
            raise NotVerified("the forward pass draws random numbers other than those of dropout")
        for position in sums:
            totals = [float(outputs[position]) for outputs in (whole, *found) if position in outputs]
            if len(totals) < 3 or not all(map(math.isfinite, totals)):
                raise NotVerified("the outputs of other batches have another form, or are not finite")
            difference = abs(2 * totals[0] - totals[1] - totals[2])
            if difference > 10 * self._tight * (abs(totals[1]) + abs(totals[2])):
                self._refuse_sum(position, totals)
        return "verified with two other batches"

    def _run_replaced(self, samples: list[int]) -> dict[int, Tensor]:
        """The outputs of a batch with `samples[n]` in the place of sample n."""
        with _torch.DisableTorchFunction(), torch.no_grad():
            call = self.verification.arguments.replace_samples(samples, self.batch, self.verification.find_layout)
        if call is None or self.verification.has_changed_arguments:
            raise NotVerified("the samples in the arguments cannot be replaced")
        try:
            return self.runs.run(call)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise NotVerified(f"a batch of some samples twice raises {_shorten(error)}") from error

    def _refuse_sum(self, position: int, totals: list[float]) -> None:
        self._check_divided()
        again = self._run_batch().get(position)
        if again is None or abs(float(again) - totals[0]) > self._tight * abs(totals[0]):
            raise NotVerified("a second run of the same batch gives other outputs")
        raise SamplesMixed(
            f"An output of the model that should be a sum over the samples is none: it is {totals[0]:.6g} for the "
            f"batch, and {totals[1]:.6g} and {totals[2]:.6g} for two batches with half of the samples twice. "
            f"{self.verification.advice} The option verify=False turns this check off."
        )

    def _is_finite(self) -> bool:
        """Whether an output of the compared samples has finite entries."""
        with _torch.DisableTorchFunction():
            return any(
                bool(take_sample(part.tensor, part.layout, sample, self.batch).isfinite().any())
                for part in self.parts
                for sample in self.verification.samples
            )

    def _are_samples_equal(self) -> bool:
        """Whether all samples are copies of one, as in a batch of zeros: then they change nothing for each other."""
        copies = self._make_copies(0)
        if copies is None:
            return False
        try:
            with _torch.DisableTorchFunction():
                pairs = zip(iterate_tensors(self._whole), iterate_tensors(copies), strict=True)
                return all(a is b or torch.equal(a, b) for a, b in pairs)
        except Exception:  # tensors of another kind, such as nested ones, cannot be compared
            return False

    @property
    def _tight(self) -> float:
        """A relative difference that rounding rarely exceeds: 9e-5 in float32, 0.02 in bfloat16."""
        return self.runs.rounding**0.5 / 4

    @property
    def _loose(self) -> float:
        """A relative difference that is more than rounding: 0.02 in float32, 0.3 in bfloat16."""
        return self.runs.rounding**0.25

    # ---- runs ----

    def _compare_alone(self, sample: int, call: Call) -> Difference | None:
        try:
            outputs = self.runs.run(call)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # batch norm and fixed shapes need several samples
            copies = self._compare_with_copies(sample)
            if copies is None:
                raise NotVerified(f"sample {sample} alone raises {_shorten(error)}") from error
            self._needs_copies = True
            return copies
        if len(outputs) != self.verification.outputs:
            return None
        with _torch.DisableTorchFunction():
            return find_difference(self.parts, outputs, sample, self.batch, crop=self.verification.checks_places)

    def _run_batch(self) -> dict[int, Tensor]:
        if self.verification.has_changed_arguments:
            raise NotVerified("the forward pass changes its arguments in place")
        try:
            return self.runs.run(self._whole)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise NotVerified(f"a second run of the batch raises {_shorten(error)}") from error

    def _select_parts(self, outputs: dict[int, Tensor]) -> list[Part]:
        """The parts of another run of the batch, which has the samples in the same places."""
        pairs = [(part, outputs.get(part.position)) for part in self.parts]
        with _torch.DisableTorchFunction():
            return [
                make_part(part.position, tensor, part.layout)
                for part, tensor in pairs
                if tensor is not None and tensor.shape == part.tensor.shape
            ]

    # ---- a difference was found ----

    def _judge(self, sample: int, call: Call, found: Difference) -> None:
        """Find out whether a difference is more than rounding; if so, raise."""
        self._check_divided()
        if self.verification.has_changed_arguments:
            if found.relative > self._loose:
                self._refuse(sample, found, "depends on the other samples, or on its place among them")
            return
        again = self._compare_batch(sample, self._run_batch())
        if again is None or again.relative > self._tight:
            raise NotVerified("a second run of the same batch gives other outputs")
        precise = self._compare_precisely(sample, call)
        if precise is not None and precise.relative <= self._tight:
            return
        found = precise or found
        is_exact = self.runs.rounding <= torch.finfo(torch.float32).eps
        influence = self._compare_with_copies(sample)
        if influence is not None and influence.relative > (self._tight if is_exact else self._loose / 2):
            self._refuse(sample, found, "changes with the other samples of the batch", call)
        if found.relative > self._loose:
            self._refuse(sample, found, "depends on its place in the batch, or on the size of the batch", call)

    def _check_divided(self) -> None:
        """Raise if an argument may hold several samples and was not divided among them."""
        arguments = self.verification.arguments
        if _has_list((arguments.args, arguments.kwargs), self.batch):
            raise NotVerified("a list in the arguments may hold one item for each sample")
        undivided = arguments.find_undivided(self.batch, self.verification.find_layout)
        if undivided is not None:
            raise NotVerified(
                f"an argument of shape {tuple(undivided.shape)} has no batch dimension and may hold ids of several "
                "samples; if it is the same for all samples, pass it in constants="
            )

    def _compare_batch(self, sample: int, outputs: dict[int, Tensor]) -> Difference | None:
        """The difference of a sample's rows between the batch and another run with as many samples; None if unknown."""
        with _torch.DisableTorchFunction():
            rows = {
                part.position: take_sample(part.tensor, part.layout, sample, self.batch)
                for part in self._select_parts(outputs)
            }
            return find_difference(self.parts, rows, sample, self.batch)

    def _compare_precisely(self, sample: int, call: Call) -> Difference | None:
        """The difference in float32, which is used from now on; None if it was used before, or cannot be used."""
        if self.runs.rounding <= torch.finfo(torch.float32).eps:
            return None
        coarse = self.parts
        try:
            with self.runs.compute_precisely():
                self.parts = self._select_parts(self._run_batch())
                return self._compare_alone(sample, call)
        except (NotVerified, torch.OutOfMemoryError):  # the model may need autocast to bring its dtypes together
            self.parts = coarse
            return None

    def _compare_with_copies(self, sample: int) -> Difference | None:
        """The change of a sample's output if all other samples are replaced by copies of it; None if unknown.

        All shapes are the same, so that the kernels are the same and rounding hardly differs.
        """
        copies = self._make_copies(sample)
        if copies is None or self.verification.has_changed_arguments:
            return None
        try:
            return self._compare_batch(sample, self.runs.run(copies))
        except Exception:  # the model needs samples that differ
            return None

    def _compare_rotated(self) -> None:
        """Refuse an output that changes if each sample takes the place of the one before it."""
        arguments, find_layout = self.verification.arguments, self.verification.find_layout
        with _torch.DisableTorchFunction(), torch.no_grad():
            rotated = arguments.rotate_samples(self.batch, find_layout)
        if rotated is None or self.verification.has_changed_arguments:
            return
        try:
            outputs = self.runs.run(rotated)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the model needs this order, as one that takes sorted lengths does
            return
        with _torch.DisableTorchFunction():
            # The samples have kept their places in a rotated output only if these are of one size.
            parts = [p for p in self._select_parts(outputs) if has_equal_shares(p.tensor, p.layout, self.batch)]
            for sample in range(self.batch):
                own = {
                    part.position: take_sample(part.tensor, part.layout, (sample - 1) % self.batch, self.batch)
                    for part in parts
                }
                found = find_difference(self.parts, own, sample, self.batch)
                is_exact = self.runs.rounding <= torch.finfo(torch.float32).eps
                if found is not None and found.relative > (self._tight if is_exact else self._loose / 2):
                    self._judge_rotation(sample, found)
                    return

    def _judge_rotation(self, sample: int, found: Difference) -> None:
        again = self._compare_batch(sample, self._run_batch())
        if again is None or again.relative > self._tight:
            raise NotVerified("a second run of the same batch gives other outputs")
        arguments = self.verification.arguments
        if _has_list((arguments.args, arguments.kwargs), self.batch):
            raise NotVerified("a list in the arguments may hold one item for each sample")
        raise SamplesMixed(
            f"The output of sample {sample} depends on its place in the batch: a tensor of shape {found.shape} in the "
            f"output of the model differs by up to {found.absolute:.3g} if each sample takes the place of the one "
            "before it. In private training a sample's number in the batch must not influence its result. "
            f"{self.verification.advice} The option verify=False turns this check off."
        )

    def _make_copies(self, sample: int) -> Call | None:
        arguments, find_layout = self.verification.arguments, self.verification.find_layout
        with _torch.DisableTorchFunction(), torch.no_grad():
            return arguments.repeat_sample(sample, self.batch, find_layout)

    def _refuse(self, sample: int, found: Difference, cause: str, call: Call | None = None) -> NoReturn:
        if self._needs_copies:
            call = self._make_copies(sample)
        place = None if call is None else self._find_module(sample, call)
        other = "a batch of copies of it" if self._needs_copies else "the same sample alone"
        where = f" The difference first appears in {place}." if place else ""
        raise SamplesMixed(
            f"The output of a sample {cause}: a tensor of shape {found.shape} in the output of the model differs by up "
            f"to {found.absolute:.3g} between sample {sample} in its batch of {self.batch} and {other} "
            f"(relative to the size of its entries: {found.relative:.2g}).{where} {self.verification.advice} "
            "The option verify=False turns this check off."
        )

    def _find_module(self, sample: int, call: Call) -> str | None:
        """The first module whose output differs between the batch and the sample alone, in words."""
        alone: list[tuple[nn.Module, list[Tensor]]] = []
        differing: list[nn.Module] = []

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            alone.append((module, [t.detach() for t in iterate_tensors(output)]))

        def compare(module: nn.Module, args: Any, output: Any) -> None:
            if differing or not alone or alone[0][0] is not module:  # the two runs must take the same way
                return
            _, own = alone.pop(0)
            with _torch.DisableTorchFunction():
                pairs = zip(own, iterate_tensors(output), strict=False)
                if not all(match_any_layout(a, b.detach(), sample, self.batch, self._tight) for a, b in pairs):
                    differing.append(module)

        try:
            self.runs.run(call, keep)
            self.runs.run(self._whole, compare)
        except Exception:  # only the name is lost
            return None
        model = self.runs.model
        if not differing:
            return f"the code of {type(model).__name__} itself"
        name = next(name for name, module in model.named_modules() if module is differing[0])
        return f"module '{name}' ({type(differing[0]).__name__})"


def _has_list(value: Any, size: int) -> bool:
    """Whether a list or array of this length is found in a value that is not a tensor and holds no tensors."""
    if isinstance(value, Tensor):
        return False
    if isinstance(value, Mapping):
        return any(_has_list(part, size) for part in value.values())
    if isinstance(value, (list, tuple)):
        holds_items = not any(isinstance(part, (Tensor, list, tuple, Mapping)) for part in value)
        return (len(value) == size and holds_items) or any(_has_list(part, size) for part in value)
    if isinstance(getattr(value, "shape", None), tuple):
        return bool(value.shape) and value.shape[0] == size
    return has_attributes(value) and any(_has_list(part, size) for part in vars(value).values())


def _shorten(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
