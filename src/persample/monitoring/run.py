"""`monitor`: measures every twentieth step of a training run, and leaves the run as it is."""

from __future__ import annotations

import json
import logging
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from persample import _torch
from persample._internal.groups import group_by_module
from persample._internal.models import SeveralModels, combine_models
from persample._internal.text import describe_value, format_table
from persample._internal.tree import iterate_tensors
from persample._version import __version__
from persample.batches import BatchDim
from persample.errors import PerSampleError
from persample.gradients import RecordedGradients
from persample.monitoring.advice import Advice, advise
from persample.monitoring.attempt import Attempt, Ids, State, can_share_recording
from persample.monitoring.measurement import ExampleId, Measurement, measure
from persample.monitoring.noise_scale import NoiseScale, NoiseScaleEstimate
from persample.monitoring.turns import TURNS
from persample.recording import (
    CONTRIBUTIONS,
    Constants,
    Coupled,
    Model,
    ModuleHook,
    Options,
    Selection,
    Verify,
    find_parts,
    get_trainable,
    is_paused,
    is_recording,
    leave_ended_modes,
)

_LOGGER = logging.getLogger("persample.monitoring")

# Receives the numbers of a measured step by name, and the number of the step.
Log = Callable[[dict[str, float], int], None]

_EXPLODED = 10.0  # times its median over the last steps: a layer's norm that is unusual
_STEPS_TO_JUDGE = 5  # measured steps before a layer is judged
_KEPT_HARDEST = 1000


def monitor(
    model: Model,
    *,
    every: int = 20,
    out: str | Path | None = None,
    log: Log | Any = None,
    bounds: Iterable[float] = (),
    groups: Mapping[str, Sequence[str]] | None = None,
    window: int = 100,
    hardest: int = 10,
    parameters: Selection | None = None,
    batch_dim: BatchDim = 0,
    loss_reduction: str | None = None,
    constants: Constants = (),
    verify: Verify = None,
    coupled: Coupled = None,
) -> Monitor:
    """Measure the gradients of single samples in every `every`-th step of a training run.

    The loop, the model and `p.grad` stay as they are. A step is a call of the model in training mode and the backward
    pass behind it. If the training calls parts of the model instead, as in `model.head(model.body(x))`, a step begins
    with a call of the part that was called first. A step that cannot be measured (BatchNorm in training mode, a second
    backward pass, a penalty on the weights) is skipped, and logged once as a warning of the logger
    `persample.monitoring`. In a step that something else records (`record`, or a monitor of another model) nothing is
    measured; the next one is in its place. If that is the same model, as in private training, its recording is used.

    Args:
        model: the model that is trained; or several, as for `record`.
        every: how many calls of the model go by until the next one is measured.
        out: a file to which each measured step is written as a line of JSON; `persample monitor FILE` draws it.
        log: a function of `(numbers, step)`, or a `SummaryWriter` of TensorBoard.
        bounds: clipping bounds for which the share of clipped samples is measured.
        groups: the parts of the model, as a dict from name to parameter names; by default its modules.
        window: the number of measured steps over which the noise scale is averaged.
        hardest: the number of samples with the largest norms to keep of each measured step.

    `parameters`, `batch_dim`, `loss_reduction`, `constants`, `verify` and `coupled` are as in `record`. With
    `coupled="contributions"`, a model with BatchNorm or a contrastive loss is measured, too: the figures are then of
    the samples' contributions to the batch's gradient, and the file and `repr` say so.

    Raises:
        PerSampleError: an option is wrong; or in a measured step with second derivatives (`create_graph=True`); or,
            under several processes, the model is refused.

    >>> model = nn.Linear(3, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with monitor(model, every=2, bounds=[1.0]) as watching:
    ...     for _ in range(10):
    ...         optimizer.zero_grad()
    ...         model(torch.randn(8, 3)).square().mean().backward()
    ...         optimizer.step()
    >>> len(watching.history), watching.history[-1].samples
    (5, 8)
    """
    return Monitor(
        model,
        every=every,
        out=out,
        log=log,
        bounds=bounds,
        groups=groups,
        window=window,
        hardest=hardest,
        options={
            "parameters": parameters,
            "batch_dim": batch_dim,
            "loss_reduction": loss_reduction,
            "constants": constants,
            "verify": verify,
            "coupled": coupled,
        },
    )


