"""Influence from whole gradients, compared with dense computations in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

import persample
from persample.gradients import find_sides
from persample.scanning import ScanError, preconditioners, score
from persample.scanning.preconditioners import PRECONDITIONERS, Preconditioner
from persample.terms import Dense, Outer, Term

N, DAMPING = 20, 0.3


class Reader(nn.Module):
    """Embeddings (some of them unused), a norm, positions that share a weight, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.mixed = nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 4)
        self.out, self.unused = nn.Linear(4, 3), nn.Parameter(torch.ones(2))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.words(tokens))
        return self.out(self.mixed(torch.tanh(self.mixed(hidden))).mean(1))


class GPT2(nn.Module):
    """A GPT-2 of Hugging Face: tied embeddings, attention, and layers whose weights are transposed."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"vocab_size": 9, "n_positions": 4, "n_embd": 8, "n_layer": 1, "n_head": 2}
        dropout = {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}
        self.gpt = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt(tokens).logits[:, -1]


def make_images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 4, 2, groups=2),
        nn.ConvTranspose2d(4, 3, 2), nn.Flatten(), nn.Linear(27, 3),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), (5,)),
    "images": (make_images, (2, 5, 5)),
    "text": (Reader, (6,)),
    "gpt2": (GPT2, (3,)),
}


def make(name: str) -> tuple[nn.Module, Any, Any]:
    make_model, shape = MODELS[name]
    torch.manual_seed(1)
    model = make_model().double()
    for p in model.parameters():
        p.data += 0.3 * torch.randn_like(p)
    inputs = torch.randint(8, (N + 4, *shape)) if name in ("text", "gpt2") else torch.randn(N + 4, *shape).double()
    labels = torch.randint(3, (N + 4,))
    return model, (inputs[:N], labels[:N]), (inputs[N:], labels[N:])


def compute_rows(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """The gradient of each sample, by a loop."""
    found: dict[str, list[Tensor]] = {}
    for x, y in zip(*batch, strict=True):
        grads = torch.autograd.grad(
            F.cross_entropy(model(x[None]), y[None]), list(model.parameters()), allow_unused=True
        )
        for (name, p), grad in zip(model.named_parameters(), grads, strict=True):
            found.setdefault(name, []).append(torch.zeros_like(p) if grad is None else grad)
    return {name: torch.stack(rows) for name, rows in found.items()}


def solve_dense(method: str, rows: Tensor, own: Tensor, moments: Any) -> Tensor:
    """Gradients `own` times the damped inverse of the approximate second moment of `rows`, as a dense matrix."""
    flat = rows.flatten(1)
    if method == "diagonal":
        moment = flat.square().mean(0).diag()
    elif method == "block":
        moment = flat.T @ flat / len(flat)
    else:
        left, right = moments
        vectors = torch.kron(torch.linalg.eigh(left)[1], torch.linalg.eigh(right)[1])
        if method == "ekfac":
            moment = vectors @ (flat @ vectors).square().mean(0).diag() @ vectors.T
        else:
            moment = torch.kron(left, right)
            moment = moment * (flat.square().sum(1).mean() / moment.trace())
    damped = moment + DAMPING * moment.trace() / len(moment) * torch.eye(len(moment))
    return torch.linalg.solve(damped, own.flatten(1).T).T.reshape(own.shape)


def compute_moments(model: nn.Module, rows: dict[str, Tensor], batch: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Second moments of both sides: of a layer's gradients and inputs by hooks, else of the gradients as matrices.

    So are those of a weight that is used twice, whose gradients are added up when they arrive.
    """
    found, inputs, grads = {}, {}, {}
    for name, part in rows.items():
        matrices = part.reshape(len(part), len(part[0]), -1)
        found[name] = (
            torch.einsum("nab,ncb->ac", matrices, matrices),
            torch.einsum("nab,nac->bc", matrices, matrices),
        )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            module.register_forward_hook(
                lambda _, args, out, name=name: (
                    inputs.setdefault(name, []).append(args[0]),
                    out.register_hook(lambda grad: grads.setdefault(name, []).append(grad)),
                )[0]
            )
    F.cross_entropy(model(batch[0]), batch[1], reduction="sum").backward()
    for name in inputs.keys() - {"mixed"}:
        a, g = (torch.cat([part.detach().flatten(0, -2) for part in parts[name]]) for parts in (inputs, grads))
        is_transposed = isinstance(model.get_submodule(name), Conv1D)
        found[f"{name}.weight"] = (a.T @ a, g.T @ g) if is_transposed else (g.T @ g, a.T @ a)
    return found


