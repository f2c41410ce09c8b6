"""Drawn labels, cosines, steps of Adam, parts of models and evidence for exact scores, beside dense computations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample.scanning import ScanError, score, score_parts, score_with_evidence
from persample.scanning.evidence import Evidence
from persample.scanning.fisher import find_draw
from persample.scanning.passes import Passes, PassOptions
from tests.scanning.test_exact import DAMPING, MODELS, N, compute_moments, compute_rows, make, solve_dense

LOSS = nn.CrossEntropyLoss()


class Experts(nn.Module):
    """Two experts in one parameter, weighted by a gate, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.norm = nn.Linear(5, 2), nn.LayerNorm(5)
        self.experts = nn.Parameter(torch.randn(2, 5, 3))

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.einsum("bi,eio->beo", self.norm(x), self.experts)
        return (self.gate(x).softmax(-1)[:, :, None] * outputs).sum(1)


@pytest.fixture(autouse=True)
def _add_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "experts", (Experts, (5,)))


NAMES = [*MODELS, "experts"]


def find_pairs(name: str, method: str) -> tuple[Any, dict[str, tuple[Tensor, Tensor, Tensor]]]:
    """The model with its batches; by parameter the directions, the gradients of the queries and of the examples."""
    model, data, queries = make(name)
    rows, own = compute_rows(model, data), compute_rows(model, queries)
    moments = compute_moments(model, rows, data)
    used = {name: part for name, part in rows.items() if part.any()}
    return (model, data, queries), {
        name: (
            own[name] if method == "identity" else solve_dense(method, part, own[name], moments[name]),
            own[name],
            part,
        )
        for name, part in used.items()
    }


@pytest.mark.parametrize("method", ["ekfac", "kfac", "block", "diagonal", "identity"])
@pytest.mark.parametrize("name", NAMES)
def test_cosines_match_the_dense_computation(name: str, method: Any) -> None:
    (model, data, queries), pairs = find_pairs(name, method)
    found = score(model, LOSS, data, queries, method=method, damping=DAMPING, cosine=True, batch_size=8)
    moments = compute_moments(model, compute_rows(model, data), data)
    inner, squares, lengths = torch.zeros(4, N).double(), torch.zeros(N).double(), torch.zeros(4).double()
    for parameter, (solved, own, part) in pairs.items():
        inner += solved.flatten(1) @ part.flatten(1).T
        lengths += (solved * own).flatten(1).sum(1)
        full = part if method == "identity" else solve_dense(method, part, part, moments[parameter])
        squares += (full * part).flatten(1).sum(1)
    expected = inner / (squares.sqrt() * lengths.sqrt()[:, None])
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    assert float(found.abs().max()) <= 1.0001


@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_steps_of_adam_match_the_dense_computation(name: str, cosine: bool) -> None:
    """With cosines this is LESS: the query's gradient beside the example's step, both at length 1."""
    model, data, queries = make(name)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(data[0]), data[1]).backward()
        optimizer.step()
    names = [n for n, p in model.named_parameters() if p.grad is not None]
    rows, own = compute_rows(model, data), compute_rows(model, queries)
    flat = {"rows": [], "own": []}
    for parameter, p in model.named_parameters():
        if parameter in names:
            state = optimizer.state[p]
            sizes = 1 / ((state["exp_avg_sq"] / (1 - 0.999**3)).sqrt() + 1e-8)
            flat["rows"].append((rows[parameter] * sizes).flatten(1))
            flat["own"].append(own[parameter].flatten(1))
    steps, directions = (torch.cat(flat[key], 1) for key in ("rows", "own"))
    expected = directions @ steps.T
    if cosine:
        expected = F.normalize(directions) @ F.normalize(steps).T
    found = score(model, LOSS, data, queries, adam=optimizer, cosine=cosine, parameters=names)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_states_of_adam_are_of_the_checkpoints() -> None:
    model, data, queries = make("linear")
    states = [{name: scale * p for name, p in model.state_dict().items()} for scale in (0.5, 1.0)]
    moments = [{name: (k + 1) * p.detach().square() for name, p in model.named_parameters()} for k in range(2)]
    alone = [score(model, LOSS, data, queries, checkpoints=[states[k]], adam=moments[k]) for k in range(2)]
    found = score(model, LOSS, data, queries, checkpoints=states, adam=moments)
    torch.testing.assert_close(found, (alone[0] + alone[1]) / 2)
    with pytest.raises(ScanError, match="1 states of Adam for 2 checkpoints"):
        score(model, LOSS, data, queries, checkpoints=states, adam=moments[:1])


