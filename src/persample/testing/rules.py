"""The battery for a rule: all answers of `record` against the loop oracle, for many forms of one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from persample._internal.functions import find_dropped
from persample._internal.precision import to_double
from persample.backward import asked_sources
from persample.errors import PerSampleError
from persample.gradients import compute_clip_factors, make_projection
from persample.recording import record
from persample.rules import Rule, get_rules
from persample.terms import Dense, SparseSketch, TensorSketch
from persample.testing.comparison import assert_answer
from persample.testing.oracle import Gradients, compute_test_loss, perturb, stack_gradients

SAMPLES = 3
STEPS = 4  # length of the sequences, different from the number of samples
PROJECTED = 8


def check_rule(function: Callable[..., Any], /, *, tolerance: float = 1e-6, **arguments: Any) -> list[str]:
    """Check the rule of a torch function: compare all answers of `record` with a loop over the samples in float64.

    The call `function(**arguments)` is an example. The tensors that the rule names in `batched` (by default `input`)
    must have at least 3 different samples in dimension 0. The other floating-point tensors are the weights; if some
    arguments require gradients, the weights are exactly these. The battery makes a module of the call and checks

    - batches of 0, 1 and 3 samples,
    - a sequence dimension after the batch dimension, before it (samples in dimension 1), and as long as the batch,
    - two calls with the same weights,
    - losses that are a sum and that are a mean over the samples,
    - arguments by keyword, and float32.

    A form that the function itself does not support, such as a sequence dimension, is left out. The first call, with 3
    samples, must use the rule; the others may use the generic rule where the rule does not accept them.

    Returns:
        The names of the forms that were checked.

    Raises:
        AssertionError: An answer is wrong or the rule fails. The message names the form, the answer and the difference.
        ValueError: The function has no rule for this call, or the arguments are no example of it.

    >>> import torch.nn.functional as F
    >>> check_rule(F.linear, weight=torch.randn(4, 3), bias=torch.randn(4), input=torch.randn(5, 3))[:3]
    ['3 samples', '1 sample', 'an empty batch']
    """
    example = _Example.make(function, arguments, tolerance)
    checked = []
    for form in example.list_forms():
        expected = form.compute_expected()
        if expected is None:
            continue
        try:
            form.check(expected)
        except Exception as error:
            kind = "" if isinstance(error, (AssertionError, PerSampleError)) else f"{type(error).__name__}: "
            raise AssertionError(f"The rule of {example.name} is wrong for {form.name}. {kind}{error}") from error
        checked.append(form.name)
    return checked


# ---- the call as a module ----


class _Call(nn.Module):
    """A call of the function as a module; its inputs are the batched arguments, for each of `calls` calls."""

    def __init__(self, example: _Example, calls: int, by_keyword: bool) -> None:
        super().__init__()
        self.function, self.order = example.function, example.order
        self.batched, self.constants = tuple(example.samples), example.constants
        self.calls, self.by_keyword = calls, by_keyword
        for name, weight in example.weights.items():
            self.register_parameter(name, nn.Parameter(weight.clone()))

    def forward(self, *inputs: Tensor) -> list[Any]:
        count = len(self.batched)
        return [self._call(inputs[i * count : (i + 1) * count]) for i in range(self.calls)]

    def _call(self, inputs: Sequence[Tensor]) -> Any:
        given = {**self.constants, **dict(self.named_parameters()), **dict(zip(self.batched, inputs, strict=True))}
        positional: list[Any] = []
        while not self.by_keyword and len(positional) < len(self.order) and self.order[len(positional)] in given:
            positional.append(given.pop(self.order[len(positional)]))
        return self.function(*positional, **given)


@dataclass(frozen=True)
class _Example:
    """The call that the user gave."""

    function: Callable[..., Any]
    name: str
    order: Sequence[str]  # of the arguments in the signature of the rule
    samples: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    constants: Mapping[str, Any]
    tolerance: float

    @classmethod
    def make(cls, function: Callable[..., Any], arguments: Mapping[str, Any], tolerance: float) -> _Example:
        name = getattr(function, "__name__", None) or str(function)
        rule = _find_rule(function, name, arguments)
        arguments = {key: to_double(v) if isinstance(v, Tensor) else v for key, v in arguments.items()}
        tensors = {key: value for key, value in arguments.items() if isinstance(value, Tensor)}
        weights = {key: value for key, value in tensors.items() if value.requires_grad}
        if not weights:
            weights = {key: v for key, v in tensors.items() if key not in rule.batched and _has_gradient(v)}
        samples = {key: v.detach() for key, v in tensors.items() if key in rule.batched and key not in weights}
        sizes = {len(value) if value.dim() else 0 for value in samples.values()}
        if len(sizes) != 1 or min(sizes) < SAMPLES:
            raise ValueError(
                f"The example of {name} needs the arguments {sorted(rule.batched)} with the same number of samples in "
                f"dimension 0, at least {SAMPLES}; got { ({k: tuple(v.shape) for k, v in samples.items()}) }."
            )
        if not weights:
            raise ValueError(f"The example of {name} has no weight: no floating-point tensor except {list(samples)}.")
        constants = {key: value for key, value in arguments.items() if key not in weights and key not in samples}
        weights = {key: value.detach() for key, value in weights.items()}
        return cls(function, name, rule.names, samples, weights, constants, tolerance)

    def list_forms(self) -> Iterator[_Form]:
        """All forms of the call, the simplest first."""
        first = _Form(self, f"{SAMPLES} samples", self._take(SAMPLES), must_use_rule=True)
        yield first
        yield replace(first, name="1 sample", inputs=self._take(1), must_use_rule=False)
        yield replace(first, name="an empty batch", inputs=self._take(0), must_use_rule=False)
        yield replace(first, name="a mean over the samples", reduction="mean")
        yield replace(first, name="two calls with the same weights", inputs=first.inputs + self._take(SAMPLES, shift=1))
        yield replace(first, name="arguments by keyword", by_keyword=True, must_use_rule=False)
        yield replace(first, name="float32", dtype=torch.float32)
        for steps in (STEPS, SAMPLES):
            ending = f"length {steps}" if steps != SAMPLES else f"length {steps}, which is the number of samples"
            sequences = tuple(torch.stack([t.roll(i, 0) for i in range(steps)], 1) for t in first.inputs)
            turned = tuple(t.transpose(0, 1).contiguous() for t in sequences)
            form = replace(first, inputs=sequences, must_use_rule=False)
            yield replace(form, name=f"sequences of {ending}")
            yield replace(form, name=f"samples in dimension 1 of sequences of {ending}", inputs=turned, batch_dim=1)
            yield replace(
                form,
                name=f"two calls, samples in dimension 1 of sequences of {ending}",
                inputs=turned + tuple(t.roll(1, 0) for t in turned),
                batch_dim=1,
            )

    def _take(self, count: int, shift: int = 0) -> tuple[Tensor, ...]:
        return tuple(t.roll(shift, 0)[:count] for t in self.samples.values())


@dataclass(frozen=True)
class _Form:
    """One form of the call, which is compared with the loop."""

    example: _Example
    name: str
    inputs: tuple[Tensor, ...]
    batch_dim: int = 0
    reduction: str = "sum"
    by_keyword: bool = False
    must_use_rule: bool = False
    dtype: torch.dtype = torch.float64

    @property
    def batch(self) -> int:
        return self.inputs[0].shape[self.batch_dim]

    @property
    def tolerance(self) -> float:
        return self.example.tolerance if self.dtype == torch.float64 else max(1e-3, self.example.tolerance)

    def make_module(self) -> _Call:
        module = _Call(self.example, len(self.inputs) // len(self.example.samples), self.by_keyword)
        perturb(module)
        return module

    def compute_expected(self) -> Gradients | None:
        """The per-sample gradients by a loop, in float64; None if the function does not support this form."""
        module = self.make_module()
        parameters = dict(module.named_parameters())
        samples = [tuple(t.narrow(self.batch_dim, n, 1) for t in self.inputs) for n in range(self.batch)]
        try:
            loss = compute_test_loss(module(*self.inputs), self.batch_dim)
            rows = stack_gradients((compute_test_loss(module(*s), self.batch_dim) for s in samples), parameters)
            plain = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        except Exception as error:
            self._reject(f"the call raises {type(error).__name__}: {error}")
            return None
        expected = {}
        for (name, p), total in zip(parameters.items(), plain, strict=True):
            zeros = p.detach().new_zeros(self.batch, *p.shape)
            expected[name] = rows.get(name, zeros)
            total = torch.zeros_like(p) if total is None else total
            if not torch.allclose(expected[name].sum(0), total, rtol=1e-6, atol=1e-8):
                self._reject("the result mixes samples, or does not have them in the dimension of the inputs")
                return None
        return expected

    def _reject(self, cause: str) -> None:
        """Refuse an example whose first form is not a function of separate samples."""
        if self.must_use_rule:
            raise ValueError(f"The example of {self.example.name} is not usable ({self.name}): {cause}.")

    def check(self, expected: Gradients) -> None:
        module, sources = self._make_typed_module(), dict[int, set[str]]()
        grads = self._record(module, sources=sources)
        if self.must_use_rule:
            _require_rule(module, sources)
        generator = torch.Generator().manual_seed(3)
        direction = {
            name: torch.randn(rows.shape[1:], generator=generator, dtype=rows.dtype).to(_like(rows, self.dtype))
            for name, rows in expected.items()
        }
        answers = _Answers({name: expected[name] for name in grads.names}, direction)
        for answer, actual, want in answers.compare(grads):
            assert_answer(answer, actual, want, self.tolerance)
        if not self.batch:
            return
        norms = self._record(module, keep="norms")
        assert_answer('norms() with keep="norms"', norms.norms(), answers.norms, self.tolerance)
        for passes in (1, 2):
            clipped = self._record(module, keep="clip", max_norm=answers.limit, passes=passes)
            total = _flatten_sums(clipped.clip())
            what = f'clip() with keep="clip" and passes={passes}'
            assert_answer(what, total, answers.clipped, max(self.tolerance, 1e-5))

    def _make_typed_module(self) -> _Call:
        module = self.make_module()
        for p in module.parameters():
            p.data = p.data.to(_like(p, self.dtype))
        return module

    def _record(self, module: _Call, sources: dict[int, set[str]] | None = None, **options: Any) -> Any:
        inputs = [t.to(_like(t, self.dtype)) if _has_gradient(t) else t for t in self.inputs]
        token = asked_sources.set(sources)
        try:
            with record(module, loss_reduction=self.reduction, batch_dim=self.batch_dim, **options) as grads:
                loss = compute_test_loss(module(*inputs), self.batch_dim)
                (loss / max(1, self.batch) if self.reduction == "mean" else loss).backward()
        finally:
            asked_sources.reset(token)
        return grads


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _like(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """`dtype`, or the complex dtype of its precision for a complex tensor."""
    return dtype.to_complex() if tensor.is_complex() else dtype


# ---- the rule that a call uses ----


class _Functions(TorchFunctionMode):
    """Notes the torch functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        self.called.append(func)
        return func(*args, **(kwargs or {}), **find_dropped(func))


