"""Compare a recording with a loop over the samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from persample._internal.state import preserve_state
from persample._internal.text import describe_value
from persample.batches import Batch, BatchDim
from persample.checking.report import ParameterReport, Report, Verdict, describe_norms, describe_term
from persample.checking.subject import Gradient, Subject, compute_error, compute_scales, find_largest_finite
from persample.errors import PerSampleError
from persample.gradients import PerSampleGradients, find_term
from persample.losses import check_inputs_and_targets, takes_outputs
from persample.recording import Verify
from persample.terms import Term, find_factors

# Error that rounding may cause, relative to the scale of a row, by the least precise number type of the computation.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2}


COARSE_TOLERANCE = 1e-1  # bfloat16 and number types with fewer digits


def check(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[..., Any],
    *,
    samples: int = 4,
    batch_dim: BatchDim = 0,
    batch_size: int | None = None,
    loss_reduction: str | None = None,
    tolerance: float | None = None,
    verify: Verify = "first",
) -> Report:
    """Compare the result of `record` for a few samples with a loop over them, and report on each parameter.

    `loss_fn(model, batch)` returns the loss, a tensor with one element. It must call the model that it receives:

    >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 5))
    >>> batch = {"x": torch.randn(16, 3), "y": torch.randint(5, (16,))}
    >>> def loss_fn(model, batch):
    ...     return nn.functional.cross_entropy(model(batch["x"]), batch["y"])
    >>> report = check(model, batch, loss_fn)
    >>> report.ok, report.parameters[0].rules, report.parameters[0].term
    (True, ['linear'], 'Outer')

    A loss function from torch, or any `nn.Module`, requires `batch = (inputs, targets)` and is called as
    `loss_fn(model(inputs), targets)`. A tuple or dict of inputs is unpacked into the arguments of the model:

    >>> check(model, (batch["x"], batch["y"]), nn.CrossEntropyLoss()).ok
    True

    The check runs on copies. The model, its gradients and buffers, the batch and the state of random number generators
    are not changed. It computes in float64 if the model runs in float64. Dropout is turned off for the comparison,
    because a loop over the samples cannot draw the masks of the batch.

    Args:
        samples: number of samples to compare, taken from the start of the batch. If another dimension has the same
            size, a few more are taken. All tensors in the batch are cut along `batch_dim`; tensors without a batch
            dimension are the same for all samples.
        batch_dim: as in `record`.
        loss_reduction: as in `record`.
        batch_size: number of samples in `batch`, if the tensors do not agree on it.
        tolerance: allowed error, relative to the scale of a row. The default depends on the number type.
        verify: as in `record`: by default, the outputs of two samples alone are compared with those of the batch too,
            and a difference is a refusal that names the module where it first appears.

    Returns:
        A report; `print(report)` shows it as a table. If `record` refuses the model, the report contains the error,
        which names the place in the model.

    Raises:
        PerSampleError: if the arguments are wrong. Errors of the plain model are raised unchanged.
    """
    _check_arguments(model, samples, loss_reduction)
    pair = takes_outputs(loss_fn)
    if pair:
        check_inputs_and_targets(loss_fn, batch)
    whole = Batch(batch, batch_dim, batch_size, pair)
    if whole.size == 0:
        raise PerSampleError("The batch has no samples.")
    count = whole.choose_count(samples)
    options = {
        "batch_dim": batch_dim,
        "batch_size": None if batch_size is None else count,
        "loss_reduction": loss_reduction,
        "divisor": "own",  # as in the loss of a sample alone
        "verify": verify,
    }
    with preserve_state(model, loss_fn), torch.inference_mode(False), torch.enable_grad():
        subject = _make_subject(model, loss_fn, whole, options, count)
        return _Comparison(subject, model, count, loss_reduction, tolerance).run()


def _make_subject(model: nn.Module, loss_fn: Callable[..., Any], batch: Batch, options: Any, count: int) -> Subject:
    """Copy of the model in float64 if it runs in float64, else in its own number types."""
    try:
        subject = Subject(model, loss_fn, batch, options, double=True)
        subject.compute_gradient(0, count)
    except Exception:
        subject = Subject(model, loss_fn, batch, options, double=False)
        subject.compute_gradient(0, count)
    return subject


@dataclass(frozen=True)
class _Recording:
    """Result of a recorded run: gradients and rules, or the error that refused it."""

    grads: PerSampleGradients | None = None
    rules: Mapping[str, list[str]] = field(default_factory=dict)
    refusal: PerSampleError | None = None


class _Comparison:
    """Comparison of one subject's recording with its loop and with the plain gradient of the batch."""

    def __init__(
        self, subject: Subject, model: nn.Module, count: int, reduction: str | None, tolerance: float | None
    ) -> None:
        self.subject = subject
        self.own = dict(model.named_parameters())
        self.count = count
        self.reduction = reduction
        self.notes: list[str] = []
        self.dtype = subject.find_narrowest_dtype(count)
        self.tolerance = TOLERANCES.get(self.dtype, COARSE_TOLERANCE) if tolerance is None else tolerance

    def run(self) -> Report:
        """Run the batch, the loop and the recording, and compare the results."""
        plain = self.subject.compute_gradient(0, self.count)
        if not self.subject.reached:
            raise PerSampleError(
                "The loss depends on no parameter of the model that was passed to loss_fn. The check passes a copy of "
                "the model: loss_fn must call its argument, not another reference to the model."
            )
        recording, wrong = None, set[str]()
        random = self.subject.is_random(self.count)
        if random:
            recording, wrong, random = self._turn_off_dropout(plain)
            plain = plain if random else self.subject.compute_gradient(0, self.count)
        loop = None if random else self._run_loop()
        if recording is None or (recording.grads is not None and not random):
            recording = self._record()
        self._find_reduction(recording, loop, plain)
        coupled = None if loop is None or self.count == 1 else self._find_coupling(loop, plain, recording)
        if recording.grads is None:
            found = [ParameterReport(name, tuple(p.shape), "refused") for name, p in self.subject.parameters.items()]
        else:
            errors = {} if loop is None else self._compute_errors(recording.grads, loop)
            wrong |= self._find_wrong_sums(recording, plain) if loop is None else self._find_wrong(errors)
            verdicts = {name: self._judge(name, wrong, loop, plain) for name in errors or plain}
            terms = {name: find_term(recording.grads, name) for name in recording.rules}
            found = [
                self._describe_parameter(name, terms[name], rules, verdicts[name], errors.get(name))
                for name, rules in recording.rules.items()
            ]
        self._add_remarks(found, coupled)
        return Report(
            found,
            self.count,
            self.subject.batch.size,
            self._describe_dtype(),
            self.tolerance,
            recording.refusal,
            coupled,
            self.notes,
            [] if recording.grads is None else recording.grads.tried.list(),
        )

    # ---- runs ----

    def _turn_off_dropout(self, plain: Gradient) -> tuple[_Recording, set[str], bool]:
        """Record the model with its random numbers, and turn off its dropout.

        Returns the recording, the parameters whose rows do not add up, and whether the model is still random.
        """
        recording = self._record()
        self._find_reduction(recording, None, plain)
        wrong = self._find_wrong_sums(recording, plain)
        is_random = not self.subject.turn_off_dropout(self.count)
        self._note_randomness(is_random, recording, wrong)
        return recording, wrong, is_random

    def _record(self) -> _Recording:
        try:
            return _Recording(*self.subject.record(self.count))
        except PerSampleError as error:
            return _Recording(refusal=error)
        except RuntimeError as error:  # inputs that disagree on the batch size, or an error of torch
            return _Recording(refusal=_make_refusal(error, str(error)))
        except Exception as error:
            self.notes.append("The plain model runs, but its recording failed. Please report this error.")
            return _Recording(refusal=_make_refusal(error, f"{type(error).__name__}: {error}"))

    def _run_loop(self) -> Gradient | None:
        """Gradients of single samples by plain autograd, one row each; None if the model fails on a single sample."""
        try:
            rows = [self.subject.compute_gradient(n, n + 1) for n in range(self.count)]
        except Exception as error:
            self.notes.append(
                f"The model does not run on a single sample ({type(error).__name__}: {error}). There is no loop to "
                "compare with, only the gradient of the batch."
            )
            return None
        return {name: torch.stack([row[name] for row in rows]) for name in self.subject.parameters}

    # ---- comparisons ----

    def _describe_parameter(
        self, name: str, term: Term | None, rules: list[str], verdict: Verdict, error: float | None
    ) -> ParameterReport:
        own = self.own[name]
        if term is None and verdict != "WRONG":
            return ParameterReport(name, tuple(own.shape), "unused")
        structure, norms = (describe_term(term), describe_norms(term)) if term else ("", "")
        dense_bytes = self.subject.batch.size * own.numel() * own.element_size()
        return ParameterReport(
            name,
            tuple(own.shape),
            verdict,
            rules,
            structure,
            norms,
            self._count_kept_bytes(term, own),
            dense_bytes,
            error,
        )

    def _judge(self, name: str, wrong: set[str], loop: Gradient | None, plain: Gradient) -> Verdict:
        if name in wrong:
            return "WRONG"
        if not (plain if loop is None else loop)[name].isfinite().all():
            return "not finite"
        return "adds up" if loop is None else "right"

    def _count_kept_bytes(self, term: Term | None, own: Tensor) -> int:
        """Memory of the term for the whole batch, in the number type of the parameter."""
        kept = find_factors(term) if term else ()
        sizes = [t.numel() * (own if t.is_floating_point() or t.is_complex() else t).element_size() for t in kept]
        return sum(sizes) * self.subject.batch.size // self.count

    def _find_wrong(self, errors: Mapping[str, float]) -> set[str]:
        return {name for name, error in errors.items() if not error <= self.tolerance}

    def _compute_errors(self, grads: PerSampleGradients, loop: Gradient) -> dict[str, float]:
        """Error of each parameter's recorded rows against the loop, relative to the scale of a row."""
        scales = compute_scales(loop)
        return {name: compute_error(grads.dense([name])[name], own, scales[name]) for name, own in loop.items()}

    def _compute_sum_errors(self, rows: Gradient, plain: Gradient, reduction: str | None) -> dict[str, float]:
        """Error of the reduced rows against the gradient of the batch, relative to the scale of the rows."""
        parts = self.count if reduction == "mean" else 1
        scales = compute_scales(rows)
        return {
            name: compute_error(
                own.sum(0, keepdim=True) / parts,
                plain[name].unsqueeze(0),
                torch.maximum(scales[name].amax(0) / parts, find_largest_finite(plain[name].unsqueeze(0))),
            )
            for name, own in rows.items()
        }

    def _find_wrong_sums(self, recording: _Recording, plain: Gradient) -> set[str]:
        """Parameters for which the recorded rows do not add up to the gradient of the batch."""
        if recording.grads is None or recording.grads.has_own_means:
            return set()
        return self._find_wrong(self._compute_sum_errors(recording.grads.dense(), plain, self.reduction))

    def _find_reduction(self, recording: _Recording, loop: Gradient | None, plain: Gradient) -> None:
        """Set how the loss combines the samples, if the user did not say: as recorded, else what fits the loop."""
        if self.reduction is None and recording.grads is not None:
            self.reduction = "mean" if recording.grads.loss_reduction.startswith("mean") else "sum"
        elif self.reduction is None and loop is not None:
            is_sum = not self._find_wrong(self._compute_sum_errors(loop, plain, "sum"))
            self.reduction = "sum" if is_sum and self.count > 1 else "mean"

    def _find_coupling(self, loop: Gradient, plain: Gradient, recording: _Recording) -> bool:
        """Whether the plain gradients of the samples do not add up to the gradient of the batch; notes the meaning."""
        if recording.grads is not None and recording.grads.has_own_means:
            self.notes.append(
                "The loss divides by a number of the whole batch, such as that of its tokens. The rows were "
                'compared with the gradients of the samples alone, as with record(divisor="own"). By default they are '
                "shares of the loss."
            )
            return False
        errors = self._compute_sum_errors(loop, plain, self.reduction)
        if not self._find_wrong(errors):
            if recording.refusal is not None:
                self.notes.append(
                    "In the plain model these samples do not influence each other: the gradient of the batch is the "
                    f"{self.reduction} of the gradients of its samples. The model may become recordable if this part "
                    "is written with other functions of torch."
                )
            return False
        other = "sum" if self.reduction == "mean" else "mean"
        if self._find_wrong(self._compute_sum_errors(loop, plain, other)):
            worst = max(errors, key=lambda name: errors[name])
            self.notes.append(
                "The samples influence each other, or the loss is not a mean or sum over the samples: in the plain "
                f"model the gradient of the batch is not the {self.reduction} of the gradients of its samples "
                f"(relative error {errors[worst]:.0e} for '{worst}')."
            )
        else:
            self.notes.append(
                f"The gradient of the batch is the {other} of the gradients of its samples, not the {self.reduction}: "
                f"pass loss_reduction='{other}'."
            )
        return True

    # ---- remarks ----

    def _describe_dtype(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"float64, in part in {name}" if self.subject.double and self.dtype != torch.float64 else name

    def _note_randomness(self, remains: bool, recording: _Recording, wrong: set[str]) -> None:
        if remains:
            self.notes.append(
                "The model draws random numbers even with dropout turned off, so the loop and the batch compute "
                "different things. The rows were only added up and compared with the plain gradient from the same "
                "seed. To compare them one by one, pass the noise with the batch."
            )
        elif recording.grads is not None:
            add_up = f"the rows of {_join_names(wrong)} do NOT add up" if wrong else "the rows add up"
            self.notes.append(
                "The model draws random numbers, and a loop cannot draw the numbers of a batch: the rows were compared "
                f"with dropout turned off. With dropout on, {add_up} to the plain gradient."
            )

    def _add_remarks(self, parameters: Sequence[ParameterReport], coupled: bool | None) -> None:
        frozen = [name for name, p in self.own.items() if not p.requires_grad]
        if frozen:
            self.notes.append(f"Not recorded, because they do not require grad: {_join_names(frozen)}.")
        if self.count == 1:
            self.notes.append("A single sample cannot show whether samples influence each other.")
        wrong = [p for p in parameters if p.verdict == "WRONG"]
        if wrong and not coupled:
            rules = {rule for p in wrong for rule in p.rules}
            self.notes.append(
                f"Please report wrong numbers, unless you registered one of these rules: {_join_names(rules)}."
            )


def _check_arguments(model: Any, samples: Any, loss_reduction: Any) -> None:
    if not isinstance(model, nn.Module):
        raise PerSampleError(f"check takes an nn.Module, got {describe_value(model)}")
    if not isinstance(samples, int) or samples < 1:
        raise PerSampleError(f"samples must be a positive integer, got {samples!r}")
    if loss_reduction not in (None, "mean", "sum"):
        raise PerSampleError(f"loss_reduction must be 'mean', 'sum' or None, got {loss_reduction!r}")
    for name, p in model.named_parameters():
        if torch.nn.parameter.is_lazy(p):
            raise PerSampleError(f"The lazy parameter '{name}' has no shape yet: call the model once before the check.")
    if not any(p.requires_grad for p in model.parameters()):
        raise PerSampleError("The model has no parameter that requires grad.")


def _make_refusal(error: Exception, message: str) -> PerSampleError:
    refusal = PerSampleError(message)
    refusal.__cause__ = error
    return refusal


def _join_names(names: Iterable[str], most: int = 5) -> str:
    names = sorted(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