def test_second_moments_of_data_and_queries_are_mixed() -> None:
    model, data, queries = make("linear")
    found = score(model, LOSS, data, queries, method="block", damping=DAMPING, query_share=0.25)
    rows, own = compute_rows(model, data), compute_rows(model, queries)
    expected = torch.zeros(4, N).double()
    for name, part in rows.items():
        one, other = part.flatten(1), own[name].flatten(1)
        moment = 0.75 * one.T @ one / len(one) + 0.25 * other.T @ other / len(other)
        damped = moment + DAMPING * moment.trace() / len(moment) * torch.eye(len(moment))
        expected += torch.linalg.solve(damped, other.T).T @ one.T
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


# ---- drawn labels ----


def test_the_second_moment_of_drawn_labels_is_the_fisher_matrix() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 3, bias=False).double(), torch.randn(6000, 3).double()
    data = (x, torch.zeros(6000).long())
    passes = Passes(model, LOSS, data, PassOptions(fisher="sampled", batch_size=256))
    with passes.load_each() as loaded:
        next(loaded)
        found = passes.fit("block")["weight"]
    p = model(x).softmax(1).detach()
    inner = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    fisher = torch.einsum("nab,ni,nj->aibj", inner, x, x).reshape(9, 9) / len(x)
    moment = (found._vectors.T * found._eigenvalues) @ found._vectors  # type: ignore[attr-defined]
    assert float((moment - fisher).norm() / fisher.norm()) < 0.06


def test_the_second_moment_of_drawn_numbers_is_the_gauss_newton_matrix() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2, bias=False).double(), torch.randn(6000, 3).double()
    passes = Passes(model, nn.MSELoss(), (x, torch.zeros(6000, 2).double()), PassOptions(fisher="sampled"))
    with passes.load_each() as loaded:
        next(loaded)
        found = passes.fit("block")["weight"]
    newton = torch.kron(torch.eye(2).double(), x.T @ x / len(x))  # of the mean of two squares, for each sample
    moment = (found._vectors.T * found._eigenvalues) @ found._vectors  # type: ignore[attr-defined]
    assert float((moment - newton).norm() / newton.norm()) < 0.06


def test_a_function_draws_labels_itself() -> None:
    model, data, queries = make("linear")
    other = (data[0], (data[1] + 1) % 3)
    fixed = dict(zip(data[0][:, 0].tolist(), other[1].tolist(), strict=True))

    def compute_losses(model: nn.Module, batch: Any) -> Tensor:
        labels = torch.tensor([fixed[float(x)] for x in batch[0][:, 0].detach()])
        return F.cross_entropy(model(batch[0]), labels, reduction="none")

    found = score(model, LOSS, data, queries, fisher=compute_losses, method="block", damping=DAMPING)
    rows, own, fitted = compute_rows(model, data), compute_rows(model, queries), compute_rows(model, other)
    expected = torch.zeros(4, N).double()
    for name, part in rows.items():
        expected += solve_dense("block", fitted[name], own[name], None).flatten(1) @ part.flatten(1).T
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("loss_fn", "outputs", "targets"),
    [
        (nn.CrossEntropyLoss(ignore_index=7), torch.tensor([[0.0, 90.0]] * 3), torch.tensor([0, 7, 1])),
        (F.nll_loss, torch.tensor([[-90.0, 0.0]] * 3), torch.tensor([0, -100, 1])),
        (nn.BCEWithLogitsLoss(), torch.tensor([[-90.0, 90.0]]), torch.tensor([[1.0, 0.0]])),
        (nn.BCELoss(), torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])),
    ],
)
def test_labels_are_drawn_from_the_outputs(loss_fn: Any, outputs: Tensor, targets: Tensor) -> None:
    drawn = find_draw(loss_fn)(outputs, targets)
    expected = torch.tensor([[0.0, 1.0]]) if targets.dim() == 2 else torch.where(targets > 1, targets, 1)
    expected = torch.where(targets < 0, targets, expected) if targets.dim() == 1 else expected
    assert torch.equal(drawn, expected) and drawn.dtype == targets.dtype


def test_language_models_draw_tokens() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(6, 4), nn.Linear(4, 6)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.out(torch.tanh(self.words(tokens))).mT

    torch.manual_seed(0)
    tokens = torch.randint(6, (12, 5))
    data = (tokens[:, :-1], tokens[:, 1:])
    scores = [score(Model(), LOSS, data, data, fisher=kind) for kind in ("sampled", "data")]
    assert scores[0].shape == (12, 12) and bool(scores[0].isfinite().all())
    with pytest.raises(ScanError, match="not for L1Loss"):
        score(
            nn.Linear(2, 1),
            nn.L1Loss(),
            (torch.ones(3, 2), torch.ones(3, 1)),
            (torch.ones(3, 2), torch.ones(3, 1)),
            fisher="sampled",
        )


