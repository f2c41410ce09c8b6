"""Uses every public name as a user would; `mypy --strict` checks this file in `make lint`, and a test runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import persample
from persample import (
    CompiledStep,
    Dynamics,
    ExpandedWeight,
    ImportanceSampler,
    LossGradients,
    Monitor,
    PerSampleError,
    PerSampleGradients,
    SamplesMixed,
    Scan,
    StreamedClip,
    StreamedNorms,
    Values,
    Watch,
)
from persample.private import (
    AdamBC,
    AdaptiveOptimizer,
    AuditResult,
    AuditRun,
    BandedInverse,
    BandedInverseRoot,
    BandedMatrix,
    BatchMemoryManager,
    Cancelling,
    DirectTest,
    PrivacyEngine,
    PrivacyPlan,
    PrivacyStatement,
    PrivateOptimizer,
    Step,
    Strategy,
    audit,
    read_statement,
)
from persample.terms import Dense, Term

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
x, y = torch.randn(12, 4), torch.randint(3, (12,))


def use_recordings() -> None:
    with persample.record(model) as grads:
        F.cross_entropy(model(x), y).backward()
    everything: PerSampleGradients = grads
    row: dict[str, Tensor] = everything[3]
    norms: Tensor = everything.norms()
    parts: dict[str, Tensor] = everything.norms(per_parameter=True)
    names: list[str] = everything.names
    assert len(everything) == len(norms) == 12 and row.keys() == parts.keys() == set(names)
    sums: list[dict[str, Tensor]] = [everything.sum(), everything.mean(), everything.clip(1.0), everything.variance()]
    tensors: list[Tensor] = [
        everything.gram(),
        everything.project(4),
        everything.dot(sums[1]),
        everything.noise_scale(),
    ]
    assert everything.second_moment().keys() == everything.dense().keys() and len(tensors) == 4

    with persample.record(model, keep="norms") as kept_norms:
        F.cross_entropy(model(x), y).backward()
    with persample.record(model, keep="clip", max_norm=1.0) as kept_clip:
        F.cross_entropy(model(x), y).backward()
    streamed: tuple[StreamedNorms, StreamedClip] = (kept_norms, kept_clip)
    torch.testing.assert_close(streamed[0].norms(), norms)
    torch.testing.assert_close(streamed[1].clip(), sums[2])
    persample.release_memory()


def use_curvature() -> None:
    with persample.record(model) as grads:
        logits = model(x)
        F.cross_entropy(logits, persample.sample_labels(logits)).backward()
    diagonal: dict[str, Tensor] = grads.fisher_diagonal()
    assert diagonal.keys() == grads.second_moment().keys()
    assert callable(persample.differentiable_norms)
    entries: PerSampleGradients = persample.rows(model(x).sum(1), model, retain_graph=False)
    assert len(entries) == 12


def use_losses() -> None:
    with persample.record(model, losses=["small", "flat"]) as grads:
        out = model(x)
        out.square().mean().backward(retain_graph=True)
        out.abs().mean().backward()
    both: LossGradients = grads
    one: PerSampleGradients = both["small"]
    assert one.norms().shape == (12,)


def use_watch() -> None:
    found: list[Tensor] = []

    def receive(grads: StreamedNorms) -> None:
        found.append(grads.norms())

    watched: Watch = persample.watch(model, receive, keep="norms", loss_reduction="mean")
    F.cross_entropy(model(x), y).backward()
    watched.stop()
    assert found[0].shape == (12,)


def use_monitor() -> None:
    watching: Monitor = persample.monitor(model, every=1, bounds=[1.0])
    sampler = ImportanceSampler(12)
    for ids in torch.tensor(list(sampler)).split(4):
        watching.ids = ids
        (sampler.weights(ids) * F.cross_entropy(model(x[ids]), y[ids], reduction="none")).mean().backward()
    watching.stop()
    assert watching.latest is not None and watching.advise().bounds


def use_dynamics() -> None:
    found: Dynamics = persample.dynamics(model)
    found.ids = range(12)
    logits = model(x)
    found.note(logits, y)
    F.cross_entropy(logits, y).backward()
    found.stop()
    assert "margin" not in found.columns()


def use_value() -> None:
    found: Values = persample.value(model, validation=lambda model: F.cross_entropy(model(x), y))
    F.cross_entropy(model(x), y).backward()
    found.stop()
    assert found.latest is not None


def use_strategies() -> None:
    found: list[Strategy] = [
        BandedInverse(8, 2, bands=2),
        BandedInverseRoot(8, 2, bands=2),
        BandedMatrix(8, 2, bands=2),
        Cancelling(8, 2, share=0.5),
    ]
    assert all(strategy.participations == 4 for strategy in found)


def use_errors() -> None:
    try:
        with persample.record(model):
            (model(x) - model(x).mean(0)).sum().backward()
    except SamplesMixed as error:
        wrong: PerSampleError = error
        assert "mean" in str(wrong)


def use_expanded_weights() -> None:
    F.cross_entropy(persample.call_for_per_sample_grads(model, loss_reduction="mean")(x), y).backward()
    for p in model.parameters():
        del p.grad_sample  # type: ignore[attr-defined]  # torch's Parameter does not declare it
    w = torch.randn(3, 4, requires_grad=True)
    F.linear(x, ExpandedWeight(w, len(x), "sum")).sum().backward()
    assert callable(persample.implements_per_sample_grads)


def use_rules() -> None:
    def shift(input: Tensor, weight: Tensor) -> Tensor:
        return input + weight

    @persample.register_rule(shift)
    def compute_shift_terms(grad: Tensor, input: Tensor, weight: Tensor) -> dict[str, Term]:
        return {"weight": Dense(grad.flatten(1, -2).sum(1))}

    assert callable(compute_shift_terms)


def use_checks() -> None:
    report = persample.check(model, (x, y), nn.CrossEntropyLoss())
    assert report.ok
    step: CompiledStep = persample.compile(
        model, lambda m, a, b: F.cross_entropy(m(a), b), lambda grads: grads.norms(), backend="eager"
    )
    assert callable(step)


def use_scan(directory: Path) -> None:
    found: Scan = persample.scan(model, nn.CrossEntropyLoss(), (x, y), out=directory, project=8)
    assert found.column("loss").shape == (12,)
    assert len(found.neighbours(3, k=2).ids) == 2
    assert callable(persample.evaluate)


def use_replay() -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = nn.CrossEntropyLoss()
    replayed = persample.replay(model, loss_fn, (x, y), (x[:2], y[:2]), optimizer=optimizer, batches=[[0, 1], [2, 3]])
    scores: Tensor = replayed.scores
    assert scores.shape == (2, 12)


def use_private() -> None:
    private = nn.Linear(4, 3)
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(TensorDataset(x, y), batch_size=4)
    engine = PrivacyEngine()
    _, optimizer, loader = engine.make_private(
        module=private,
        optimizer=torch.optim.SGD(private.parameters(), lr=0.1),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    assert isinstance(optimizer, PrivateOptimizer) and not isinstance(optimizer, AdaptiveOptimizer)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer) as parts:
        for inputs, targets in parts:
            optimizer.zero_grad()
            F.cross_entropy(private(inputs), targets).backward()
            optimizer.step()
    epsilon: float = engine.get_epsilon(delta=1e-3)
    assert epsilon > 0
    step = Step(private, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"), optimizer)
    for batch in loader:
        losses: Tensor = step(batch)
        assert losses.dim() == 1
    optimizer.release()


def use_plan() -> None:
    strategies = [BandedInverse(9, 3, 2), BandedInverseRoot(9, 3, 2), BandedMatrix(9, 3, 2), Cancelling(9, 3, 0.5)]
    for strategy in strategies:
        plan = PrivacyPlan.for_epsilon(
            5.0, 1e-3, steps=9, sample_rate=1 / 3, expected_batch_size=4, accountant="rdp", strategy=strategy
        )
        private = nn.Linear(4, 3)
        training = plan.make_private(private, AdamBC(private.parameters()), TensorDataset(x, y))
        step = Step(
            private, lambda m, batch: F.cross_entropy(m(batch[0]), batch[1], reduction="none"), training.optimizer
        )
        for batch in training.loader:
            step(batch)
        assert training.engine.get_epsilon(1e-3) <= plan.epsilon <= 5.0


def use_audit() -> None:
    def train(run: AuditRun) -> PrivacyEngine:
        audited, engine = nn.Linear(4, 3), PrivacyEngine()
        loader: DataLoader[tuple[Tensor, ...]] = DataLoader(run.add_canaries(TensorDataset(x, y)), batch_size=4)
        _, optimizer, loader = engine.make_private(
            module=audited,
            optimizer=torch.optim.SGD(audited.parameters(), lr=0.1),
            data_loader=loader,
            noise_multiplier=2.0,
            max_grad_norm=1.0,
        )
        run.observe(optimizer, sample_rate=1 / len(loader))
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(audited(inputs), targets).backward()
            optimizer.step()
        return engine

    result: AuditResult = audit(train, count=5, delta=1e-3)
    tests: Sequence[DirectTest] = result.tests
    assert tests and not result.exceeds
    read: Callable[[str], PrivacyStatement] = read_statement
    assert callable(read)
