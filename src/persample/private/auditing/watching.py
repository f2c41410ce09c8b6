"""What the steps of one training release, and the direct tests of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from persample._internal.rng import preserve_rng
from persample.losses import LossFunction
from persample.private.auditing.accounting_tests import list_claims, test_claimed_epsilon, test_counted_steps
from persample.private.auditing.canaries import WatchedData
from persample.private.auditing.clipping_tests import test_outlier
from persample.private.auditing.direct import (
    DirectTest,
    NotTested,
    flatten,
    get_parameters,
    get_unit,
    make_uncounted_steps,
    read_release,
    release_empty_batch,
)
from persample.private.auditing.noise_tests import (
    EMPTY_RELEASES,
    NoiseRecord,
    test_correlation_over_parameters,
    test_correlation_over_steps,
    test_deviation,
)
from persample.private.auditing.sampling_tests import test_batch_sizes, test_repeated_samples

_RATE_TOLERANCE = 1.25  # of the rate that the user of an audit gives, beside that of the accountant


class StepWatch:
    """Watches the steps of a private optimizer, of persample or of Opacus, and tests what they release.

    Args:
        optimizer: the private optimizer, before its first step.
        sample_rate: the sampling rate that the user of the audit has given.
        data: the dataset of the training, if it is known.
        model: the model; by default, that of the optimizer.
    """

    def __init__(
        self, optimizer: Any, sample_rate: float, data: WatchedData | None = None, model: nn.Module | None = None
    ) -> None:
        self._optimizer, self._sample_rate, self._data = optimizer, sample_rate, data
        self._model: nn.Module | None = getattr(optimizer, "module", None) if model is None else model
        self._results: list[DirectTest] = []
        self._gaps: dict[str, str] = {}  # why a test was not made
        self._sizes: list[int] = []  # of the batches
        self._marks: list[int] = []  # number of samples that were loaded before each step
        self._noise_multipliers: list[float] = []  # of the steps
        self._rows, self._unit, self._bound = 0, 1.0, 1.0  # of the step that has begun
        names = {} if self._model is None else {id(p): name for name, p in self._model.named_parameters()}
        parameters = get_parameters(optimizer)
        self._noise = NoiseRecord([names.get(id(p), f"parameter {i}") for i, p in enumerate(parameters)])
        optimizer.shows_sums = True

    # ---- before the training ----

    def start(self, loss_fn: LossFunction | None, collate: Callable[[list[Any]], Any]) -> None:
        """Test the clipping, note the noise of some steps without samples, and watch the steps from now on."""
        self._make("clipping", lambda: self._test_clipping(loss_fn, collate))
        with preserve_rng(), make_uncounted_steps(self._optimizer):
            for _ in range(EMPTY_RELEASES):
                self._noise.add(release_empty_batch(self._optimizer))
        self._watch_steps()

    def _test_clipping(self, loss_fn: LossFunction | None, collate: Callable[[list[Any]], Any]) -> DirectTest:
        if self._model is None:
            raise NotTested("observe() has no model=")
        if self._data is None:
            raise NotTested("the training does not use run.add_canaries(dataset)")
        try:
            return test_outlier(self._optimizer, self._model, loss_fn, self._data, collate)
        except NotTested:
            raise
        except Exception as error:  # whatever the user's model, loss or collate function raises for this batch
            raise NotTested(f"the batch with the outlier has failed: {type(error).__name__}: {error}") from error

    # ---- in the training ----

    def _watch_steps(self) -> None:
        if self._data is not None:
            self._data.loaded.clear()
        prepare = self._optimizer.pre_step

        def pre_step(closure: Any = None) -> Any:
            self._rows += _count_rows(self._optimizer)
            # Adaptive clipping changes both in pre_step().
            self._unit, self._bound = get_unit(self._optimizer), float(self._optimizer.max_grad_norm)
            try:
                return prepare(closure)
            except BaseException:
                self._rows = 0
                raise

        self._optimizer.pre_step = pre_step

    def note_step(self) -> None:
        """Note what a step releases, before the wrapped optimizer uses it."""
        self._sizes.append(self._rows)
        self._rows = 0
        self._marks.append(0 if self._data is None else len(self._data.loaded))
        self._noise_multipliers.append(float(self._optimizer.noise_multiplier))
        release, noise = read_release(self._optimizer, self._unit), []
        for p, part in zip(get_parameters(self._optimizer), release, strict=True):
            total = getattr(p, "summed_grad", None)
            noise.append(part if total is None else part - flatten(total).float() / self._bound)
        self._noise.add(noise)

    def stop(self) -> None:
        """Stop watching."""
        vars(self._optimizer).pop("pre_step", None)
        self._optimizer.shows_sums = False

    # ---- after the training ----

    def test(self, returned: Any, claimed: float | None, delta: float) -> tuple[list[DirectTest], dict[str, str]]:
        """The results of all tests, and why others were not made.

        Args:
            returned: what the training has returned: an engine or anything else.
            claimed: the claimed epsilon.
            delta: delta of the claim.
        """
        history = getattr(getattr(returned, "accountant", None), "history", None)
        noise_multipliers, rates = self._noise_multipliers, [self._sample_rate] * len(self._sizes)
        if history is not None:
            self._make("counted steps", lambda: test_counted_steps(history, len(self._sizes)))
            noise_multipliers, rates = list_claims(history, len(self._sizes))
            rates = [min(rate, _RATE_TOLERANCE * self._sample_rate) for rate in rates]
        elif claimed is not None:
            self._make(
                "claimed epsilon",
                lambda: test_claimed_epsilon(claimed, self._noise_multipliers, self._sample_rate, delta),
            )
        empty = [noise_multipliers[0]] * EMPTY_RELEASES
        self._make("noise", lambda: test_deviation(self._noise, [*empty, *noise_multipliers]))
        self._make("noise over steps", lambda: test_correlation_over_steps(self._noise))
        self._make("noise over parameters", lambda: test_correlation_over_parameters(self._noise))
        self._make("batch sizes", lambda: test_batch_sizes(self._sizes, self._count_population(), rates))
        self._make("repeated samples", lambda: self._test_repeated_samples(max(rates)))
        return self._results, self._gaps

    def _count_population(self) -> int:
        """The number of samples, or of units, that batches are drawn from, or a few more.

        The optimizer has the mean size of a batch rounded down. The loader may draw from a part of the data only.
        """
        if not getattr(self._optimizer, "poisson_sampling", True):
            raise NotTested("batches are no Poisson samples: epsilon is an estimate")
        most = math.ceil((self._optimizer.expected_batch_size + 1) / self._sample_rate)
        if self._data is None or getattr(self._optimizer, "units", None) == "ids":
            return most
        return min(len(self._data), most)

    def _test_repeated_samples(self, rate: float) -> DirectTest:
        population = self._count_population()
        if self._data is None:
            raise NotTested("the training does not use run.add_canaries(dataset)")
        if getattr(self._optimizer, "units", None) == "ids":
            raise NotTested("batches are samples of units")
        return test_repeated_samples(self._data.loaded, self._marks, self._sizes, population, rate)

    def _make(self, name: str, test: Callable[[], DirectTest]) -> None:
        try:
            self._results.append(test())
        except NotTested as reason:
            self._gaps[name] = str(reason)


def _count_rows(optimizer: Any) -> int:
    """The number of samples, or units, whose clipped gradients are about to be added to the sum of a step."""
    return optimizer.row_count if hasattr(optimizer, "row_count") else len(optimizer.grad_samples[0])
