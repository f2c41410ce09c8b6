"""A fuzzer of sequences of steps: small models that change between two steps, against a loop over the samples.

    python -m tests.fuzz_steps --minutes 60 --seed 0

A case is a model, made of code fragments, and some steps. Before a step, statements change the model or what the call
is like. Each step is recorded, and must give the rows that plain autograd gives for the losses of the samples, leave
the same state behind as a plain step, or be refused. If a change of one sample changes another sample's loss or row by
plain autograd, the step must be refused. A failing case is made as short as possible and printed as a script.
"""

from __future__ import annotations

import argparse
import copy
import random
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from persample import PerSampleError, record
from tests.fuzz_fragments import EVERYWHERE, FRAGMENTS, HEADER, NEEDED, D

KINDS = ("tensor", "keyword", "list", "dict", "tuple", "flag")
LOSSES = ("sum", "mean", "classes", "first")
KEEP = ("everything", "everything", "everything", "norms", "clip")
CONTEXTS = ("", "", "", "", "", "", "", "autocast", "no type promotion")

Rows = dict[str, Tensor]


class Wrong(Exception):
    """A step gave something else than the loop; the first word of the message says what."""


# ---- one step ----


@dataclass(frozen=True)
class Step:
    """One call of the model, and a backward pass.

    Attributes:
        changes: statements that change the model `m` before, each with the fragment that it belongs to.
    """

    changes: tuple[tuple[int, str], ...] = ()
    batch: int = 3
    length: int = 2
    kind: str = "tensor"
    loss: str = "sum"
    keep: str = "everything"
    context: str = ""
    seed: int = 0

    def make_input(self, model: nn.Module) -> Tensor:
        """A batch for the model, in its dtype."""
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(self.batch, self.length, D, generator=generator, dtype=torch.float64)
        return x.to(next(model.parameters()).dtype)

    def run(self, model: Any, x: Tensor) -> Tensor:
        """The losses of the samples, from the same random numbers in each run."""
        torch.manual_seed(self.seed)
        np.random.seed(self.seed % 2**32)  # a larger number is an error, as if the step were impossible
        with torch.autocast("cpu", torch.bfloat16) if self.context == "autocast" else nullcontext():
            out = self.call(model, x)
            if self.loss == "classes":
                targets = torch.arange(len(x)) % D
                return nn.functional.cross_entropy(out.mean(1), targets, reduction="none")
            if self.loss == "first":
                return out[:, 0].square().sum(1)
            return (out.square() * torch.linspace(0.5, 1.5, D, dtype=out.dtype) + out).flatten(1).sum(1)

    def call(self, model: Any, x: Tensor) -> Tensor:
        """Call the model with the batch in one of the forms that it takes."""
        calls: dict[str, Callable[[], Tensor]] = {
            "tensor": lambda: model(x),
            "keyword": lambda: model(x=x),
            "list": lambda: model([x]),
            "tuple": lambda: model((x, 2)),
            "dict": lambda: model({"x": x}),
            "flag": lambda: model(x, flag=True),
        }
        return calls[self.kind]()

    def reduce(self, losses: Tensor) -> Tensor:
        """The loss of the batch."""
        return losses.mean() if self.loss in ("mean", "classes") else losses.sum()


def copy_model(model: nn.Module) -> Any:
    """A copy of a model in which the tensors share memory that share it in the model."""
    memo: dict[int, Any] = {}
    for p in model.parameters():  # a parameter copies itself without what it shares
        memo[id(p)] = nn.Parameter(copy.deepcopy(p.data, memo), p.requires_grad)
    return copy.deepcopy(model, memo)


def get_trainable(model: nn.Module) -> Rows:
    """The parameters that require grad, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def compute_rows(step: Step, model: nn.Module, x: Tensor) -> tuple[Tensor, Rows]:
    """The losses, and the gradient of each, by plain autograd on a copy of the model."""
    model = copy_model(model)
    losses = step.run(model, x)
    trainable = get_trainable(model)
    rows = [
        torch.autograd.grad(each, [*trainable.values()], retain_graph=True, allow_unused=True) if each.requires_grad
        else [None] * len(trainable)
        for each in losses
    ]  # fmt: skip
    found = {
        name: torch.stack([torch.zeros_like(p) if row[i] is None else row[i].detach() for row in rows]).double()
        for i, (name, p) in enumerate(trainable.items())
    }
    return losses.detach().double(), found


def find_tolerance(step: Step, x: Tensor) -> float:
    """How much rounding may change a row, relative to the largest entry of its parameter's rows."""
    if step.context == "autocast" and x.dtype != torch.float64:
        return 0.1
    return 1e-7 if x.dtype == torch.float64 else 2e-3