class Monitor:
    """The result of `monitor`. `stop()`, or the end of a `with` block, ends it.

    Attributes:
        ids: the ids of the samples of the next call of the model; set it before the call to know the hardest examples
            by id. Without it, they are numbered within their batch.
        step: the number of calls of the model in training mode so far. It can be set, to the step of a trainer.

    >>> model = nn.Linear(3, 2)
    >>> with monitor(model) as watching:
    ...     watching.ids = ["a", "b", "c"]
    ...     model(torch.tensor([[1., 0, 0], [9., 0, 0], [2., 0, 0]])).square().mean().backward()
    >>> watching.find_hardest(1)[0][0]
    'b'
    """

    def __init__(
        self,
        model: Model,
        *,
        every: int,
        out: str | Path | None,
        log: Log | Any,
        bounds: Iterable[float],
        groups: Mapping[str, Sequence[str]] | None,
        window: int,
        hardest: int,
        options: Mapping[str, Any],
    ) -> None:
        if every < 1 or window < 1:
            raise PerSampleError(f"every and window must be at least 1, got {every} and {window}.")
        model = combine_models(model)
        self._options = {**options, "keep": "norms", "keep_grad": True, "nonfinite": "keep"}
        names = list(Options(**self._options).select(get_trainable(model)))
        if not names:
            raise PerSampleError("There is no parameter to monitor: none of the chosen parameters requires grad.")
        self._groups = group_by_module(names) if groups is None else {name: list(part) for name, part in groups.items()}
        self._every, self._bounds, self._hardest = every, tuple(bounds), hardest
        self._log: Log | None = _make_log(log)
        self._history: list[Measurement] = []
        self.ids: Ids = None
        self.step = 0
        self._calls = 0
        self._norms: dict[ExampleId, float] = {}  # of the hardest examples, at the last time that each was seen
        self._layers: dict[str, deque[float]] = {name: deque(maxlen=window) for name in self._groups}
        self._estimate = NoiseScaleEstimate(window)
        self._attempt: Attempt | None = None  # at the step that is being measured, or was measured last
        self._warned: set[str] = set()
        self._open_call_hook: RemovableHandle | None = None
        self._has_open_call = False  # whether the call before one that is due has had no backward pass yet
        self._file: TextIO | None = None
        if out is not None:
            self._file = open(out, "w", encoding="utf-8")  # noqa: SIM115  # closed by stop()
            sizes = {name: p.numel() for name, p in get_trainable(model).items()}
            layers = {group: sum(sizes[name] for name in part) for group, part in self._groups.items()}
            about = {"persample": __version__, "torch": torch.__version__, "every": every, "layers": layers}
            self._write(about if options["coupled"] is None else {**about, "coupled": options["coupled"]})
        self._several = model if isinstance(model, SeveralModels) else None  # which nothing else keeps
        self._model = ref(model)
        # Until the first call, all parts of the model have hooks; then only the module that was called, and the model.
        self._hooks = self._add_hooks(model, names)

    def stop(self) -> None:
        """End the monitoring; the model is as it was before."""
        self._end_attempt()
        if not self.step and not self._history:
            self._warn(
                "The monitor has seen no call of its model in training mode, nor of a part of it. Give it the module "
                "that is called: the compiled model if torch.compile made one."
            )
        TURNS.leave(self)
        leave_ended_modes()
        for hook in self._hooks.values():
            hook.remove()
        if self._open_call_hook is not None:
            self._open_call_hook.remove()
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    # ---- answers ----

    @property
    def history(self) -> list[Measurement]:
        """The measured steps, first to last."""
        self._keep_result()
        return self._history

    @property
    def latest(self) -> Measurement | None:
        """The last measured step, None before the first."""
        return self.history[-1] if self.history else None

    @property
    def noise_scale(self) -> NoiseScale | None:
        """The noise scale over the last measured steps, with its interval."""
        self._keep_result()
        return self._estimate.compute()

    def find_hardest(self, k: int = 10) -> list[tuple[ExampleId, float]]:
        """The examples with the largest gradient norms, each when it was last measured."""
        self._keep_result()
        return sorted(self._norms.items(), key=lambda item: -item[1])[:k]

    def advise(
        self,
        *,
        examples: int | None = None,
        epochs: float = 1.0,
        noise_multiplier: float = 1.0,
        delta: float | None = None,
    ) -> Advice:
        """A batch size and a clipping bound, with the reasons; `examples` adds the epsilon of private training.

        Args:
            examples: the number of training examples. With it, the epsilon of private training is computed for each
                suggested batch size (extra `private`).
            epochs: how often private training goes through the examples.
            noise_multiplier: the noise of private training.
            delta: by default 1 / examples.
        """
        return advise(
            self.noise_scale,
            self.history,
            examples=examples,
            epochs=epochs,
            noise_multiplier=noise_multiplier,
            delta=delta,
        )

    def __repr__(self) -> str:
        latest = self.latest
        if latest is None:
            return "Monitor(nothing measured yet)"
        rows = [
            [name, f"{part['median']:.3g}", f"{part['most']:.3g}", f"{part['share']:.0%}"]
            for name, part in latest.layers.items()
        ]
        lines = [
            f"Monitor of {len(self.history)} measured steps, up to step {latest.step} with {latest.samples} samples",
            *(["  " + CONTRIBUTIONS] if latest.coupled else []),
            f"  noise scale {self.noise_scale or 'not known yet'}",
            f"  gradient norm {latest.norms['median']:.3g} (median), {latest.norms['most']:.3g} (largest)",
            format_table(rows, ["layer", "median", "largest", "share"], right={1, 2, 3}, indent="  "),
            *(f"  warning: {text}" for text in latest.warnings),
        ]
        return "\n".join(lines)

    # ---- measuring ----

    def _add_hooks(self, model: nn.Module, names: Sequence[str]) -> WeakKeyDictionary[nn.Module, RemovableHandle]:
        own = ref(self)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if (watching := own()) is not None:
                watching._start_call(module, args, kwargs)

        trainable = get_trainable(model)
        modules = [model, *find_parts(model, {id(trainable[name]) for name in names})]
        return WeakKeyDictionary(
            {m: m.register_forward_pre_hook(ModuleHook(before), with_kwargs=True, prepend=True) for m in modules}
        )

    def _start_call(self, called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Decide about a call that is about to run: is it part of a step, and is the step measured?"""
        is_training = called.training and torch.is_grad_enabled()
        if not is_training or _torch.get_backward_pass() >= 0 or is_paused():  # or a recomputation, or a verification
            return
        for module in [m for m in self._hooks if m is not called and m is not self._model()]:
            self._hooks.pop(module).remove()
        ids, self.ids = self.ids, None
        if self._attempt is not None and (self._attempt.state is not State.WAITING or self._attempt.is_abandoned):
            self._end_attempt()
        if self._attempt is not None and self._attempt.continue_with(self.step, ids):
            return
        step, self.step = self.step, self.step + 1
        if self._attempt is not None:  # it was given up, and goes on with this call
            self._calls += 1
        elif not self._is_due():
            self._calls += 1
            if self._is_due():
                self._note_open_call(called)
        elif self._has_open_call:  # this call may belong to the step of the last one
            self._note_open_call(called)
        elif (model := self._model()) is not None and self._can_measure(model):
            self._calls += 1
            own = ref(self)

            def measure_step(grads: RecordedGradients, attempt: Attempt) -> Measurement | None:
                return None if (watching := own()) is None else watching._measure(grads, attempt)

            self._attempt = Attempt(model, step, ids, measure_step, self._options)
            self._attempt.begin(called, args, kwargs)

    def _is_due(self) -> bool:
        return self._calls % self._every == 0

    def _can_measure(self, model: nn.Module) -> bool:
        """Whether this monitor can record the call, or what records it (`Attempt`) records enough.

        If not, the next call is measured.
        """
        leave_ended_modes()
        if can_share_recording(model, self._options) or not (is_recording() or TURNS.must_give_way(self)):
            TURNS.take(self)
            return True
        TURNS.wait(self)
        return False

    def _note_open_call(self, called: nn.Module) -> None:
        """Note that the call that is about to run, and is not measured, waits for its backward pass."""
        if self._open_call_hook is not None:
            self._open_call_hook.remove()
        own = ref(self)

        def close(grad: Tensor) -> None:
            if (watching := own()) is not None:
                watching._has_open_call = False

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if (watching := own()) is not None:
                hook.remove()
                for tensor in iterate_tensors(output):
                    if tensor.requires_grad:
                        tensor.register_hook(close)
                        watching._has_open_call = True

        self._open_call_hook = hook = called.register_forward_hook(ModuleHook(after))

    def _end_attempt(self) -> None:
        """Stop the recording of a step that has ended or was given up, and keep its result."""
        if self._attempt is not None:
            self._attempt.end()
            self._keep_result()
            self._attempt = None

    def _keep_result(self) -> None:
        """Keep what was measured last, if there is something new."""
        if (attempt := self._attempt) is None:
            return
        found, attempt.found = attempt.found, None
        if attempt.refusal is not None:
            self._warn(f"Step {attempt.step} is not measured, nor are other steps like it: {attempt.refusal}")
        if found is None:
            return
        if found.noise is not None and found.signal is not None:
            self._estimate.add(found.noise, found.signal)
        found.noise_scale = self._estimate.compute()
        found.warnings = self._find_warnings(found)
        if attempt.ids is not None:
            self._norms.update(found.hardest)
            if len(self._norms) > _KEPT_HARDEST:
                hardest = sorted(self._norms.items(), key=lambda item: -item[1])
                self._norms = dict(hardest[: _KEPT_HARDEST // 2])
        self._history.append(found)
        self._write(found.to_dict())
        if self._log is not None:
            self._log(found.list_scalars(), found.step)

    @torch.no_grad()
    def _measure(self, grads: RecordedGradients, attempt: Attempt) -> Measurement | None:
        if attempt.other is not None and attempt.other.is_private:
            self._warn(
                "The model is in private training. The monitor's numbers are not private: they depend on single "
                "samples without noise. Do not publish its log with the model."
            )
        if not grads.batch_size:
            return None
        ids = _check_ids(attempt.ids, grads.row_count)
        return measure(grads, attempt.names, attempt.step, self._groups, self._bounds, ids, self._hardest)

    def _warn(self, text: str) -> None:
        """Log a warning, once for each kind."""
        kind = text.partition(": ")[2] or text
        if kind not in self._warned:
            self._warned.add(kind)
            _LOGGER.warning("%s", text)

    def _find_warnings(self, found: Measurement) -> list[str]:
        warnings = [f"{found.not_finite} samples have a gradient that is not finite"] if found.not_finite else []
        for name, part in found.layers.items():
            before, now = self._layers[name], part["most"]
            if len(before) >= _STEPS_TO_JUDGE:
                usual = statistics.median(before)
                if now > _EXPLODED * usual > 0:
                    warnings.append(f"{name}: the largest norm is {now / usual:.0f} times its usual size")
                if not now and not usual:
                    warnings.append(f"{name}: no sample has a gradient here")
            if now == now:  # not NaN, which a step without finite samples has
                before.append(now)
        return warnings

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            print(json.dumps(line), file=self._file, flush=True)
        except OSError as error:  # such as a full disk
            self._file = None
            self._warn(f"The monitor writes nothing more to its file: {error}")


def _check_ids(ids: Ids, count: int) -> list[ExampleId] | None:
    if ids is None:
        return None
    found = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    if len(found) != count:
        raise PerSampleError(f"Monitor.ids has {len(found)} entries, but the batch has {count} samples.")
    return found


def _make_log(log: Log | Any) -> Log | None:
    """The function that receives the numbers: as given, or one that writes to TensorBoard."""
    if log is None or callable(log):
        return log
    if not hasattr(log, "add_scalar"):
        raise PerSampleError(
            f"log must be a function of (numbers, step), or a SummaryWriter of TensorBoard, got {describe_value(log)}."
        )

    def write(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            log.add_scalar(f"gradients/{name}", value, step)

    return write
