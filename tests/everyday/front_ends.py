"""How a loop is run through each front end, and what is compared."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

import persample
from persample import PerSampleError
from persample.testing import assert_rows_close
from tests.everyday.loop import Batch, Loop, Model
from tests.everyday.oracle import Expected, as_module, compute_expected, perturb, run_step

Case = tuple[Model, list[Batch]]


@contextmanager
def double_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build(loop: Loop) -> Case:
    torch.manual_seed(0)
    model = perturb(loop.make_model())
    return model, [loop.make_batch(size) for size in loop.sizes]


def iterate_steps(loop: Loop, case: Case) -> Iterator[tuple[int, Batch, Expected]]:
    """The steps of a training: the expected rows of each; afterwards, the weights change by the gradient."""
    model, batches = case
    for step, (size, batch) in enumerate(zip(loop.sizes, batches, strict=True)):
        expected = compute_expected(loop, model, batch, size, seed=step)
        torch.manual_seed(step)
        yield step, loop.prepare(batch), expected
        with torch.no_grad():
            for name, p in as_module(model).named_parameters():
                p.grad = None
                p -= 0.05 * expected.gradient[name] / max(1.0, float(expected.gradient[name].norm()))


def check_grads(loop: Loop, grads: Any, expected: Expected) -> None:
    """Compare what was recorded with the expected rows."""
    found = {name: rows for name, rows in grads.dense().items()}
    missing = {name for name in expected.rows if name not in found}
    assert all(not expected.rows[name].any() for name in missing), f"there are no rows of {missing}"
    wanted = {name: expected.rows[name] for name in found}
    assert grads.loss_reduction.split()[0] == expected.reduction, f"the loss is read as a {grads.loss_reduction}"
    assert_rows_close(found, wanted, loop.tolerance)
    if loop.own is not None:
        shared = grads.shared()
        for name, gradient in expected.gradient.items():
            apart = gradient - expected.combined[name]
            torch.testing.assert_close(shared.get(name, torch.zeros_like(apart)), apart)


def check_contributions(grads: Any, expected: Expected) -> None:
    rows = grads.dense()
    combine = torch.mean if grads.loss_reduction == "mean" else torch.sum
    for name, gradient in expected.gradient.items():
        torch.testing.assert_close(combine(rows[name], 0), gradient, msg=name)


def run_record(loop: Loop, case: Case, path: Path) -> None:
    for _, batch, expected in iterate_steps(loop, case):
        with persample.record(case[0], **loop.get_options(expected.size)) as grads:
            run_step(loop.step, case[0], batch)
        (check_contributions(grads, expected) if loop.contributions else check_grads(loop, grads, expected))
    if loop.count is not None:
        check_own_means(loop, case)


def check_own_means(loop: Loop, case: Case) -> None:
    """With `divisor="own"`, the rows are those of each sample alone."""
    (model, batches), size = case, loop.sizes[0]
    alone = [compute_expected(loop, model, loop.take(batches[0], n), 1, seed=0).rows for n in range(size)]
    with persample.record(model, divisor="own", **loop.get_options(size)) as grads:
        run_step(loop.step, model, batches[0])
    rows = grads.dense()
    assert_rows_close(rows, {name: torch.cat([row[name] for row in alone]) for name in rows}, loop.tolerance)


def run_watch(loop: Loop, case: Case, path: Path) -> None:
    received: list[Any] = []
    with persample.watch(case[0], received.append, **loop.options):
        for step, batch, expected in iterate_steps(loop, case):
            run_step(loop.step, case[0], batch)
            assert len(received) == step + 1, "the step was not received"
            check_grads(loop, received[-1], expected)


def run_monitor(loop: Loop, case: Case, path: Path) -> None:
    """The figures are those of the rows, and the gradients those of the plain loop."""
    messages = _Messages()
    with messages, persample.monitor(case[0], every=1, **loop.options) as watching:
        for step, batch, expected in iterate_steps(loop, case):
            run_step(loop.step, case[0], batch)
            for name, p in as_module(case[0]).named_parameters():
                plain = expected.gradient[name]
                torch.testing.assert_close(torch.zeros_like(p) if p.grad is None else p.grad.to_dense(), plain)
            if len(watching.history) != step + 1:
                raise PerSampleError(" ".join(messages.texts) or "The step was not measured.")
            found = watching.history[-1]
            assert found.samples == loop.sizes[step]
            if loop.contributions:
                continue
            assert found.norms["most"] == pytest.approx(float(expected.norms.max()), rel=1e-6)
            assert found.norms["least"] == pytest.approx(float(expected.norms.min()), rel=1e-6, abs=1e-9)


def run_scan(loop: Loop, case: Case, path: Path) -> None:
    """The rows of a scan are those of each sample alone, also where the divisor of a batch's loss counts."""
    model, batches = case
    options: Any = {"quantities": ("loss", "norm"), "progress": False, "batch_size": 2, "project": None}
    for number, (size, batch) in enumerate(zip(loop.sizes, batches, strict=True)):
        samples = [loop.take(batch, n) for n in range(size)]
        alone = [compute_expected(loop, model.eval(), sample, 1, seed=0) for sample in samples]
        reduction = {"loss_reduction": compute_expected(loop, model, batch, size, seed=0).reduction}
        found = persample.scan(
            model, loop.step, samples, out=path / str(number), collate=join_samples, **options, **reduction
        )
        norms = torch.cat([expected.norms for expected in alone])
        torch.testing.assert_close(
            torch.as_tensor(found.column("norm")), norms, rtol=max(1e-6, loop.tolerance), atol=1e-9
        )