def differ(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether two tensors differ by more than rounding."""
    if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
        return True
    a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
    scale = max(1e-3, float(a.abs().max()) if a.numel() else 0.0)
    return bool(((a - b).abs() > tolerance * scale).any())


def are_mixed(step: Step, model: nn.Module, x: Tensor, losses: Tensor, rows: Rows) -> bool:
    """Whether a change of one sample changes another sample's loss or row, by plain autograd."""
    for sample in {0, step.batch - 1} if step.batch > 1 else ():
        other = x.clone()
        other[sample] += torch.linspace(-2, 3, x[0].numel(), dtype=x.dtype).view_as(x[0])
        own, own_rows = compute_rows(step, model, other)
        kept = [n for n in range(step.batch) if n != sample]
        tolerance = find_tolerance(step, x)
        if differ(losses[kept], own[kept], tolerance):
            return True
        if any(differ(rows[name][kept], own_rows[name][kept], tolerance) for name in rows):
            return True
    return False


def check_step(model: nn.Module, step: Step) -> str:
    """Record a step and compare it with the loop; return what became of it: "right", "refused: ..." and so on."""
    x = step.make_input(model)
    try:
        losses, rows = compute_rows(step, model, x)
        plain = copy_model(model)
        given = x.clone()
        step.reduce(step.run(plain, given)).backward()
    except Exception as error:
        return f"impossible: {type(error).__name__}: {str(error)[:60]}"
    if len(losses) != step.batch:  # rows of an earlier batch were broadcast
        return "impossible: other losses than samples"
    if not losses.isfinite().all() or not all(r.isfinite().all() for r in rows.values()) or not rows:
        return "impossible: not finite, or nothing to train"
    after = read_state(plain), torch.get_rng_state(), np.random.get_state()[2]
    mixed = are_mixed(step, model, x, losses, rows)
    options: dict[str, Any] = {"keep": step.keep}
    if step.keep == "clip":
        options["max_norm"] = 1.0
    used = x.clone()
    try:
        with record(model, **options) as grads:
            step.reduce(step.run(model, used)).backward()
        answer = grads.dense() if step.keep == "everything" else grads.norms()
    except PerSampleError as error:
        words = re.sub(r"\d[\d.e-]*", "#", str(error))[:90]
        return f"refused, {'mixed' if mixed else 'separate'}: {words}"
    except Exception as error:
        raise Wrong(f"crash: {type(error).__name__}: {str(error)[:300]}") from error
    if mixed:
        if grads.verification.startswith("not verified"):
            return f"mixed, and said to be {grads.verification[:60]}"
        raise Wrong(f"mixed: the samples influence each other, and the step is {grads.verification!r}")
    compare_rows(answer, rows, find_tolerance(step, x))
    found = read_state(model), torch.get_rng_state(), np.random.get_state()[2]
    if found[2] != after[2] or not torch.equal(found[1], after[1]):
        raise Wrong("state: the random number generators are not as after a plain step")
    if not torch.equal(given, used):
        raise Wrong("state: the argument is not as after a plain step")
    for name in after[0].keys() | found[0].keys():
        if not is_same(after[0].get(name), found[0].get(name), find_tolerance(step, x)):
            raise Wrong(f"state: {name} is {found[0].get(name)}, but {after[0].get(name)} after a plain step")
    return "right"


def compare_rows(answer: Any, rows: Rows, tolerance: float) -> None:
    """Compare the rows of a recording, or their norms, with those of the loop."""
    if isinstance(answer, Tensor):
        squares = [r.reshape(len(r), -1).square().sum(1) for r in rows.values()]
        expected = torch.stack(squares).sum(0).sqrt()
        if differ(expected, answer.detach().double(), 10 * tolerance):
            raise Wrong(f"rows: norms {answer.tolist()} are not {expected.tolist()}")
        return
    if set(answer) - set(rows):
        raise Wrong(f"rows: of parameters that do not require grad: {set(answer) - set(rows)}")
    scale = max(float(r.abs().max()) for r in rows.values())
    for name, row in rows.items():
        own = answer[name].detach().double() if name in answer else torch.zeros_like(row)
        if own.shape != row.shape or float((own - row).abs().max()) > tolerance * max(1e-3, scale):
            difference = float((own - row).abs().max()) if own.shape == row.shape else tuple(own.shape)
            raise Wrong(f"rows: of {name} differ by {difference} of {float(row.abs().max())}")


# ---- the state of a model ----


def read_state(model: nn.Module) -> dict[str, Any]:
    """Everything in a model that a step may change, by name, as copies."""
    state: dict[str, Any] = {}
    for prefix, module in model.named_modules():
        members = {**module._parameters, **module._buffers, **vars(module)}
        for name, value in members.items():
            if name not in ("_parameters", "_buffers", "_modules"):
                state[f"{prefix}.{name}"] = describe(value)
    return state


def describe(value: Any) -> Any:
    """A value of an attribute, in a form that can be compared."""
    if isinstance(value, Tensor):
        return value.requires_grad, value.detach().clone()
    if isinstance(value, dict):
        return [*map(str, value)] if any(callable(v) for v in value.values()) else [*map(describe, value.values())]
    if isinstance(value, (list, tuple)):
        return [*map(describe, value)]
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__


def is_same(a: Any, b: Any, tolerance: float) -> bool:
    """Whether two descriptions agree."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and not differ(a.double(), b.double(), tolerance)
    if isinstance(a, (list, tuple)):
        return (
            type(a) is type(b)
            and len(a) == len(b)
            and all(is_same(*pair, tolerance) for pair in zip(a, b, strict=True))
        )
    return type(a) is type(b) and (a == b)


# ---- cases ----


@dataclass(frozen=True)
class Case:
    """A model, as its fragments with their numbers, and its steps."""

    fragments: tuple[tuple[int, str], ...]
    steps: tuple[Step, ...]
    seed: int = 0

    def write_model(self) -> str:
        """The source of the model."""
        init, forward = [], []
        for number, name in self.fragments:
            fragment = FRAGMENTS[name]
            init += [line.replace("_i", f"_{number}") for line in fragment.init]
            forward += [line.replace("_i", f"_{number}") for line in fragment.forward]
        needed = [text for name, text in NEEDED.items() if name in " ".join(forward)]
        lines = [
            *(HEADER, *needed),
            "class Model(nn.Module):",
            "    def __init__(s):",
            *(f"        {line}" for line in ("super().__init__()", *init)),
            "",
            "    def forward(s, x, flag=False):",
            "        h = x['x'] if isinstance(x, dict) else x if isinstance(x, torch.Tensor) else x[0]",
            *(f"        {line}" for line in (*forward, "return h", "")),
        ]
        return "\n".join(lines)

    def write_script(self, cause: str) -> str:
        """A script that runs the case."""
        lines = [self.write_model(), "", "from tests.fuzz_steps import Step, check_step", "", "try:"]
        lines += [f"    torch.manual_seed({self.seed})", "    m = Model().double()"]
        for step in self.steps:
            lines += [f"    {text}" for _, text in step.changes]
            given = replace(step, changes=())
            lines.append(f"    print(check_step(m, {given!r}))")
        lines += ["finally:", "    torch.set_default_dtype(torch.float32)"]
        return "\n".join([f'"""{cause}"""', "", *lines])

    def run(self) -> Iterator[str]:
        """Run the steps; yields what becomes of each.

        Raises:
            Wrong: a step is wrong.
        """
        space: dict[str, Any] = {}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(self.write_model(), space)
                torch.manual_seed(self.seed)
                space["m"] = space["Model"]().double()
                for step in self.steps:
                    for _, text in step.changes:
                        try:
                            exec(text, space)
                        except Exception:
                            yield f"impossible: change {text[:60]}"
                    yield check_step(space["m"], step)
        finally:
            torch.set_default_dtype(torch.float32)

    def find_failure(self) -> str | None:
        """What is wrong with the case, None if nothing is."""
        try:
            for _ in self.run():
                pass
        except Wrong as error:
            return str(error)
        return None

    def shrink(self) -> Case:
        """The case without what its failure does not need."""
        failure = (self.find_failure() or "").partition(":")[0]
        best, is_smaller = self, True
        while is_smaller:
            is_smaller = False
            for smaller in best.list_smaller():
                if (smaller.find_failure() or "").partition(":")[0] == failure:
                    best, is_smaller = smaller, True
                    break
        return best

    def list_smaller(self) -> Iterator[Case]:
        """The case without one of its parts."""
        for i in range(len(self.steps) - 1, -1, -1):
            if len(self.steps) > 1:
                kept = self.steps[i].changes
                steps = list(self.steps[:i] + self.steps[i + 1 :])
                yield replace(self, steps=tuple(steps))
                if kept and i < len(steps):
                    steps[i] = replace(steps[i], changes=kept + steps[i].changes)
                    yield replace(self, steps=tuple(steps))
        for number, _ in self.fragments[1:]:
            steps_without = tuple(
                replace(step, changes=tuple(change for change in step.changes if change[0] != number))
                for step in self.steps
            )
            yield replace(self, fragments=tuple(f for f in self.fragments if f[0] != number), steps=steps_without)
        for i, step in enumerate(self.steps):
            count = len(step.changes)
            simpler = [replace(step, changes=step.changes[:j] + step.changes[j + 1 :]) for j in range(count)]
            simpler += [
                replace(step, **{name: value})
                for name, value in {"kind": "tensor", "loss": "sum", "keep": "everything", "context": ""}.items()
                if getattr(step, name) != value
            ]
            for each in simpler:
                yield replace(self, steps=(*self.steps[:i], each, *self.steps[i + 1 :]))


def make_case(seed: int) -> Case:
    """A case by its seed."""
    choose = random.Random(seed)
    names = ["linear", *choose.choices(sorted(FRAGMENTS), k=choose.randint(1, 4))]
    fragments = tuple(enumerate(names))
    changes = [
        (number, text.replace("_i", f"_{number}")) for number, name in fragments for text in FRAGMENTS[name].changes
    ]
    step = Step(batch=choose.randint(2, 5), length=choose.randint(1, 4), keep=choose.choice(KEEP))
    steps = []
    for number in range(choose.randint(4, 10)):
        step = replace(step, changes=(), seed=seed * 100 + number, context=choose.choice(CONTEXTS))
        made = []
        if number and choose.random() < 0.6:
            made += choose.sample(changes, min(len(changes), choose.choice([1, 1, 2])))
        if number and choose.random() < 0.15:
            made.append((-1, choose.choice(EVERYWHERE)))
        if number and choose.random() < 0.4:
            sizes = {"batch": choose.choice([1, 2, 3, 4, 4, 5, 8]), "length": choose.randint(1, 5)}
            step = replace(step, **{name: value for name, value in sizes.items() if choose.random() < 0.6})
        if choose.random() < 0.15:
            step = replace(step, kind=choose.choice(KINDS))
        if choose.random() < 0.15:
            step = replace(step, loss=choose.choice(LOSSES))
        steps.append(replace(step, changes=tuple(made)))
    return Case(fragments, tuple(steps), seed)


# ---- many cases ----


@dataclass
class Report:
    """What became of the steps of some cases."""

    cases: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str, str]] = field(default_factory=list)  # seed, cause, script

    def run(self, seed: int, shrinks: bool = True) -> None:
        """Run the case of a seed."""
        case = make_case(seed)
        self.cases += 1
        try:
            for outcome in case.run():
                self.outcomes[outcome] += 1
        except Wrong as error:
            self.outcomes[f"WRONG {str(error).partition(':')[0]}"] += 1
            found = case.shrink() if shrinks else case
            self.failures.append((seed, str(error), found.write_script(found.find_failure() or str(error))))

    def __str__(self) -> str:
        totals: Counter[str] = Counter()
        for outcome, count in self.outcomes.items():
            totals[outcome.partition(":")[0]] += count
        lines = [f"{self.cases} cases, {sum(totals.values())} steps"]
        lines += [f"{count:7} {name}" for name, count in totals.most_common()]
        return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="the first case")
    parser.add_argument("--cases", type=int, default=10**9)
    parser.add_argument("--causes", action="store_true", help="list what was refused, by cause")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report, end = Report(), time.monotonic() + 60 * options.minutes
    seed = options.seed
    while time.monotonic() < end and report.cases < options.cases:
        known = len(report.failures)
        report.run(seed)
        for number, cause, script in report.failures[known:]:
            print(f"---- case {number}: {cause}\n{script}\n", flush=True)
        seed += 1
    print(report)
    if options.causes:
        print(*(f"{count:7} {name}" for name, count in report.outcomes.most_common()), sep="\n")
    raise SystemExit(bool(report.failures))


if __name__ == "__main__":
    main()