@pytest.mark.parametrize("method", PRECONDITIONERS)
@pytest.mark.parametrize("name", MODELS)
def test_scores_match_the_dense_computation(name: str, method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preconditioners, "BLOCK_SIZE", 64)
    model, data, queries = make(name)
    found = score(model, nn.CrossEntropyLoss(), data, queries, method=method, damping=DAMPING, batch_size=8)
    rows, own = compute_rows(model, data), compute_rows(model, queries)
    moments, expected = compute_moments(model, rows, data), torch.zeros(4, N, dtype=torch.float64)
    for parameter, part in rows.items():
        if part.any():
            direction = own[parameter]
            if method != "identity":
                direction = solve_dense(method, part, direction, moments[parameter])
            expected += direction.flatten(1) @ part.flatten(1).T
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def make_terms() -> dict[str, Term]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return {
        "vector": Dense(draw(7, 5)),
        "scalar": Dense(draw(7)),
        "matrix": Dense(draw(7, 4, 3)),
        "outer": Outer(draw(7, 2, 3), draw(7, 2, 4)),
    }


@pytest.mark.parametrize("kind", PRECONDITIONERS.values())
@pytest.mark.parametrize("name", make_terms())
def test_battery(name: str, kind: type[Preconditioner]) -> None:
    """Any preconditioner: linear, symmetric, positive; the same in parts; of the right scale; a multiple of the
    identity for a large damping."""
    term = make_terms()[name]
    whole, parts = kind(term.shape), kind(term.shape)
    for _ in range(kind.passes):
        whole.fit(term)
        parts.fit(term.some(0, 3))
        parts.add((), 0)
        parts.fit(term.some(3, 7))
        whole.end_pass()
        parts.end_pass()
    rows = term.dense()
    solved = whole.apply(term, DAMPING).values
    torch.testing.assert_close(parts.apply(term, DAMPING).values, solved)
    combined = whole.apply(Dense(2 * rows[:1] + rows[1:2]), DAMPING).values
    torch.testing.assert_close(combined, 2 * solved[:1] + solved[1:2])
    squares = whole.compute_squares(term, DAMPING)
    torch.testing.assert_close(squares, (solved * rows).reshape(7, -1).sum(1))
    gram = solved.reshape(7, -1) @ rows.reshape(7, -1).T
    torch.testing.assert_close(gram, gram.T)
    assert float(torch.linalg.eigvalsh(gram).min()) > -1e-9 * float(gram.trace())
    if kind.passes:
        mean = rows.square().mean()  # of the eigenvalues
        torch.testing.assert_close(whole.apply(term, 1e9).values, rows / (1e9 * mean), rtol=1e-6, atol=1e-15)


def test_blocks_of_low_rank_are_exact_for_moments_of_that_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preconditioners, "LARGEST_RANK", 7)
    term = make_terms()["matrix"]  # 7 gradients of 12 entries
    found, rows = preconditioners.Block(term.shape), term.dense().flatten(1)
    found.fit(term)
    found.end_pass()
    expected = solve_dense("block", rows, rows, None)
    torch.testing.assert_close(found.apply(term, DAMPING).values.flatten(1), expected)