# ---- parts ----


def test_parts_add_up_and_match_the_dense_computation() -> None:
    (model, data, queries), pairs = find_pairs("experts", "ekfac")
    groups: Any = {
        "expert 0": [("experts", 0)],
        "expert 1": [("experts", 1)],
        "gate": ["gate.weight", "gate.bias"],
        "scale": [("norm.weight", slice(None)), ("norm.bias", (slice(2, None),))],
        "rest": [("norm.bias", [0, 1])],
    }
    found = score_parts(model, LOSS, data, queries, groups, damping=DAMPING, batch_size=8)
    solved, _, rows = pairs["experts"]
    for k in range(2):
        expected = solved[:, k].flatten(1) @ rows[:, k].flatten(1).T
        torch.testing.assert_close(found[f"expert {k}"].double(), expected, rtol=1e-4, atol=1e-5)
    whole = score(model, LOSS, data, queries, damping=DAMPING)
    torch.testing.assert_close(torch.stack(list(found.values())).sum(0), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({}, "groups is empty"),
        ({"a": "0.weight"}, "must be a list"),
        ({"a": ["1.weight"]}, "not a parameter"),
        ({"a": [("0.weight", 99)]}, "no index"),
    ],
)
def test_wrong_groups(groups: Any, message: str) -> None:
    model, data, queries = make("linear")
    with pytest.raises(ScanError, match=message):
        score_parts(model, LOSS, data, queries, groups)


# ---- evidence ----


@pytest.mark.parametrize("options", [{}, {"method": "kfac", "cosine": True}, {"rather_than": True}])
@pytest.mark.parametrize("name", NAMES)
def test_evidence_of_right_scores(name: str, options: Any) -> None:
    model, data, queries = make(name)
    states = [{key: scale * p for key, p in model.state_dict().items()} for scale in (0.8, 1.0)]
    if "rather_than" in options:
        options = {"rather_than": (queries[0], (queries[1] + 1) % 3)}
    found = score_with_evidence(model, LOSS, data, queries, checkpoints=states, **options)
    torch.testing.assert_close(found.scores, score(model, LOSS, data, queries, checkpoints=states, **options))
    assert found.agreement == pytest.approx(1, abs=1e-5) and found.errors is not None
    alone = [score(model, LOSS, data, queries, checkpoints=[state], **options) for state in states]
    torch.testing.assert_close(found.errors, (alone[0] - alone[1]).abs() / 2)
    used = sum(p.numel() for n, p in model.named_parameters() if n != "unused")
    assert found.coverage == pytest.approx(used / sum(p.numel() for p in model.parameters()))
    assert not found.find_faults() and found.rank(3).for_ids.shape == (4, 3)


def test_scores_that_differ_from_those_in_float64_are_not_ranked() -> None:
    """A model whose numbers are lost in bfloat16: differences of large numbers."""

    class Lossy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out((x + 1000) - 1000)

    torch.manual_seed(0)
    model, data = Lossy().bfloat16(), (torch.randn(40, 4).bfloat16(), torch.randint(3, (40,)))
    found = score_with_evidence(model, LOSS, data, data, method="identity", parameters=["out.weight"], verify=False)
    assert found.agreement is not None and not found.agreement > 0.9
    with pytest.raises(ScanError, match="float64"):
        found.rank(3)


def test_scores_of_checkpoints_that_do_not_agree_are_not_ranked() -> None:
    noise = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0))
    found = Evidence(noise.mean(0), None, torch.tensor([0.02, -0.04, 0.01]), 1.0, 1.0)
    with pytest.raises(ScanError, match=r"mean rank correlation of -0\.00"):
        found.rank(3)


def test_models_that_need_another_dtype_are_not_replayed() -> None:
    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x.float())

    data = (torch.randn(20, 4), torch.randint(3, (20,)))
    found = score_with_evidence(Strict(), LOSS, data, data)
    assert found.agreement is None and not found.find_faults()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"query_share": 1.0}, "query_share"),
        ({"adam": {}, "method": "ekfac"}, "takes the place"),
        ({"cosine": True, "rather_than": True}, "cosine is not defined"),
        ({"fisher": 3}, "fisher must be"),
    ],
)
def test_wrong_options(options: Any, message: str) -> None:
    model, data, queries = make("linear")
    with pytest.raises(ScanError, match=message):
        score(model, LOSS, data, queries, **options)
