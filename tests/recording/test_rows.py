"""`rows`: the gradient of each entry of a vector of losses, against one plain backward pass for each entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import persample
from persample import PerSampleError, record, rows
from persample.testing.oracle import assert_rows_close, perturb, stack_gradients

B, D = 4, 3

Losses = tuple[nn.Module, Tensor]


def make(*layers: nn.Module) -> nn.Sequential:
    model = nn.Sequential(*layers).double()
    perturb(model)
    return model


def make_mlp(out: int = 1) -> nn.Sequential:
    return make(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, out))


def compute_slopes(outputs: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(outputs.sum(), x, create_graph=True)[0]


def make_pinn() -> Losses:
    """The residual of a heat equation: first and second derivatives for the inputs."""
    model, x = make_mlp(), torch.randn(B, D, dtype=torch.float64, requires_grad=True)
    first = compute_slopes(model(x), x)
    second = compute_slopes(first[:, 0], x)
    return model, (first[:, 1] - 0.3 * second[:, 0]).square()


def make_critic() -> Losses:
    """WGAN-GP: a penalty on the norm of the gradient between real and generated samples."""
    model, real, fake = make_mlp(), *torch.randn(2, B, D, dtype=torch.float64)
    between = (real + 0.3 * (fake - real)).requires_grad_()
    penalty = (compute_slopes(model(between), between).norm(dim=1) - 1).square()
    return model, (model(fake) - model(real)).squeeze(1) + 10 * penalty


def make_hamiltonian() -> Losses:
    model, x, velocity = make_mlp(), *torch.randn(2, B, D - 1, dtype=torch.float64)
    x = F.pad(x, (0, 1)).requires_grad_()
    slopes = compute_slopes(model(x), x)
    return model, (torch.stack([slopes[:, 1], -slopes[:, 0]], 1) - velocity).square().sum(1)


class GCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = layer(x)
            x = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]]).tanh()
        return torch.zeros(B, 2, dtype=x.dtype).index_add(0, graph, x)


def make_graphs() -> Losses:
    """A batched graph, as in torch_geometric: graphs with different numbers of nodes share dimension 0."""
    model, graph = GCN().double(), torch.tensor([0, 0, 1, 1, 1, 2, 3, 3])
    perturb(model)
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 2], [1, 0, 3, 4, 2, 5, 7, 6, 4]])
    out = model(torch.randn(8, D, dtype=torch.float64), edges, graph)
    return model, F.cross_entropy(out, torch.arange(B) % 2, reduction="none")


def make_contrastive() -> Losses:
    model = make_mlp(2)
    one, other = (F.normalize(model(x), dim=1) for x in torch.randn(2, B, D, dtype=torch.float64))
    return model, F.cross_entropy(one @ other.T / 0.2, torch.arange(B), reduction="none")


def make_batch_norm() -> Losses:
    model = make(nn.Linear(D, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
    return model, F.cross_entropy(model(torch.randn(B, D).double()), torch.arange(B) % 2, reduction="none")


class _Cube(torch.autograd.Function):
    """A function of the user's, which could hide weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


def make_branching() -> Losses:
    """A hook that `vmap` cannot run."""
    model = make_mlp()
    hidden = model[:2](torch.randn(B, D, dtype=torch.float64))
    hidden.register_hook(lambda grad: 2 * grad if grad.sum() > 0 else grad)
    return model, model[2](hidden).square().sum(1)


def make_custom() -> Losses:
    model = make_mlp()
    return model, _Cube.apply(model(torch.randn(B, D, dtype=torch.float64))).sum(1)


def make_sparse() -> Losses:
    model = make(nn.Embedding(7, D, sparse=True), nn.Linear(D, 1))
    return model, model(torch.randint(0, 7, (B, B))).square().flatten(1).sum(1)


def make_checkpointed() -> Losses:
    model = make_mlp(5)
    hidden = checkpoint(model, torch.randn(B, D, dtype=torch.float64), use_reentrant=False)
    return model, F.dropout(hidden, 0.4).square().sum(1)