def test_compressed_gradients() -> None:
    """Exact for matrices of the rank, close to the best approximation for others, unchanged if nothing is saved."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    low = Dense((draw(3, 9, 2) @ draw(3, 2, 8)).view(3, 9, 4, 2))
    found = preconditioners.compress(low, 2)
    assert isinstance(found, Outer)
    torch.testing.assert_close(found.dense().view(3, 9, 4, 2), low.values)
    full = draw(3, 9, 8)
    error = (preconditioners.compress(Dense(full), 3).dense() - full).square().sum((1, 2))
    best = torch.linalg.svdvals(full)[:, 3:].square().sum(1)
    assert bool((error < 1.2 * best).all())
    for kept in (Dense(draw(3, 9)), Dense(draw(3)), Dense(draw(3, 4, 4))):
        assert preconditioners.compress(kept, 2) is kept


def test_large_sides_are_not_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preconditioners, "LARGEST_SIDE", 3)
    term = make_terms()["outer"]  # 4 by 3
    found = preconditioners.EKFAC(term.shape)
    for _ in range(2):
        found.fit(term)
        found.end_pass()
    (inputs,) = [right for _, right in find_sides(term, 4, 3)]
    vectors = torch.kron(
        torch.eye(4).double(), torch.linalg.eigh(torch.einsum("nta,ntb->ab", inputs, inputs))[1].contiguous()
    )
    rows = term.dense().flatten(1)
    values = (rows @ vectors).square().mean(0)
    expected = rows @ vectors / (values + DAMPING * values.mean()) @ vectors.T
    torch.testing.assert_close(found.apply(term, DAMPING).values.flatten(1), expected)


def test_checkpoints_measures_and_parameters() -> None:
    model, data, queries = make("linear")
    loss_fn = nn.CrossEntropyLoss()
    states = [{name: scale * p for name, p in model.state_dict().items()} for scale in (0.5, 1.0)]
    alone = [score(model, loss_fn, data, queries, checkpoints=[state]) for state in states]
    torch.testing.assert_close(score(model, loss_fn, data, queries, checkpoints=states), (alone[0] + alone[1]) / 2)
    parts = [
        score(model, loss_fn, data, queries, parameters=names)
        for names in (["0.weight", "0.bias"], ["2.weight", "2.bias"])
    ]
    torch.testing.assert_close(parts[0] + parts[1], score(model, loss_fn, data, queries))
    twice = score(
        model, loss_fn, data, queries, measure=lambda m, b: 2 * F.cross_entropy(m(b[0]), b[1], reduction="none")
    )
    torch.testing.assert_close(twice, 2 * score(model, loss_fn, data, queries))
    whole = score(model, loss_fn, data, queries, query_rank=100)
    torch.testing.assert_close(whole, score(model, loss_fn, data, queries))
    assert all(p.grad is None for p in model.parameters()) and model.training


def test_contrasts_are_differences_of_scores() -> None:
    model, data, queries = make("text")
    others = (queries[0], (queries[1] + 1) % 3)
    expected = score(model, F.cross_entropy, data, queries) - score(model, F.cross_entropy, data, others)
    torch.testing.assert_close(score(model, F.cross_entropy, data, queries, rather_than=others), expected)
    with pytest.raises(ScanError, match="rather_than has 3 samples, not one for each of the 4 queries"):
        score(model, F.cross_entropy, data, queries, rather_than=(others[0][:3], others[1][:3]))


def test_scans_score_whole_gradients(tmp_path: Path) -> None:
    """With their own model, checkpoints, parameters and data."""
    model, data, queries = make("linear")
    states = [{name: scale * p for name, p in model.state_dict().items()} for scale in (0.5, 1.0)]
    loss_fn, names = nn.CrossEntropyLoss(), ["0.weight", "2.weight"]
    options: Any = {"parameters": names, "checkpoints": states, "progress": False}
    found = persample.scan(model, loss_fn, data, out=tmp_path, **options)
    expected = score(model, loss_fn, data, queries, **options)
    torch.testing.assert_close(found.scores(queries, exact=True), expected)
    answer = found.influence(queries, 3, "kfac", exact=True, damping=0.3, parameters=["0.weight"])
    options["parameters"] = ["0.weight"]
    expected = score(model, loss_fn, data, queries, method="kfac", damping=0.3, **options)
    torch.testing.assert_close(answer.for_scores, expected.topk(3).values)
    assert torch.equal(answer.against_ids, expected.topk(3, largest=False).indices)

    opened = persample.Scan(tmp_path, model, loss_fn, states, data=data)
    torch.testing.assert_close(opened.scores(queries, exact=True), found.scores(queries, exact=True))
    for wrong, message in ((None, "needs the data"), ((data[0] + 1, data[1]), "The data differs")):
        opened = persample.Scan(tmp_path, model, loss_fn, states, data=wrong)
        with pytest.raises(ScanError, match=message):
            opened.scores(queries, exact=True)
    with pytest.raises(ScanError, match="need exact=True"):
        found.scores(queries, "ekfac")
    with pytest.raises(ScanError, match="method must be one of 'ekfac'"):
        found.scores(queries, "whitened", exact=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "hessian"}, "method must be one of 'ekfac'"),
        ({"damping": 0.0}, "damping must be a positive number"),
        ({"query_rank": 0}, "query_rank must be a positive number"),
    ],
)
def test_wrong_arguments(options: Any, message: str) -> None:
    model, data, queries = make("linear")
    with pytest.raises(ScanError, match=message):
        score(model, nn.CrossEntropyLoss(), data, queries, **options)


def test_examples_that_are_not_finite_are_named() -> None:
    model, (x, y), queries = make("linear")
    x[5] = torch.nan
    with pytest.raises(ScanError, match="5"):
        score(model, nn.CrossEntropyLoss(), (x, y), queries, verify=False)
