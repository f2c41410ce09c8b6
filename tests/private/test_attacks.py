"""Attacks on the bound: training loops in which one sample could change the private sum by more than the bound.

Each attack is one function of a training step. A battery runs it on a batch and on the same batch without each of its
samples, and measures the largest change of the private sum in units of the bound, in the first step and after others.
An attack that is refused changes nothing. A new attack is one entry.
"""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence, pad_sequence
from torch.utils.checkpoint import checkpoint

from persample import PerSampleError, SamplesMixed
from persample.private import PrivateOptimizer

pytestmark = pytest.mark.filterwarnings("ignore")

B, D, BOUND, ALLOWED = 6, 4, 0.1, 1 + 1e-4

Forward = Callable[["Model", Tensor], Tensor]
Attack = Callable[["Training", Tensor, Tensor], None]
Change = Callable[[Tensor, Tensor], Tensor]  # of the losses, with the targets


class Model(nn.Module):
    """Two layers, and any code between them."""

    def __init__(self, forward: Forward | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 1)
        self.code = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * x) if self.code is None else self.code(self, x)


class Training:
    """A private training without noise, in which an attack makes the steps.

    Attributes:
        step: the number of the step.
        kept: what an attack keeps between steps.
    """

    def __init__(self, forward: Forward | None = None, **recording: Any) -> None:
        torch.manual_seed(0)
        self.model = Model(forward)
        self.optimizer = PrivateOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.0),
            module=self.model, noise_multiplier=0.0, max_grad_norm=BOUND, expected_batch_size=1, loss_reduction="sum",
            recording=recording,
        )  # fmt: skip
        self.step = 0
        self.kept: Any = None

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.model(x).squeeze(1) - y).square()

    def train(self, attack: Attack, x: Tensor, y: Tensor) -> Tensor:
        """The private sum of a step."""
        self.optimizer.add_samples((x, y))
        self.optimizer.zero_grad()
        attack(self, x, y)
        self.optimizer.step()
        self.step += 1
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()]
        return torch.cat([grad.flatten() for grad in found])


def make_data(seed: int) -> tuple[Tensor, Tensor]:
    """A batch whose first sample has a loss that is larger than those of all others, and a target that no other has."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(B, D, generator=generator), torch.randint(3, (B,), generator=generator).float()
    y[0], x[0] = 9, 3
    return x, y


def compute_sum(attack: Attack, steps_before: int, left_out: int | None, **options: Any) -> Tensor:
    training = Training(**options)
    try:
        for seed in range(steps_before):
            training.train(attack, *make_data(seed))
        x, y = make_data(steps_before)
        if left_out is not None:
            kept = [i for i in range(B) if i != left_out]
            x, y = x[kept], y[kept]
        return training.train(attack, x, y)
    finally:
        training.optimizer.release()


def measure(attack: Attack, steps_before: int, **options: Any) -> float | None:
    """The largest change of the sum by one sample, in units of the bound; None if a step is refused."""
    try:
        whole = compute_sum(attack, steps_before, None, **options)
        others = [compute_sum(attack, steps_before, i, **options) for i in range(B)]
    except PerSampleError:
        return None
    return max(float((whole - other).norm()) for other in others) / BOUND


def train_plainly(t: Training, x: Tensor, y: Tensor) -> None:
    t.losses(x, y).sum().backward()


class CountingSum(torch.autograd.Function):
    """A sum whose backward keeps a number of its samples."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor) -> Tensor:
        ctx.factor, ctx.count = 5 - float(losses.max()), len(losses)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return (gradient * ctx.factor).expand(ctx.count)


