"""Compare the outputs of a batch with those of samples of it alone, and find the cause of a difference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from persample import _torch
from persample._internal.rng import RngState
from persample._internal.tree import iterate_tensors
from persample.errors import SamplesMixed, refuse_state
from persample.layouts import has_equal_shares, take_sample
from persample.recording.verification.differences import (
    Difference,
    Part,
    compute_difference,
    find_difference,
    find_other_form,
    find_scale,
    make_part,
    match_any_layout,
)
from persample.recording.verification.runs import NOT_REPEATABLE, NotVerified, Runs, shorten
from persample.recording.verification.sample_calls import Call

if TYPE_CHECKING:
    from persample.recording.verification.one_pass import Verification


class Comparison:
    """Compares a batch with samples of it alone.

    Rounding changes the last digits if the kernels for one sample are other ones than for the batch. A small difference
    is accepted, and after a larger one further passes decide.
    """

    def __init__(self, verification: Verification, runs: Runs, parts: list[Part], outputs: int, has_row: bool) -> None:
        self.verification, self.runs, self.parts, self._outputs = verification, runs, parts, outputs
        self.batch, self._calls = verification.tracker.batch, verification.calls
        self._needs_copies = False  # a sample alone raises
        self._not_compared = ""  # why an output could not be compared
        self._constants: dict[int, Tensor] = {}  # outputs of a sample alone in which no samples are known
        self._row_sample = verification.row_sample if has_row and not runs.is_random else None
        self.row: dict[int, Tensor] = {}  # the outputs of that sample alone, with their graph
        self.row_inputs: list[Tensor] = []  # the leaves of that graph that are no parameters

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
                buffers = _compare_buffers(self.verification, buffers, sample)
            self._check_numbers(random)
            compared |= found is not None
            if found is not None and found.relative > self._tight:
                self._judge(sample, call, found)
                if not self.verification.draws_samples:
                    self.row = {}  # its gradient may differ as much
        if not compared:
            self.verification.is_telling = self._is_finite()
            raise NotVerified("the outputs of a sample alone have another form, or are not finite")
        if self._not_compared:
            raise NotVerified(self._not_compared)
        if self.verification.checks_places:
            self._compare_rotated()
            self.verification.is_telling = not self._calls.are_samples_equal()
        return f"verified with {len(self.verification.samples)} samples"

    def compare_sums(self, sums: dict[int, Tensor]) -> str:
        """Compare sums over the samples with those of two other batches, which together have each sample twice."""
        whole, random = sums, None
        if self.runs.is_random:  # numbers of each sample belong to its place, and would not move with it
            whole, random = self._run_batch(), self.runs.read_random_state()
            self._compare_alone(*next(iter(self.verification.samples.items())))
            if self._needs_copies:
                raise NotVerified("the forward pass draws random numbers and does not run on one sample")
            self._check_numbers(random)
        half = self.batch // 2
        middle = [half] * (self.batch % 2)
        first, last = list(range(half)), list(range(self.batch - half, self.batch))
        found = [self._run_replaced([*part, *middle, *part]) for part in (first, last)]
        self._check_numbers(random)
        for position in sums:
            totals = [float(outputs[position]) for outputs in (whole, *found) if position in outputs]
            if len(totals) < 3 or not all(map(math.isfinite, totals)):
                raise NotVerified("the outputs of other batches have another form, or are not finite")
            difference = abs(2 * totals[0] - totals[1] - totals[2])
            if difference > 10 * self._tight * (abs(totals[1]) + abs(totals[2])):
                self._refuse_sum(position, totals)
        return "verified with two other batches"

    def _check_numbers(self, after_batch: RngState | None) -> None:
        """Check that the last run has drawn as many random numbers as the batch: none belongs to one sample."""
        if after_batch is not None and not self.runs.can_repeat(after_batch):
            raise NotVerified("the forward pass draws random numbers other than those of dropout")

    def _run_replaced(self, samples: list[int]) -> dict[int, Tensor]:
        """The outputs of a batch with `samples[n]` in the place of sample n."""
        call = self._calls.replace(samples)
        if call is None or self._calls.has_changed:
            raise NotVerified("the samples in the arguments cannot be replaced")
        return self._run(call, "a batch of some samples twice")

    def _refuse_sum(self, position: int, totals: list[float]) -> None:
        if undivided := self._calls.find_undivided():
            raise NotVerified(undivided)
        again = self._run_batch().get(position)
        if again is None or abs(float(again) - totals[0]) > self._tight * abs(totals[0]):
            raise NotVerified(NOT_REPEATABLE)
        raise SamplesMixed(
            f"An output of the model that should be a sum over the samples is none: it is {totals[0]:.6g} for the "
            f"batch, and {totals[1]:.6g} and {totals[2]:.6g} for two batches with half of the samples twice. "
            f"{self.verification.tracker.advice} The option verify=False turns this check off."
        )

    def _is_finite(self) -> bool:
        """Whether an output of the compared samples has finite entries."""
        with _torch.DisableTorchFunction():
            return any(
                bool(take_sample(part.tensor, part.layout, sample, self.batch).isfinite().any())
                for part in self.parts
                for sample in self.verification.samples
            )

    @property
    def _tight(self) -> float:
        """A relative difference that rounding rarely exceeds: 9e-5 in float32, 0.02 in bfloat16."""
        return self.runs.rounding**0.5 / 4

    @property
    def _loose(self) -> float:
        """A relative difference that is more than rounding: 0.02 in float32, 0.3 in bfloat16."""
        return self.runs.rounding**0.25

    @property
    def _same_shapes(self) -> float:
        """The same for two batches of one size, whose kernels are the same."""
        return self._tight if self.runs.rounding <= torch.finfo(torch.float32).eps else self._loose / 2

    # ---- runs ----

    def _compare_alone(self, sample: int, call: Call) -> Difference | None:
        try:
            if sample == self._row_sample and not self.row:
                outputs = self.row = self.runs.run_with_graph(call)
                self.row_inputs = self.runs.inputs
            else:
                outputs = self.runs.run(call)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # batch norm and fixed shapes need several samples
            copies = self._compare_with_copies(sample)
            if copies is None:
                raise NotVerified(f"sample {sample} alone raises {shorten(error)}") from error
            self._needs_copies = True
            return copies
        if len(outputs) != self._outputs:
            return None
        with _torch.DisableTorchFunction():
            self._check_compared(outputs, sample)
            return find_difference(self.parts, outputs, sample, self.batch, crop=self.verification.checks_places)

    def _check_compared(self, outputs: dict[int, Tensor], sample: int) -> None:
        """Note an output that has another form in the batch, or that samples change although none are known in it."""
        if (shape := find_other_form(self.parts, outputs, sample, self.batch, self._tight)) is not None:
            self._not_compared = f"an output of shape {shape} has another form if a sample is alone"
        for position in self.verification.constants & outputs.keys():
            own, other = outputs[position], self._constants.setdefault(position, outputs[position])
            if own.shape == other.shape and compute_difference(own, other, find_scale(own))[0] > self._tight:
                self._not_compared = (
                    f"an output of shape {tuple(own.shape)} depends on samples, and on which is not known"
                )

    def _run_batch(self) -> dict[int, Tensor]:
        if self._calls.has_changed:
            raise NotVerified("the forward pass changes its arguments in place")
        return self._run(self._calls.whole, "a second run of the batch")

    def _run(self, call: Call, name: str) -> dict[int, Tensor]:
        try:
            return self.runs.run(call)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise NotVerified(f"{name} raises {shorten(error)}") from error

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
        if undivided := self._calls.find_undivided():
            raise NotVerified(undivided)
        if self._calls.has_changed:
            if found.relative > self._loose:
                self._refuse(sample, found, "depends on the other samples, or on its place among them")
            return
        self._check_repeatable(sample)
        precise = self._compare_precisely(sample, call)
        if precise is not None and precise.relative <= self._tight:
            return
        found = precise or found
        most, influence = self._same_shapes, self._compare_with_copies(sample)
        if influence is not None and influence.relative > most:
            self._refuse(sample, found, "changes with the other samples of the batch", call)
        if found.relative > self._loose:
            self._refuse(sample, found, "depends on its place in the batch, or on the size of the batch", call)

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
        copies = self._calls.replace([sample] * self.batch)
        if copies is None or self._calls.has_changed:
            return None
        try:
            return self._compare_batch(sample, self.runs.run(copies))
        except Exception:  # the model needs samples that differ
            return None

    def _compare_rotated(self) -> None:
        """Refuse an output that changes if each sample takes the place of the one before it."""
        rotated = self._calls.replace([*range(1, self.batch), 0])
        if rotated is None or self._calls.has_changed:
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
                if found is not None and found.relative > self._same_shapes:
                    self._judge_rotation(sample, found)
                    return

    def _check_repeatable(self, sample: int) -> None:
        """Raise if another run of the batch gives other outputs."""
        again = self._compare_batch(sample, self._run_batch())
        if again is None or again.relative > self._tight:
            raise NotVerified(NOT_REPEATABLE)

    def _judge_rotation(self, sample: int, found: Difference) -> None:
        self._check_repeatable(sample)
        if self._calls.has_list():
            raise NotVerified("a list in the arguments may hold one item for each sample")
        raise SamplesMixed(
            f"The output of sample {sample} depends on its place in the batch: a tensor of shape {found.shape} in the "
            f"output of the model differs by up to {found.absolute:.3g} if each sample takes the place of the one "
            "before it. In private training a sample's number in the batch must not influence its result. "
            f"{self.verification.tracker.advice} The option verify=False turns this check off."
        )

    def _refuse(self, sample: int, found: Difference, cause: str, call: Call | None = None) -> NoReturn:
        if self._needs_copies:
            call = self._calls.replace([sample] * self.batch)
        place = None if call is None else self._find_module(sample, call)
        other = "a batch of copies of it" if self._needs_copies else "the same sample alone"
        where = f" The difference first appears in {place}." if place else ""
        raise SamplesMixed(
            f"The output of a sample {cause}: a tensor of shape {found.shape} in the output of the model differs by up "
            f"to {found.absolute:.3g} between sample {sample} in its batch of {self.batch} and {other} "
            f"(relative to the size of its entries: {found.relative:.2g}).{where} {self.verification.tracker.advice} "
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
            self.runs.run(self._calls.whole, compare)
        except Exception:  # only the name is lost
            return None
        model = self.runs.model
        if not differing:
            return f"the code of {type(model).__name__} itself"
        name = next(name for name, module in model.named_modules() if module is differing[0])
        return f"module '{name}' ({type(differing[0]).__name__})"


def _compare_buffers(verification: Verification, before: Mapping[str, Tensor], sample: int) -> dict[str, Tensor]:
    """The buffers after a run of one sample; raises if they differ from those after a run of another sample."""
    model, first = verification.model, next(iter(verification.samples))
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