def make_hidden() -> Losses:
    """A reentrant checkpoint: its weights are not in the graph."""
    model, x = make_mlp(5), torch.randn(B, D, dtype=torch.float64, requires_grad=True)
    return model, checkpoint(model, x, use_reentrant=True).square().sum(1)


def make_complex() -> Losses:
    model = nn.Linear(D, 2, dtype=torch.complex128)
    return model, model(torch.randn(B, D, dtype=torch.complex128)).abs().sum(1)


CASES = {
    make.__name__.removeprefix("make_"): make
    for make in (
        make_pinn, make_critic, make_hamiltonian, make_graphs, make_contrastive, make_batch_norm, make_branching,
        make_custom, make_sparse, make_checkpointed, make_hidden, make_complex,
    )
}  # fmt: skip


def compute_loop(model: nn.Module, losses: Tensor) -> dict[str, Tensor]:
    rows_by_entry = []
    for n in range(len(losses)):
        before = [p.grad for p in model.parameters()]
        model.zero_grad()
        losses[n].backward(retain_graph=True)
        rows_by_entry.append(
            {name: torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for name, p in model.named_parameters()}
        )
        for p, grad in zip(model.parameters(), before, strict=True):
            p.grad = grad
    return {name: torch.stack([row[name] for row in rows_by_entry]).detach() for name in rows_by_entry[0]}