def run_private(loop: Loop, case: Case, path: Path) -> None:
    """Without noise, a step of private training adds up the clipped rows."""
    from persample.private import PrivacyEngine

    model, batches = case
    size, batch = loop.sizes[0], batches[0]
    expected = compute_expected(loop, model, batch, size, seed=0)
    loader = DataLoader([loop.take(batch, n) for n in range(size)], batch_size=size, collate_fn=join_samples)
    bound, reduction = float(expected.norms.median()) / 2, expected.reduction or "mean"
    private: Any = PrivacyEngine().make_private(
        **{"module": model, "data_loader": loader, "optimizer": torch.optim.SGD(model.parameters(), lr=0.01)},
        **{"noise_multiplier": 0.0, "max_grad_norm": bound, "loss_reduction": reduction, "poisson_sampling": False},
    )
    model, optimizer, loader = private
    try:
        for same_batch in loader:
            torch.manual_seed(0)
            optimizer.zero_grad()
            run_step(loop.step, model, same_batch)
            optimizer.step()
        factors = (bound / expected.norms.clamp(min=1e-300)).clamp(max=1)
        for name, p in ((name, p) for name, p in model.named_parameters() if p.requires_grad):
            total = torch.einsum("b,b...->...", factors, expected.rows[name])
            torch.testing.assert_close(p.grad, total / size if reduction == "mean" else total, msg=name)
    finally:
        optimizer.release()


def run_rows(loop: Loop, case: Case, path: Path) -> None:
    """The slow door: the step returns the losses of the samples."""
    for _, batch, expected in iterate_steps(loop, case):
        losses = loop.step(case[0], batch)
        assert losses is not None
        assert_rows_close(persample.rows(losses, case[0]).dense(), expected.rows, loop.tolerance)


RUN: dict[str, Callable[[Loop, Case, Path], None]] = {
    "record": run_record,
    "watch": run_watch,
    "monitor": run_monitor,
    "scan": run_scan,
    "private": run_private,
    "rows": run_rows,
}


def check(loop: Loop, front_end: str, path: Path) -> None:
    """Run a loop through a front end: it is right, or refused for the declared reason."""
    with double_by_default():
        case = build(loop)
        reason = loop.get_refusal(front_end)
        if not reason:
            RUN[front_end](loop, case, path)
            return
        with pytest.raises(Exception) as caught:
            RUN[front_end](loop, case, path)
        assert isinstance(caught.value, (PerSampleError, ValueError)), caught.getrepr("short")
        assert re.search(reason, str(caught.value)), str(caught.value)


def join_samples(samples: list[Batch]) -> Batch:
    """The batch of some samples, each a batch of one."""
    return pytree.tree_map(lambda *parts: torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0], *samples)


class _Messages(logging.Handler):
    """What a monitor logs in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._logger = logging.getLogger("persample.monitoring")

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> _Messages:
        self._logger.addHandler(self)
        return self

    def __exit__(self, *error: Any) -> None:
        self._logger.removeHandler(self)