class CountingCopy(torch.autograd.Function):
    """The same, with a row for each sample."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor) -> Tensor:
        ctx.factor = 5 - float(losses.max())
        return losses.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.factor


@torch.jit.script
def sum_by_script(losses: Tensor) -> Tensor:
    return (losses * (5 - losses.max()).detach()).sum()


def decide(condition: Callable[[Tensor, Tensor], Any]) -> Change:
    """The sign of the loss is a decision."""
    return lambda losses, y: -losses if condition(losses, y) else losses


def scale(number: Callable[[Tensor, Tensor], Any]) -> Change:
    """The loss is multiplied by a number."""
    return lambda losses, y: losses * number(losses, y)


def use(change: Change) -> Attack:
    """A step with changed losses."""

    def step(t: Training, x: Tensor, y: Tensor) -> None:
        change(t.losses(x, y), y).sum().backward()

    return step


def change_gradient(make: Callable[[Tensor], Any]) -> Attack:
    """`backward` gets a gradient."""

    def step(t: Training, x: Tensor, y: Tensor) -> None:
        losses = t.losses(x, y)
        losses.sum().backward(gradient=make(losses.detach()))

    return step


def hook_loss(t: Training, x: Tensor, y: Tensor) -> None:
    loss = (losses := t.losses(x, y)).sum()
    factor = 5 - losses.detach().max()
    loss.register_hook(lambda g: g * factor)
    loss.backward()


def hook_node(t: Training, x: Tensor, y: Tensor) -> None:
    loss = (losses := t.losses(x, y)).sum()
    factor = 5 - losses.detach().max()
    loss.grad_fn.register_prehook(lambda gs: tuple(g * factor for g in gs))
    loss.backward()


def hook_rows(t: Training, x: Tensor, y: Tensor) -> None:
    losses = t.losses(x, y)
    factor = 5 - losses.detach().max()
    losses.grad_fn.register_hook(lambda gs, _: tuple(g if g is None else g * factor for g in gs))
    losses.sum().backward()


def pack_saved(t: Training, x: Tensor, y: Tensor) -> None:
    def unpack(saved: Tensor) -> Tensor:
        return saved * (5 - saved.abs().max()) if saved.is_floating_point() else saved

    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
        losses = t.losses(x, y)
    losses.sum().backward()


def pack_saved_loss(t: Training, x: Tensor, y: Tensor) -> None:
    out = t.model(x).squeeze(1)
    with torch.autograd.graph.saved_tensors_hooks(lambda s: s, lambda s: s * (5 - s.abs().max()).sign()):
        losses = (out - y).square()
    losses.sum().backward()


def fill_number(losses: Tensor, y: Tensor) -> Tensor:
    return losses * torch.zeros(()).fill_(5 - losses.max().item())


def keep_parameter(t: Training, x: Tensor, y: Tensor) -> None:
    losses = t.losses(x, y)
    loss = losses.sum() if t.kept is None else (losses * (t.kept - y.mean())).sum()
    t.kept = nn.Parameter(losses.detach().mean(), requires_grad=False)
    loss.backward()


def sort_losses(losses: Tensor, y: Tensor) -> Tensor:
    threshold = sorted(losses.tolist())[len(losses) // 2]
    return torch.where(losses > threshold, -losses, losses)


def scale_by_size(losses: Tensor, y: Tensor) -> Tensor:
    size = losses.shape[0]
    return losses * 1e-3 * (size if losses.max().item() > 20 else 1 / size)


def mix_before(change: Callable[[Tensor], Tensor]) -> Attack:
    def step(t: Training, x: Tensor, y: Tensor) -> None:
        t.losses(change(x), y).sum().backward()

    return step


def skip_backward(t: Training, x: Tensor, y: Tensor) -> None:
    loss = t.losses(x, y).sum()
    if loss.item() < 50:
        loss.backward()


def hook_by_number(losses: Tensor, y: Tensor) -> Tensor:
    factor = 5 - losses.max().item()
    losses.register_hook(lambda gradient: gradient * factor)
    return losses


def draw_by_number(losses: Tensor, y: Tensor) -> Tensor:
    torch.manual_seed(int(losses.sum().item()))
    return losses * torch.randn(())


def write_through_numpy(losses: Tensor, y: Tensor) -> Tensor:
    factor = torch.zeros(1)
    factor.numpy()[:] = 5 - losses.detach().numpy().max()
    return losses * factor


def freeze_by_number(t: Training, x: Tensor, y: Tensor) -> None:
    if t.losses(x, y).max().item() > 20:
        t.model.first.requires_grad_(False)
    t.losses(x, y).sum().backward()


def call_twice(t: Training, x: Tensor, y: Tensor) -> None:
    factor = 5 - t.losses(x, y).max().item()
    t.losses(x * factor, y).sum().backward()


def average_copy(t: Training, x: Tensor, y: Tensor) -> None:
    centre = copy.deepcopy(t.model)(x).detach().mean(0)
    (t.model(x) - centre).square().sum().backward()


def catch_check(losses: Tensor, y: Tensor) -> Tensor:
    try:
        torch.distributions.Normal(0.0, 40 - losses)
    except ValueError:
        return -losses
    return losses


def catch(call: Callable[[Tensor, Tensor], Any]) -> Change:
    """The sign of the loss depends on whether a call raises an error."""

    def change(losses: Tensor, y: Tensor) -> Tensor:
        try:
            call(losses, y)
        except (RuntimeError, IndexError, ValueError):
            return -losses
        return losses

    return change


def save(losses: Tensor, y: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(losses.detach(), file)
    file.seek(0)
    return 5 - torch.load(file).max()


def shrink(losses: Tensor, y: Tensor) -> Tensor:
    while losses.sum() > 30:
        losses = losses * 0.5
    return losses


def write_targets(losses: Tensor, y: Tensor) -> Tensor:
    array = y.numpy()
    array -= array.max()
    return losses * (y + 3)


def write_values(losses: Tensor, y: Tensor) -> Tensor:
    losses.data.sub_(losses.data.max())
    return losses**2


# Errors that torch raises for some values, of a loop that catches them.
ERRORS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "one_hot": lambda losses, y: nn.functional.one_hot(y.long(), 5),
    "embedding": lambda losses, y: nn.functional.embedding(y.long(), torch.ones(5, 2)),
    "gather": lambda losses, y: torch.ones(5).gather(0, y.long()),
    "an index": lambda losses, y: torch.ones(5)[y.long()],
    "cross_entropy": lambda losses, y: nn.functional.cross_entropy(torch.zeros(len(y), 5), y.long()),
    "cholesky": lambda losses, y: torch.linalg.cholesky((5 - y).reshape(-1, 1, 1)),
    "inv": lambda losses, y: torch.linalg.inv((9 - y).reshape(-1, 1, 1)),
    "solve": lambda losses, y: torch.linalg.solve((9 - y).reshape(-1, 1, 1), y.reshape(-1, 1, 1)),
    "multinomial": lambda losses, y: torch.multinomial(torch.stack([5 - y, 5 + y], 1), 1),
    "bincount": lambda losses, y: torch.bincount((5 - y).long()),
    "repeat_interleave": lambda losses, y: torch.repeat_interleave(torch.ones(len(y)), (5 - y).long()),
    "_assert_async": lambda losses, y: torch._assert_async((y < 5).all()),
    "binary_cross_entropy": lambda losses, y: nn.functional.binary_cross_entropy(y / 3, y / 9),
    "scatter": lambda losses, y: torch.zeros(5).scatter(0, y.long(), 1.0),
    "take": lambda losses, y: torch.ones(5).take(y.long()),
    "index_add": lambda losses, y: torch.ones(5).index_add(0, y.long(), losses.detach()),
    "quantile": lambda losses, y: torch.quantile(torch.arange(3.0), y / 5),
    "bernoulli": lambda losses, y: torch.bernoulli(y / 5),
    "normal": lambda losses, y: torch.normal(0.0, 5 - y),
    "a division of integers": lambda losses, y: torch.ones(len(y)).long() // (9 - y).long(),
}

# Sizes that values of samples decide.
SIZES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "repeat_interleave": lambda losses, y: len(torch.repeat_interleave(y.long())),
    "one_hot": lambda losses, y: nn.functional.one_hot(y.long()).shape[1],
    "masked_select": lambda losses, y: torch.masked_select(y, y > 5).numel() + 4.5,
    "ones_like": lambda losses, y: torch.ones_like(y[y > 5]).sum() + 4.5,
    "new_ones": lambda losses, y: y.new_ones(y[y > 5].shape).sum() + 4.5,
    "ones": lambda losses, y: torch.ones(y[y > 5].size()).sum() + 4.5,
    "ones of a number": lambda losses, y: torch.ones(int(y.max())).sum(),
    "fill_": lambda losses, y: torch.empty(len(y[y > 5]), 3).fill_(1).sum() + 4.5,
    "expand_as": lambda losses, y: torch.ones(1).expand_as(y[y > 5]).sum() + 4.5,
    "an expanded number": lambda losses, y: torch.ones(1).expand(int(y.max())).sum(),
    "bytes": lambda losses, y: y[y > 5].nbytes + 4.5,
    "argwhere": lambda losses, y: len(torch.argwhere(y > 5)) + 4.5,
    "a sparse tensor": lambda losses, y: (y * (y > 5)).to_sparse()._nnz() + 4.5,
    "padding": lambda losses, y: pad_sequence([torch.ones(int(v) + 1) for v in y]).shape[0],
}

CHANGES: dict[str, Change] = {
    **{f"a caught error of {name}": catch(call) for name, call in ERRORS.items()},
    **{f"a size by {name}": scale(lambda losses, y, size=size: 5 - size(losses, y)) for name, size in SIZES.items()},
    "scale by a saved copy": scale(save),
    "scale by ctypes": scale(lambda losses, y: 5 - ctypes.c_float.from_address(losses.data_ptr()).value),
    "scale by a seed of random": scale(lambda losses, y: random.Random(int(losses.sum())).random() - 0.5),
    "scale by a seeded generator": scale(
        lambda losses, y: torch.randn((), generator=torch.Generator().manual_seed(int(losses.sum())))
    ),
    "scale by a table": scale(lambda losses, y: torch.tensor([1.0] * 9 + [-1.0])[int(y.max())]),
    "scale by a new tensor": scale(lambda losses, y: losses.new_tensor(5 - float(losses.max()))),
    "a function chosen by a number": lambda losses, y: (torch.abs, torch.neg)[int((y > 5).any())](losses),
    "an option of a loss": lambda losses, y: nn.functional.huber_loss(
        losses, 0 * losses, reduction="none", delta=float(losses.median())
    ),
    "a loop that ends by a value": shrink,
    "targets that numpy writes": write_targets,
    "values written through .data": write_values,
    "vmap": lambda losses, y: torch.func.vmap(lambda a: a * (5 - losses.max().detach()))(losses),
    "a gradient of func": lambda losses, y: losses * (torch.func.grad(lambda v: v.max())(losses.detach()) - 0.5),
    "flooding": lambda losses, y: (losses.sum() - 50).abs(),
    "the log of the sum": lambda losses, y: losses.sum().log(),
    "a clamped sum": lambda losses, y: losses.sum().clamp(max=50),
    "logsumexp": lambda losses, y: losses.logsumexp(0),
    "ranks": lambda losses, y: losses * losses.detach().argsort().argsort(),
    "sums of classes": lambda losses, y: torch.zeros(10).index_add(0, y.long(), losses).square(),
    "balanced classes": lambda losses, y: losses / torch.bincount(y.long(), minlength=10)[y.long()],
    "pairs": lambda losses, y: losses[: len(losses) // 2 * 2].view(-1, 2).prod(1),
    "a check of torch whose error is caught": catch_check,
    "scale by a text": scale(lambda losses, y: 5 - float(f"{losses.max():.2f}")),
    "scale by a softmax": scale(lambda losses, y: losses.detach().softmax(0) - 0.3),
    "scale by an iteration": scale(lambda losses, y: 5 - max(iter(losses.detach()))),
    "scale by a pickled copy": scale(lambda losses, y: 5 - pickle.loads(pickle.dumps(losses.detach())).max()),
    "scale by dlpack": scale(lambda losses, y: 5 - torch.from_dlpack(losses.detach()).max()),
    "scale by its storage": scale(lambda losses, y: 5 - max(losses.detach().untyped_storage().tolist())),
    "scale by bincount": scale(lambda losses, y: 9 - torch.bincount(y.long()).numel()),
    "a hook by a number": hook_by_number,
    "random numbers by a number": draw_by_number,
    "a constant that numpy writes": write_through_numpy,
    "decide by a sum": decide(lambda losses, y: losses.sum() > 30),
    "decide by any": decide(lambda losses, y: (losses > 20).any()),
    "decide by a number": decide(lambda losses, y: losses.max().item() > 20),
    "decide by equal": decide(lambda losses, y: torch.equal(y, y.clamp(max=3))),
    "decide by argmax": decide(lambda losses, y: int(losses.argmax()) > 0),
    "decide by isfinite": decide(lambda losses, y: (1 / (9 - y)).isfinite().all()),
    "decide by numpy": decide(lambda losses, y: losses.detach().numpy().max() > 20),
    "decide by len of unique": decide(lambda losses, y: len(y.unique()) > 3),
    "decide by len of a mask": decide(lambda losses, y: len(y[y > 5]) > 0),
    "decide by a size": decide(lambda losses, y: (y > 5).nonzero().shape[0] > 0),
    "decide by tolist": decide(lambda losses, y: 9.0 in y.tolist()),
    "scale by a number": scale(lambda losses, y: 5 - losses.max().item()),
    "scale by a tensor of a number": scale(lambda losses, y: torch.tensor(5 - float(losses.max()))),
    "scale by full": scale(lambda losses, y: torch.full((), 5 - float(losses.max()))),
    "scale by full_like": scale(lambda losses, y: torch.full_like(losses, 5 - float(losses.max())).detach()),
    "scale by numpy": scale(lambda losses, y: torch.from_numpy(5 - losses.detach().numpy().max(keepdims=True))),
    "scale by a numpy number": scale(lambda losses, y: np.float32(5) - losses.detach().numpy().max()),
    "scale by a count": scale(lambda losses, y: 0.5 - int((losses > 20).sum())),
    "scale by a number of classes": scale(lambda losses, y: 3.5 - len(y.unique())),
    "scale by the length of a list": scale(lambda losses, y: 0.5 - len([v for v in y.tolist() if v > 5])),
    "scale by the size or its inverse": scale_by_size,
    "scale by a sorted list": sort_losses,
    "fill_": fill_number,
    "a Function that keeps a number": lambda losses, y: CountingCopy.apply(losses),
}


def differentiate_twice(t: Training, x: Tensor, y: Tensor) -> None:
    out = t.model(x).squeeze(1)
    leaf = out.detach().requires_grad_()
    (leaf - y).square().sum().backward()
    assert leaf.grad is not None
    out.backward(leaf.grad / leaf.grad.norm())


def choose_inputs(t: Training, x: Tensor, y: Tensor) -> None:
    losses, params = t.losses(x, y), list(t.model.parameters())
    losses.sum().backward(inputs=params if losses.max().item() < 20 else params[:1])


def scale_weight(read: Callable[[Tensor], Any]) -> Attack:
    """A weight has another value in the backward pass."""

    def step(t: Training, x: Tensor, y: Tensor) -> None:
        losses, weight = t.losses(x, y), t.model.last.weight
        before = weight.detach().clone()
        weight.data.mul_(read(losses.detach()))
        try:
            losses.sum().backward()
        finally:
            weight.data.copy_(before)

    return step


def recompute(t: Training, x: Tensor, y: Tensor) -> None:
    factor = [1.0]
    h = checkpoint(lambda v: torch.tanh(t.model.first(v)) * v * factor[0], x, use_reentrant=False)
    losses = (t.model.last(h).squeeze(1) - y).square()
    factor[0] = 5 - losses.max().item()
    losses.sum().backward()


def clear_afterwards(clear: Callable[[Training], None]) -> Attack:
    def step(t: Training, x: Tensor, y: Tensor) -> None:
        losses = t.losses(x, y)
        losses.sum().backward()
        if losses.max() > 20:
            clear(t)

    return step


def set_none(t: Training) -> None:
    for p in t.model.parameters():
        p.grad = None


def change_before(change: Callable[[Tensor], Any]) -> Attack:
    """The batch is changed in place before the model is called."""

    def step(t: Training, x: Tensor, y: Tensor) -> None:
        change(x)
        t.losses(x, y).sum().backward()

    return step


def change_between(change: Callable[[Tensor], Any]) -> Attack:
    """The targets are changed in place between the model and the loss."""

    def step(t: Training, x: Tensor, y: Tensor) -> None:
        out = t.model(x).squeeze(1)
        change(y)
        (out - y).square().sum().backward()

    return step


def subtract_in_numpy(tensor: Tensor) -> None:
    array = tensor.numpy()
    array -= array.mean(0)


# Writes that no result of a function of torch shows.
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "numpy": subtract_in_numpy,
    "an alias in numpy": lambda tensor: subtract_in_numpy(tensor.detach()),
    "an index": lambda tensor: tensor.__setitem__(0, tensor.mean(0)),
    "all indices": lambda tensor: tensor.__setitem__(slice(None), tensor - tensor.mean(0)),
    "copy_": lambda tensor: tensor.copy_(tensor - tensor.mean(0)),
    "out": lambda tensor: torch.sub(tensor, tensor.mean(0), out=tensor),
    "data": lambda tensor: tensor.data.sub_(tensor.mean(0)),
    "new data": lambda tensor: setattr(tensor, "data", tensor - tensor.mean(0)),
    "a view": lambda tensor: tensor.view(-1).sub_(tensor.mean()),
    "a row": lambda tensor: tensor[0].sub_(tensor[1]),
    "set_": lambda tensor: tensor.set_(tensor - tensor.mean(0)),
    "storage": lambda tensor: tensor.untyped_storage().copy_((tensor - tensor.mean(0)).untyped_storage()),
    "_foreach_sub_": lambda tensor: torch._foreach_sub_([tensor], [tensor.mean(0)]),
}

ATTACKS: dict[str, Attack] = {
    **{f"inputs changed by {name}": change_before(change) for name, change in WRITES.items()},
    **{f"targets changed by {name}": change_between(change) for name, change in WRITES.items()},
    "a gradient of a gradient": differentiate_twice,
    "inputs of backward by a number": choose_inputs,
    "a weight scaled by a tensor": scale_weight(lambda losses: 5 - losses.max()),
    "a weight scaled by a number": scale_weight(lambda losses: 5 - losses.max().item()),
    "a checkpoint that is recomputed otherwise": recompute,
    "gradients cleared by the optimizer": clear_afterwards(lambda t: t.optimizer.zero_grad()),
    "gradients cleared by the model": clear_afterwards(lambda t: t.model.zero_grad()),
    "gradients set to None": clear_afterwards(set_none),
    **{name: use(change) for name, change in CHANGES.items()},
    "no backward by a number": skip_backward,
    "a layer that is frozen by a number": freeze_by_number,
    "two calls": call_twice,
    "a copy of the model": average_copy,
    "the largest losses": lambda t, x, y: t.losses(x, y).topk(3).values.sum().backward(),
    "losses below the median": lambda t, x, y: (ls := t.losses(x, y))[ls <= ls.median()].sum().backward(),
    "Python's max": lambda t, x, y: max(t.losses(x, y)).backward(),
    "Python's sorted": lambda t, x, y: sum(sorted(t.losses(x, y))[:3]).backward(),
    "backward(gradient=tensor)": change_gradient(lambda losses: 5 - losses.max()),
    "backward(gradient=number)": change_gradient(lambda losses: torch.tensor(5 - losses.max().item())),
    "hook of the loss": hook_loss,
    "prehook of a node": hook_node,
    "hook of a node": hook_rows,
    "hooks of saved tensors": pack_saved,
    "hooks of saved tensors of the loss": pack_saved_loss,
    "a Function that sums": lambda t, x, y: CountingSum.apply(t.losses(x, y)).backward(),
    "a script that sums": lambda t, x, y: sum_by_script(t.losses(x, y)).backward(),
    "a frozen parameter made of samples": keep_parameter,
    "mixup": mix_before(lambda x: 0.5 * x + 0.5 * x.roll(1, 0)),
    "cutmix": mix_before(lambda x: torch.cat([x[:, :2], x.flip(0)[:, 2:]], 1)),
    "standardised": mix_before(lambda x: (x - x.mean(0)) / x.std(0)),
    "samples in another order than targets": mix_before(lambda x: x.flip(0)),
    "targets in another order than samples": lambda t, x, y: t.losses(x, y.roll(1)).sum().backward(),
    "a sample twice": lambda t, x, y: t.losses(x[[0, 0, *range(2, len(x))]], y).sum().backward(),
    "weights by a statistic": lambda t, x, y: (t.losses(x, y) * (5 - y.max())).sum().backward(),
}


def log(read: Callable[[Tensor, Tensor], Any]) -> Attack:
    """A number is read for a log, and the loss is computed as always."""

    def step(t: Training, x: Tensor, y: Tensor) -> None:
        losses = t.losses(x, y)
        read(losses, y)
        t.kept = losses.detach()
        (losses * 0.5).clamp(max=1e6).sum().backward()

    return step


def log_with_hook(t: Training, x: Tensor, y: Tensor) -> None:
    loss = (t.losses(x, y) * 0.5).clamp(max=1e6).sum()
    loss.register_hook(lambda gradient: None)
    assert loss.grad_fn is not None and loss.grad_fn.next_functions
    loss.backward()


CHECKS_OF_TORCH: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "arguments of a distribution": lambda losses, y: torch.distributions.Normal(losses, losses.exp().clamp(max=9)),
    "values of a distribution": lambda losses, y: torch.distributions.Poisson(losses + 1).log_prob(y.round()),
    "a loss with variances": lambda losses, y: nn.functional.gaussian_nll_loss(losses, y, losses + 1),
}

HARMLESS: dict[str, Attack] = {
    **{name: log(read) for name, read in CHECKS_OF_TORCH.items()},
    "nothing": log(lambda losses, y: None),
    "rows in another order": lambda t, x, y: (t.losses(x.flip(0), y.flip(0)) * 0.5).clamp(max=1e6).sum().backward(),
    "changed inputs": lambda t, x, y: (
        x.mul_(2).div_(2),
        x.__setitem__((slice(None), 0), x[:, 0] * 1),
        x.numpy(),
        (t.losses(x, y) * 0.5).clamp(max=1e6).sum().backward(),
    ),
    "sizes of new tensors": log(lambda losses, y: (losses.max().item(), torch.zeros(len(losses), D), y.numpy())),
    "scaled inputs": lambda t, x, y: (
        (t.losses((2 * x) / 2 + 0, y.double().float()) * 0.5).clamp(max=1e6).sum().backward()
    ),
    "item": log(lambda losses, y: losses.mean().item()),
    "per cent": log(lambda losses, y: (losses.sum().item(), (losses > y).float().sum().mul_(100 / len(y)).item())),
    "a constant that is the size of a batch": log(lambda losses, y: (losses.sum().item(), losses.detach() * B)),
    "a list": log(lambda losses, y: sorted(losses.tolist())),
    "numpy": log(lambda losses, y: losses.detach().numpy().mean()),
    "a count": log(lambda losses, y: int((losses > y).sum())),
    "a decision": log(lambda losses, y: bool((losses > 3).all())),
    "a text": log(lambda losses, y: f"{losses.sum():.3f} {losses}"),
    "sizes": log(lambda losses, y: (losses.shape, len(y), losses.numel(), losses.dim())),
    "a hook that returns nothing": log_with_hook,
}


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_exceeds_the_bound(name: str, steps_before: int) -> None:
    change = measure(ATTACKS[name], steps_before)
    assert change is None or change <= ALLOWED


@pytest.mark.parametrize("name", HARMLESS)
def test_logs_are_free(name: str) -> None:
    """They are never refused, and change no step but the first."""
    assert measure(HARMLESS[name], 0) is not None
    change = measure(HARMLESS[name], 2)
    assert change is not None and change <= ALLOWED
    torch.testing.assert_close(compute_sum(HARMLESS[name], 2, None), compute_sum(HARMLESS["nothing"], 2, None))


def test_the_first_step_with_numbers_of_samples_has_noise_only(caplog: pytest.LogCaptureFixture) -> None:
    assert not compute_sum(HARMLESS["item"], 0, None).any()
    assert "add nothing" in caplog.text
    assert compute_sum(HARMLESS["item"], 1, None).any() and compute_sum(HARMLESS["nothing"], 0, None).any()


@pytest.mark.parametrize("name", CHECKS_OF_TORCH)
def test_checks_of_torch_leave_no_sample_out(name: str) -> None:
    torch.testing.assert_close(compute_sum(HARMLESS[name], 0, None), compute_sum(HARMLESS["nothing"], 0, None))


def test_the_error_names_the_read_and_the_call() -> None:
    training = Training()
    attack = use(scale(lambda losses, y: losses.mean().item()))
    try:
        training.train(attack, *make_data(0))
        with pytest.raises(SamplesMixed, match=r"read by item.*mul is new there, or has other numbers"):
            training.train(attack, *make_data(1))
    finally:
        training.optimizer.release()


# ---- models that verification sees in some steps only ----


def mix_in_numpy(m: Model, x: Tensor) -> Tensor:
    h = torch.tanh(m.first(x))
    return m.last(h + m.weight * torch.from_numpy(h.detach().numpy().mean(0, keepdims=True)))


def mix_later(m: Model, x: Tensor) -> Tensor:
    """The weight of the mixture grows with the calls, so that no run of the model can be repeated."""
    m.calls += 1
    m.weight = 5.0 * max(0, m.calls - 3)
    return mix_in_numpy(m, x)


def mix_with_noise(m: Model, x: Tensor) -> Tensor:
    return mix_in_numpy(m, x + torch.randn_like(x))


def average_padded(m: Model, x: Tensor) -> Tensor:
    return m.last(torch.tanh(m.first(x)).mean(1))


def average_packed(m: Model, x: Any) -> Tensor:
    return average_padded(m, pad_packed_sequence(x, batch_first=True)[0])


def average_cut(m: Model, x: Tensor, lengths: Tensor) -> Tensor:
    return average_padded(m, x[:, : int(lengths.max())])


def make_sequences(lengths: list[int], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, D, generator=generator) + 1 for length in lengths]


def pad(lengths: list[int], seed: int) -> tuple[Tensor, ...]:
    return pad_sequence(make_sequences(lengths, seed), batch_first=True), torch.tensor(lengths)


MODELS: dict[str, tuple[Callable[..., Tensor], Callable[[list[int], int], tuple[Any, ...]]]] = {
    "numpy by a weight that grows": (mix_later, lambda lengths, seed: make_data(seed)[:1]),
    "numpy and noise": (mix_with_noise, lambda lengths, seed: make_data(seed)[:1]),
    "a mean over packed sequences": (
        average_packed,
        lambda lengths, seed: (pack_sequence(make_sequences(lengths, seed), enforce_sorted=False),),
    ),
    "a mean up to the longest": (average_cut, pad),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_mix_in_later_steps_are_refused(name: str) -> None:
    """The first steps have sequences of one length, and a weight of zero."""
    forward, make = MODELS[name]
    training = Training(forward)
    model = training.model
    model.calls, model.weight = 0, 5.0 * (name == "numpy and noise")
    model.forward = lambda *args: forward(model, *args)  # type: ignore[method-assign]
    try:
        with pytest.raises(PerSampleError, match=r"cannot do so here|output of a sample"):
            for step, lengths in enumerate(([3] * B, [3] * B, [12, 1, 1, 2, 1, 2])):
                training.optimizer.add_samples(batch := make(lengths, step))
                training.optimizer.zero_grad()
                (model(*batch) - 3).square().sum().backward()
                training.optimizer.step()
    finally:
        training.optimizer.release()


def test_a_model_with_noise_that_computes_in_torch_alone_is_trained() -> None:
    def forward(m: Model, x: Tensor) -> Tensor:
        return m.last(torch.tanh(m.first(x + torch.randn_like(x))))

    assert compute_sum(use(lambda losses, y: losses), 1, None, forward=forward).any()


def test_a_model_that_uses_what_it_has_kept_in_a_global_is_refused() -> None:
    """The list has samples that the verification has run alone, which no step has followed."""
    kept: list[Tensor] = []

    def forward(m: Model, x: Tensor) -> Tensor:
        h = torch.tanh(m.first(x))
        alone = [tensor.mean() for tensor in kept if len(tensor) == 1]
        kept.append(h.detach())
        return m.last(h + 0.5 * sum(alone))

    training = Training(forward)
    try:
        with pytest.raises(PerSampleError, match="outside of its modules"):
            training.train(train_plainly, *make_data(0))
    finally:
        training.optimizer.release()