@pytest.mark.parametrize("memory", [None, 1], ids=["batched", "one by one"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rows_equal_one_pass_for_each_loss(case: Callable[[], Losses], memory: int | None) -> None:
    torch.manual_seed(0)
    model, losses = case()
    marks = [torch.ones_like(p) for p in model.parameters()]
    for p, mark in zip(model.parameters(), marks, strict=True):
        p.grad = mark
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = compute_loop(model, losses)
    grads = rows(losses, model, memory=memory)
    assert_rows_close(grads.dense(), expected)
    want = torch.stack([g.flatten(1).abs().square().sum(1) for g in expected.values()]).sum(0).sqrt()
    torch.testing.assert_close(grads.norms(), want)
    flat = torch.cat(
        [torch.view_as_real(g).flatten(1) if g.is_complex() else g.flatten(1) for g in expected.values()], 1
    )
    torch.testing.assert_close(grads.gram(), flat @ flat.T)
    torch.testing.assert_close(grads.sum(), {name: g.sum(0) for name, g in expected.items()})
    assert all(p.grad is mark and bool((mark == 1).all()) for p, mark in zip(model.parameters(), marks, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    rows(losses, model)  # the graph is still there


@pytest.mark.parametrize("memory", [None, 5000, 1])
def test_blocks_follow_the_memory(memory: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, calls, plain = make_mlp(), [], torch.autograd.grad
    losses = model(torch.randn(12, D, dtype=torch.float64)).sum(1)
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: calls.append(len(a[2])) or plain(*a, **k))
    rows(losses, model, memory=memory)
    assert len(calls) == {None: 1, 5000: 6, 1: 12}[memory]


def test_without_retain_graph_the_graph_is_freed() -> None:
    model = make_mlp()
    losses = model(torch.randn(B, D, dtype=torch.float64)).square().sum(1)
    expected = compute_loop(model, losses)
    assert_rows_close(rows(losses, model, retain_graph=False).dense(), expected)
    with pytest.raises(RuntimeError, match="second time"):
        losses.sum().backward()


def test_options_are_those_of_record() -> None:
    torch.manual_seed(0)
    model = make_mlp()
    model[1].unused = nn.Linear(2, 2)
    x = torch.randn(B, D, dtype=torch.float64)
    with record(model, units=[0, 1, 0, 1]) as want:
        (model(x) - x[:, :1]).square().sum().backward()
    losses = (model(x) - x[:, :1]).square().sum(1)
    assert_rows_close(rows(losses, model, units=[0, 1, 0, 1]).dense(), want.dense())
    chosen = rows(losses, model, parameters=lambda name, p: name != "0.bias")
    assert "0.bias" not in chosen.names and not chosen.dense()["1.unused.weight"].any()
    losses = torch.cat([losses[:1] * 1e200, losses[1:]])
    assert rows(losses, model, nonfinite="zero").list_nonfinite() == [0]
    with pytest.raises(PerSampleError, match="nonfinite"):
        rows(losses, model, nonfinite="ignore")  # type: ignore[arg-type]
    model[0].weight.requires_grad_(False)
    assert "0.weight" not in rows(model(x).sum(1), model).names
    assert len(rows(losses[:0], model)) == 0


@pytest.mark.parametrize("kind", [list, dict])
def test_several_models(kind: type) -> None:
    torch.manual_seed(0)
    body, head = make_mlp(), make(nn.Linear(1, 2))
    losses = head(body(torch.randn(B, D, dtype=torch.float64))).square().sum(1)
    expected = {}
    for name, model in (("0", body), ("1", head)) if kind is list else (("body", body), ("head", head)):
        expected |= {f"{name}.{key}": value for key, value in compute_loop(model, losses).items()}
    found = rows(losses, [body, head] if kind is list else {"body": body, "head": head})
    assert_rows_close(found.dense(), expected)


@pytest.mark.parametrize(
    "make_losses, message",
    [
        (lambda m, x: m(x).sum(), r"vector of real losses.*shape \(\).*reduction='none'"),
        (lambda m, x: m(x), r"shape \(4, 1\)"),
        (lambda m, x: list(m(x)), r"torch.stack\(losses\)"),
        (lambda m, x: m(x).detach().sum(1), "do not require grad"),
        (lambda m, x: (x.requires_grad_() * 2).sum(1), "depend on no parameter"),
    ],
)
def test_wrong_losses_are_refused(make_losses: Callable[[nn.Module, Tensor], Any], message: str) -> None:
    model = make_mlp()
    with pytest.raises(PerSampleError, match=message):
        rows(make_losses(model, torch.randn(B, D, dtype=torch.float64)), model)


def test_losses_of_a_recording_are_refused() -> None:
    model, x = make_mlp(), torch.randn(B, D, dtype=torch.float64)
    with record(model):
        losses = model(x).sum(1)
        with pytest.raises(PerSampleError, match="inside a recording"):
            rows(losses, model)
    with pytest.raises(PerSampleError, match="computed inside a recording"):
        rows(losses, model)
    with pytest.raises(PerSampleError, match=r"nn\.Module"):
        rows(losses, "model")  # type: ignore[arg-type]


def test_rows_add_up_to_the_gradient_of_coupled_losses() -> None:
    torch.manual_seed(0)
    model, losses = make_batch_norm()
    total = rows(losses, model).sum()
    want = stack_gradients([losses.sum()], dict(model.named_parameters()))
    assert_rows_close({name: g[None] for name, g in total.items()}, want)


def make_refused_second_derivative(model: nn.Module, x: Tensor) -> None:
    x.requires_grad_()
    compute_slopes(model(x), x).square().sum().backward()


def make_refused_mixing(model: nn.Module, x: Tensor) -> None:
    out = model(x)
    (out - out.mean(0)).square().sum().backward()


def make_refused_function(model: nn.Module, x: Tensor) -> None:
    (model(x) * _TimesWeight.apply(x, model[0].bias)).sum().backward()


class _TimesWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad * w.sum(), (grad * x).sum() * torch.ones_like(w)


@pytest.mark.parametrize(
    "run", [make_refused_second_derivative, make_refused_mixing, make_refused_function], ids=lambda run: run.__name__
)
def test_refusals_that_it_can_help_name_it(run: Callable[[nn.Module, Tensor], None]) -> None:
    model = make_mlp()
    with pytest.raises(PerSampleError, match=r"persample\.rows\(losses, model\).*B backward passes"), record(model):
        run(model, torch.randn(B, D, dtype=torch.float64))


def test_graph_batches_name_it() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(D, D)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.l(x).index_add(0, edge_index[1], x[edge_index[0]])

    model = Net()
    with pytest.raises(PerSampleError, match=r"persample\.rows"), record(model):
        model(torch.randn(6, D), torch.tensor([[0, 1, 2], [1, 0, 3]])).sum().backward()


def test_it_is_exported() -> None:
    assert persample.rows is rows