def _find_rule(function: Callable[..., Any], name: str, arguments: Mapping[str, Any]) -> Rule:
    """The first rule of the called torch functions that takes these arguments."""
    with _Functions() as functions, torch.no_grad():
        function(**arguments)
    rules = [rule for func in functions.called for rule in get_rules(func)]
    if not rules:
        raise ValueError(
            f"{name} has no rule: register one with persample.register_rule first. The torch functions of this call "
            f"are {[getattr(func, '__name__', str(func)) for func in functions.called]}."
        )
    weights = {key for key, value in arguments.items() if isinstance(value, Tensor) and value.requires_grad}
    for rule in rules:
        if arguments.keys() <= rule.known and not weights & rule.batched and rule.when(**arguments):
            return rule
    raise ValueError(f"No rule of {name} holds for a call with the arguments {list(arguments)}.")


def _require_rule(module: nn.Module, sources: Mapping[int, set[str]]) -> None:
    for name, p in module.named_parameters():
        generic = [source for source in sources.get(id(p), ()) if source.startswith(("generic", "moves"))]
        if generic:
            raise AssertionError(
                f"The rule was not used for '{name}', but {generic[0]}: `accepts` or `when` declines the call."
            )


# ---- answers ----


class _Answers:
    """All answers of a recording, from the per-sample gradients by their definitions."""

    def __init__(self, rows: Gradients, direction: Mapping[str, Tensor]) -> None:
        self.rows, self.direction = rows, direction
        self.matrix = torch.cat([r.reshape(len(r), r.shape[1:].numel()) for r in rows.values()], 1)
        self.batch = len(self.matrix)
        self.norms = _norms(self.matrix)
        self.limit = float(self.norms.median()) or 1.0 if self.batch else 1.0
        self.factors = compute_clip_factors(self.norms, self.limit)
        self.clipped = self._sum(self.factors)
        self.is_complex = any(r.is_complex() for r in rows.values())

    def compare(self, grads: Any) -> Iterator[tuple[str, Any, Tensor]]:
        """The name, the value and the expected value of each answer."""
        dense = grads.dense()
        for name, rows in self.rows.items():
            yield f"dense()['{name}']", dense[name], rows
        yield "norms()", grads.norms(), self.norms
        for name, norms in grads.norms(per_parameter=True).items():
            yield f"norms(per_parameter=True)['{name}']", norms, _norms(self.rows[name].flatten(1))
        weights = torch.linspace(-1, 2, self.batch, dtype=torch.float64)
        yield "sum()", _flatten_sums(grads.sum()), self._sum(torch.ones(self.batch))
        yield "sum(weights)", _flatten_sums(grads.sum(weights)), self._sum(weights)
        yield "clip_factors()", grads.clip_factors(self.limit), self.factors
        yield "clip()", _flatten_sums(grads.clip(self.limit)), self.clipped
        for name, total in grads.clip(self.limit, per_parameter=True).items():
            rows = self.rows[name].flatten(1)
            factors = compute_clip_factors(_norms(rows), self.limit)
            yield f"clip(per_parameter=True)['{name}']", total.flatten(), factors.to(rows) @ rows
        products = (self.matrix.conj() @ self.matrix.mT).real
        yield "gram()", grads.gram(), products
        yield "gram(memory=64)", grads.gram(memory=64), products
        direction = torch.cat([to_double(d).flatten() for d in self.direction.values()])
        yield "dot(direction)", grads.dot(self.direction), (self.matrix.conj() @ direction).real
        if self.batch:
            yield from self._compare_moments(grads)
        if self.batch and not self.is_complex:
            yield from self._compare_projections(grads)

    def _sum(self, weights: Tensor) -> Tensor:
        return weights.to(self.matrix) @ self.matrix

    def _compare_moments(self, grads: Any) -> Iterator[tuple[str, Any, Tensor]]:
        mean, squares = self.matrix.mean(0), self.matrix.abs().square()
        yield "mean()", _flatten_sums(grads.mean()), mean
        yield "second_moment()", _flatten_sums(grads.second_moment()), squares.mean(0)
        if self.batch > 1:
            variance = (self.matrix - mean).abs().square().sum(0) / (self.batch - 1)
            yield "variance()", _flatten_sums(grads.variance()), variance

    def _compare_projections(self, grads: Any) -> Iterator[tuple[str, Any, Tensor]]:
        tensor, sparse = (torch.zeros(self.batch, PROJECTED, dtype=torch.float64) for _ in range(2))
        for name, rows in self.rows.items():
            sketch = TensorSketch(PROJECTED, 0, name, rows.shape[1:], torch.device("cpu"))
            tensor += Dense(rows).project(sketch)
            sparse += Dense(rows).project(SparseSketch(PROJECTED, 0, name))
        yield "project()", grads.project(PROJECTED), tensor
        shapes = tuple((name, rows.shape[1:]) for name, rows in self.rows.items())
        dense = {name: Dense(rows) for name, rows in self.rows.items() if rows.numel()}
        kronecker = make_projection("kronecker", PROJECTED, 0, shapes, torch.device("cpu")).project(dense, self.batch)
        yield 'project(method="kronecker")', grads.project(PROJECTED, method="kronecker"), kronecker
        yield 'project(method="sparse")', grads.project(PROJECTED, method="sparse"), sparse


def _norms(rows: Tensor) -> Tensor:
    return rows.abs().square().sum(1).sqrt()


def _flatten_sums(sums: Mapping[str, Tensor]) -> Tensor:
    """`{name: shape}` as one vector."""
    return torch.cat([total.flatten() for total in sums.values()])
