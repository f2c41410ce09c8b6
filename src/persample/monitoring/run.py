"""`monitor`: measures every twentieth step of a training run, and leaves the run as it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from persample._internal.models import group_by_module
from persample._internal.options import show_options
from persample._internal.text import format_table
from persample.errors import PerSampleError
from persample.gradients import RecordedGradients
from persample.monitoring.advice import Advice, advise
from persample.monitoring.attempt import Attempt
from persample.monitoring.guards import Guards
from persample.monitoring.measurement import ExampleId, Measurement, measure
from persample.monitoring.noise_scale import NoiseScale, NoiseScaleEstimate
from persample.monitoring.numbers import Log, RunFile, make_log
from persample.monitoring.steps import MeasuredSteps, StepOptions, check_ids
from persample.recording import CONTRIBUTIONS, Coupled, Model, Options, get_trainable

_KEPT_HARDEST = 1000


class MonitorOptions(StepOptions, total=False):
    """The options of `record` that a monitor has."""

    coupled: Coupled


@show_options(Options, MonitorOptions)
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
    **options: Unpack[MonitorOptions],
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
        **options: as in `record`.

    With `coupled="contributions"`, a model with BatchNorm or a contrastive loss is measured, too: the figures are then
    of the samples' contributions to the batch's gradient, and the file and `repr` say so.

    Raises:
        PerSampleError: an option is wrong; or in a measured step with second derivatives (`create_graph=True`); or,
            under several processes, the model is refused.

    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with monitor(model, every=2, bounds=[1.0]) as watching:
    ...     for _ in range(10):
    ...         optimizer.zero_grad()
    ...         model(torch.randn(8, 3)).square().mean().backward()
    ...         optimizer.step()
    >>> len(watching.history), watching.history[-1].samples
    (5, 8)
    """
    return Monitor(model, every, out, log, bounds, groups, window, hardest, options)


class Monitor(MeasuredSteps[Measurement]):
    """The result of `monitor`. `stop()`, or the end of a `with` block, ends it.

    Attributes:
        ids: the ids of the samples of the next call of the model; set it before the call to know the hardest examples
            by id. Without it, they are numbered within their batch.
        step: the number of calls of the model in training mode so far. It can be set, to the step of a trainer.

    >>> model = torch.nn.Linear(3, 2)
    >>> with monitor(model) as watching:
    ...     watching.ids = ["a", "b", "c"]
    ...     model(torch.tensor([[1., 0, 0], [9., 0, 0], [2., 0, 0]])).square().mean().backward()
    >>> watching.find_hardest(1)[0][0]
    'b'
    """

    def __init__(
        self,
        model: Model,
        every: int,
        out: str | Path | None,
        log: Log | Any,
        bounds: Iterable[float],
        groups: Mapping[str, Sequence[str]] | None,
        window: int,
        hardest: int,
        options: MonitorOptions,
    ) -> None:
        if window < 1:
            raise PerSampleError(f"window must be at least 1, got {window}.")
        super().__init__(model, every, {**options, "nonfinite": "keep"})
        weights = self._read_weights()
        self._groups = (
            group_by_module(self._names) if groups is None else {name: list(part) for name, part in groups.items()}
        )
        self._bounds, self._hardest = tuple(bounds), hardest
        self._log: Log | None = make_log(log)
        self._history: list[Measurement] = []
        self._norms: dict[ExampleId, float] = {}  # of the hardest examples, at the last time that each was seen
        self._estimate = NoiseScaleEstimate(window)
        self._guards = Guards(weights, self._groups, window)
        sizes = {group: sum(weights[name].numel() for name in part) for group, part in self._groups.items()}
        self._file = None if out is None else RunFile(out, every, sizes, options.get("coupled"), self.warn)

    def stop(self) -> None:
        """End the monitoring; the model is as it was before."""
        super().stop()
        if not self.step and not self._history:
            self.warn(
                "The monitor has seen no call of its model in training mode, nor of a part of it. Give it the module "
                "that is called: the compiled model if torch.compile made one."
            )
        if self._file is not None:
            self._file.close()

    # ---- answers ----

    @property
    def history(self) -> list[Measurement]:
        """The measured steps, first to last."""
        self.keep_result()
        return self._history

    @property
    def latest(self) -> Measurement | None:
        """The last measured step, None before the first."""
        return self.history[-1] if self.history else None

    @property
    def noise_scale(self) -> NoiseScale | None:
        """The noise scale over the last measured steps, with its interval."""
        self.keep_result()
        return self._estimate.compute()

    def find_hardest(self, k: int = 10) -> list[tuple[ExampleId, float]]:
        """The examples with the largest gradient norms, each when it was last measured."""
        self.keep_result()
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

    @torch.no_grad()
    def measure(self, grads: RecordedGradients, attempt: Attempt[Measurement]) -> Measurement | None:
        """Measure the norms of a step."""
        if attempt.other is not None and attempt.other.is_private:
            self.warn(
                "The model is in private training. The monitor's numbers are not private: they depend on single "
                "samples without noise. Do not publish its log with the model."
            )
        if not grads.batch_size:
            return None
        ids = check_ids(attempt.ids, grads.row_count)
        return measure(grads, attempt.names, attempt.step, self._groups, self._bounds, ids, self._hardest)

    def keep(self, found: Measurement, attempt: Attempt[Measurement]) -> None:
        """Add a step to the history, the file and the log."""
        if found.noise is not None and found.signal is not None:
            self._estimate.add(found.noise, found.signal)
        warnings = self._guards.check(found, self._read_weights())
        found = replace(found, noise_scale=self._estimate.compute(), warnings=warnings)
        if attempt.ids is not None:
            self._norms.update(found.hardest)
            if len(self._norms) > _KEPT_HARDEST:
                hardest = sorted(self._norms.items(), key=lambda item: -item[1])
                self._norms = dict(hardest[: _KEPT_HARDEST // 2])
        self._history.append(found)
        if self._file is not None:
            self._file.write(found.to_dict())
        if self._log is not None:
            self._log(found.list_scalars(), found.step)

    def _read_weights(self) -> dict[str, Tensor]:
        """The monitored weights by name; none if the model is gone."""
        model = self._model()
        trainable = {} if model is None else get_trainable(model)
        return {name: trainable[name] for name in self._names if name in trainable}
