"""Compares a recording with a loop over the samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from persample.batches import Batch, BatchDim
from persample.checking.report import ParameterReport, Report, Verdict
from persample.checking.subject import Gradient, Subject, untouched
from persample.errors import PerSampleError
from persample.gradients import PerSampleGradients
from persample.losses import check_pair, described, takes_outputs
from persample.terms import Outer, Patches, Rows, Sum, Term
from persample.terms.base import find_factors
from persample.terms.cost import choose_norm_algorithm

# What rounding may make of a row, relative to its scale, by the type with the fewest digits that was computed in.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2}
COARSE = 1e-1  # bfloat16, and what has fewer digits still

# A row's scale is at least this part of its sample's largest entry: a gradient that is zero but for rounding, as that
# of a bias before a softmax, has no scale of its own.
LEAST_SCALE = 1e-3


def check(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[..., Any],
    *,
    samples: int = 4,
    batch_dim: BatchDim = 0,
    batch_size: int | None = None,
    loss_reduction: str = "mean",
    tolerance: float | None = None,
) -> Report:
    """Compares what `record` gives for a few samples with a loop over them, and tells how each parameter is handled.

    `loss_fn(model, batch)` gives the loss, one number; it has to call the model that it is given:

    >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 5))
    >>> batch = {"x": torch.randn(16, 3), "y": torch.randint(5, (16,))}
    >>> def loss_fn(model, batch):
    ...     return nn.functional.cross_entropy(model(batch["x"]), batch["y"])
    >>> report = check(model, batch, loss_fn)
    >>> report.ok, report.parameters[0].rules, report.parameters[0].term
    (True, ['linear'], 'Outer')

    A loss of torch, or any other `nn.Module`, goes with `batch = (inputs, targets)` and is called as
    `loss_fn(model(inputs), targets)`; a tuple or dict of inputs is the model's arguments:

    >>> check(model, (batch["x"], batch["y"]), nn.CrossEntropyLoss()).ok
    True

    The first `samples` samples are taken (some more where that is also the size of another dim), by cutting every
    tensor in the batch along `batch_dim`. Tensors that do not have the batch there are the same for all. `batch_dim`,
    `batch_size` (the samples in `batch`) and `loss_reduction` are as in `record`. All is run in float64 if the model
    runs in it, on copies: the model, its gradients and buffers, the batch and random numbers stay as they are. Dropout
    is turned off for the comparison, as a loop cannot draw the masks of a batch.

    A recording that is refused is reported, with the message that names the place; `print(report)` shows a table.
    Mistakes in the call raise, as does a model that does not run by itself.
    """
    _check_arguments(model, samples, loss_reduction)
    pair = takes_outputs(loss_fn)
    if pair:
        check_pair(loss_fn, batch)
    whole = Batch(batch, batch_dim, batch_size, pair)
    if whole.size == 0:
        raise PerSampleError("The batch has no samples.")
    count = whole.few(samples)
    options = {
        "batch_dim": batch_dim,
        "batch_size": None if batch_size is None else count,
        "loss_reduction": loss_reduction,
    }
    with untouched(model, loss_fn), torch.inference_mode(False), torch.enable_grad():
        return _Check(_running(model, loss_fn, whole, options, count), model, count, loss_reduction, tolerance).run()


def _running(model: nn.Module, loss_fn: Callable[..., Any], batch: Batch, options: Any, count: int) -> Subject:
    """The model in float64 if that runs, else as it is."""
    try:
        subject = Subject(model, loss_fn, batch, options, double=True)
        subject.gradient(0, count)
    except Exception:
        subject = Subject(model, loss_fn, batch, options, double=False)
        subject.gradient(0, count)
    return subject


@dataclass(frozen=True)
class _Recording:
    """What came of a recorded run."""

    grads: PerSampleGradients | None = None
    rules: Mapping[str, list[str]] = field(default_factory=dict)
    refusal: PerSampleError | None = None


class _Check:
    def __init__(self, subject: Subject, model: nn.Module, count: int, reduction: str, tolerance: float | None) -> None:
        self.subject = subject
        self.own = dict(model.named_parameters())
        self.count = count
        self.reduction = reduction
        self.notes: list[str] = []
        self.dtype = subject.narrowest(count)
        self.tolerance = TOLERANCES.get(self.dtype, COARSE) if tolerance is None else tolerance

    def run(self) -> Report:
        """Runs the batch, a loop and a recording, and compares them."""
        plain = self.subject.gradient(0, self.count)
        if not self.subject.reached:
            raise PerSampleError(
                "The loss depends on no parameter of the model that loss_fn was given: it has to call that one, which "
                "is a copy, and not another that it knows."
            )
        recording, wrong = None, set[str]()
        random = self.subject.is_random(self.count)
        if random:
            recording = self._record()
            wrong = self._wrong_in_sum(recording, plain)
            random = not self.subject.turn_off_dropout(self.count)
            self._note_randomness(random, recording, wrong)
            plain = plain if random else self.subject.gradient(0, self.count)
        loop = None if random else self._loop()
        if recording is None or (recording.grads is not None and not random):
            recording = self._record()
        coupled = None if loop is None or self.count == 1 else self._coupling(loop, plain, recording)
        if recording.grads is None:
            found = [ParameterReport(name, tuple(p.shape), "refused") for name, p in self.subject.parameters.items()]
        else:
            errors = {} if loop is None else self._errors(recording.grads, loop)
            wrong |= self._wrong_in_sum(recording, plain) if loop is None else self._off(errors)
            verdicts = {name: self._verdict(name, wrong, loop, plain) for name in errors or plain}
            found = [
                self._parameter(name, recording.grads._arrived.get(name), rules, verdicts[name], errors.get(name))
                for name, rules in recording.rules.items()
            ]
        self._remark(found, coupled)
        return Report(
            found, self.count, self.subject.batch.size, self._computed_in(), self.tolerance, recording.refusal, coupled,
            self.notes,
        )  # fmt: skip

    # ---- runs ----

    def _record(self) -> _Recording:
        try:
            return _Recording(*self.subject.recorded(self.count))
        except PerSampleError as error:
            return _Recording(refusal=error)
        except RuntimeError as error:  # of inputs that do not agree, and of torch itself
            return _Recording(refusal=_as_refusal(error, str(error)))
        except Exception as error:
            self.notes.append("The model runs by itself, so this should not have happened: please report it.")
            return _Recording(refusal=_as_refusal(error, f"{type(error).__name__}: {error}"))

    def _loop(self) -> Gradient | None:
        """The gradient of each sample alone, by plain autograd: a row for each."""
        try:
            rows = [self.subject.gradient(n, n + 1) for n in range(self.count)]
        except Exception as error:
            self.notes.append(
                f"The model does not run on a sample alone ({type(error).__name__}: {error}), so there is no loop to "
                "compare with, but only the gradient of the batch."
            )
            return None
        return {name: torch.stack([row[name] for row in rows]) for name in self.subject.parameters}

    # ---- comparisons ----

    def _parameter(
        self, name: str, term: Term | None, rules: list[str], verdict: Verdict, error: float | None
    ) -> ParameterReport:
        own = self.own[name]
        if term is None and verdict != "WRONG":
            return ParameterReport(name, tuple(own.shape), "unused")
        kind, way = (kind_of(term), way_of(term)) if term else ("", "")
        dense_bytes = self.subject.batch.size * own.numel() * own.element_size()
        return ParameterReport(
            name, tuple(own.shape), verdict, rules, kind, way, self._kept_bytes(term, own), dense_bytes, error
        )

    def _verdict(self, name: str, wrong: set[str], loop: Gradient | None, plain: Gradient) -> Verdict:
        if name in wrong:
            return "WRONG"
        if not (plain if loop is None else loop)[name].isfinite().all():
            return "not finite"
        return "adds up" if loop is None else "right"

    def _kept_bytes(self, term: Term | None, own: Tensor) -> int:
        """What the term takes for the whole batch in the parameter's own type."""
        kept = find_factors(term) if term else ()
        sizes = [t.numel() * (own if t.is_floating_point() or t.is_complex() else t).element_size() for t in kept]
        return sum(sizes) * self.subject.batch.size // self.count

    def _off(self, errors: Mapping[str, float]) -> set[str]:
        return {name for name, error in errors.items() if not error <= self.tolerance}

    def _errors(self, grads: PerSampleGradients, loop: Gradient) -> dict[str, float]:
        """By how much each parameter's rows are off the loop's, relative to a row's scale."""
        scales = _scales(loop)
        return {name: _error(grads.dense([name])[name], own, scales[name]) for name, own in loop.items()}

    def _errors_of_sum(self, rows: Gradient, plain: Gradient, reduction: str) -> dict[str, float]:
        """By how much the rows put together are off the batch's gradient, relative to the rows' scale."""
        parts = self.count if reduction == "mean" else 1
        scales = _scales(rows)
        return {
            name: _error(
                own.sum(0, keepdim=True) / parts,
                plain[name].unsqueeze(0),
                torch.maximum(scales[name].amax(0) / parts, _largest_finite(plain[name].unsqueeze(0))),
            )
            for name, own in rows.items()
        }

    def _wrong_in_sum(self, recording: _Recording, plain: Gradient) -> set[str]:
        """The parameters whose recorded rows do not add up to the batch's gradient."""
        if recording.grads is None:
            return set()
        return self._off(self._errors_of_sum(recording.grads.dense(), plain, self.reduction))

    def _coupling(self, loop: Gradient, plain: Gradient, recording: _Recording) -> bool:
        """Whether the samples' gradients do not add up to the batch's, in the plain model; notes what that means."""
        errors = self._errors_of_sum(loop, plain, self.reduction)
        if not self._off(errors):
            if recording.refusal is not None:
                self.notes.append(
                    "In the plain model these samples do not influence each other: the batch's gradient is the "
                    f"{self.reduction} of theirs. Written with other functions of torch, it may be recorded."
                )
            return False
        other = "sum" if self.reduction == "mean" else "mean"
        if recording.refusal is not None or self._off(self._errors_of_sum(loop, plain, other)):
            worst = max(errors, key=lambda name: errors[name])
            self.notes.append(
                "The samples influence each other, or the loss is no mean or sum over them: in the plain model the "
                f"batch's gradient is not the {self.reduction} of its samples' gradients (off by {errors[worst]:.0e} "
                f"of the scale, at '{worst}')."
            )
        else:
            self.notes.append(
                f"The batch's gradient is the {other} of its samples' gradients, not the {self.reduction}: pass "
                f"loss_reduction='{other}'."
            )
        return True

    # ---- remarks ----

    def _computed_in(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"float64, in part in {name}" if self.subject.double and self.dtype != torch.float64 else name

    def _note_randomness(self, remains: bool, recording: _Recording, wrong: set[str]) -> None:
        if remains:
            self.notes.append(
                "The model draws random numbers, also with dropout turned off, so that a loop and a batch compute "
                "different things: the rows were added up and compared with the plain gradient from the same seed. "
                "Pass the noise with the batch to have them compared one by one."
            )
        elif recording.grads is not None:
            add_up = f"those of {_listed(wrong)} do NOT add up" if wrong else "they add up"
            self.notes.append(
                "The model draws random numbers, and a loop cannot draw those of a batch: the rows were compared with "
                f"dropout turned off. With it on, {add_up} to the plain gradient."
            )

    def _remark(self, parameters: Sequence[ParameterReport], coupled: bool | None) -> None:
        frozen = [name for name, p in self.own.items() if not p.requires_grad]
        if frozen:
            self.notes.append(f"Not recorded, as they do not require grad: {_listed(frozen)}.")
        if self.count == 1:
            self.notes.append("One sample shows nothing of how samples influence each other.")
        wrong = [p for p in parameters if p.verdict == "WRONG"]
        if wrong and not coupled:
            rules = {rule for p in wrong for rule in p.rules}
            self.notes.append(
                f"Please report wrong numbers, unless a rule of your own is among these: {_listed(rules)}."
            )


def kind_of(term: Term) -> str:
    """The structure of a term.

    >>> outer = Outer(torch.ones(2, 3, 4), torch.ones(2, 3, 5))
    >>> kind_of(Sum([Rows(torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3, 4), 5), outer]))
    'Rows + Outer'
    """
    inner = " + ".join(dict.fromkeys(map(kind_of, _inner(term))))
    if isinstance(term, Sum):
        return inner
    return f"{type(term).__name__}({inner})" if inner else type(term).__name__


def way_of(term: Term) -> str:
    """How the norms of a term are computed.

    >>> way_of(Outer(torch.ones(2, 1, 4), torch.ones(2, 1, 5))), way_of(Outer(torch.ones(2, 9, 4), torch.ones(2, 9, 5)))
    ('ghost', 'dense')
    """
    if inner := _inner(term):
        return " + ".join(dict.fromkeys(map(way_of, inner)))
    if isinstance(term, Outer):
        return "ghost" if term.positions == 1 else choose_norm_algorithm(term.positions, *term.shape)
    if isinstance(term, Patches):
        return term.choose_norm_algorithm()
    return "rows" if isinstance(term, Rows) else "dense"


def _inner(term: Term) -> list[Term]:
    """The terms that a term is made of."""
    held = [part for value in vars(term).values() for part in (value if isinstance(value, (list, tuple)) else [value])]
    return [part for part in held if isinstance(part, Term)]


def _error(got: Tensor, want: Tensor, scale: Tensor) -> float:
    """The largest difference of rows relative to their scales; what is no number in both is no difference."""
    same = (got == want) | (got.isnan() & want.isnan())
    difference = (got - want).abs().masked_fill(same, 0)
    return float((_largest(difference.nan_to_num(torch.inf, torch.inf)) / scale).max())


def _scales(rows: Gradient) -> dict[str, Tensor]:
    """The largest entry of each row, or what it is at least."""
    own = {name: _largest_finite(part) for name, part in rows.items()}
    tiny = torch.tensor(torch.finfo(torch.float64).tiny, dtype=torch.float64)
    least = LEAST_SCALE * torch.stack([*own.values(), tiny.expand_as(next(iter(own.values())))]).amax(0)
    return {name: torch.maximum(part, least) for name, part in own.items()}


def _largest_finite(rows: Tensor) -> Tensor:
    return _largest(rows.abs().nan_to_num(0, 0, 0))


def _largest(rows: Tensor) -> Tensor:
    """`(batch,)`: the largest entry of each row; zero where there are none."""
    matrix = rows.reshape(len(rows), rows[0].numel()).cpu().double()
    return matrix.amax(1) if matrix.numel() else matrix.new_zeros(len(matrix))


def _check_arguments(model: Any, samples: Any, loss_reduction: Any) -> None:
    if not isinstance(model, nn.Module):
        raise PerSampleError(f"check takes an nn.Module, got {described(model)}")
    if not isinstance(samples, int) or samples < 1:
        raise PerSampleError(f"samples must be a positive number, got {samples!r}")
    if loss_reduction not in ("mean", "sum"):
        raise PerSampleError(f"loss_reduction must be 'mean' or 'sum', got {loss_reduction!r}")
    for name, p in model.named_parameters():
        if torch.nn.parameter.is_lazy(p):
            raise PerSampleError(f"'{name}' has no shape yet: call the model once before it is checked.")
    if not any(p.requires_grad for p in model.parameters()):
        raise PerSampleError("The model has no parameter that requires grad.")


def _as_refusal(error: Exception, message: str) -> PerSampleError:
    refusal = PerSampleError(message)
    refusal.__cause__ = error
    return refusal


def _listed(names: Any, most: int = 5) -> str:
    names = sorted(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
