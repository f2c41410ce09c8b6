"""The hot path: calls without shapes in their keys, and small uses without a tap."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from persample import PerSampleError, SamplesMixed, record
from persample.backward import retained
from persample.backward.retained import RetainedUse
from persample.forward import repeats
from persample.layouts import MEMO, make_call, make_size_free_key
from persample.testing import assert_rows_close, loop_gradients
from tests.support.cases import Calls

D = 4


class Net(nn.Module):
    """Three layers of one shape, so that their uses are computed as one, and a forward that a test chooses."""

    def __init__(self, inside: Callable[[Any, Tensor], Tensor] = lambda m, h: h) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(3))
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.tanh(norm(self.inside(self, layer(x))))
        return x


def compute_loss(out: Tensor) -> Tensor:
    return (out.square() * torch.arange(1.0, 1 + out[0].numel(), dtype=out.dtype).view(out.shape[1:])).flatten(1).sum(1)


def sum_losses(model: nn.Module, x: Tensor) -> Tensor:
    return compute_loss(model(x)).sum()


def check(model: nn.Module, x: Tensor) -> None:
    """Compare rows, norms and the clipped sum with a loop over the samples."""
    expected = loop_gradients(model, x, sum_losses)
    with record(model) as grads:
        sum_losses(model, x).backward()
    assert_rows_close(grads.dense(), expected)
    norms = torch.stack([rows.flatten(1).square().sum(1) for rows in expected.values()]).sum(0).sqrt()
    for keep in ({"keep": "norms"}, {"keep": "clip", "max_norm": 1.0}, {"keep": "clip", "max_norm": 1.0, "passes": 2}):
        with record(model, **keep) as streamed:
            sum_losses(model, x).backward()
        torch.testing.assert_close(streamed.norms(), norms)
        if keep["keep"] == "clip":
            factors = (1 / norms).clamp(max=1)
            for name, total in streamed.clip().items():
                torch.testing.assert_close(total, torch.tensordot(factors, expected[name], 1))


@pytest.fixture
def uses(monkeypatch: pytest.MonkeyPatch) -> list[RetainedUse]:
    """The uses without a tap that a test makes."""
    made: list[RetainedUse] = []
    original = RetainedUse.__init__

    def note(self: RetainedUse, *args: Any) -> None:
        made.append(self)
        original(self, *args)

    monkeypatch.setattr(RetainedUse, "__init__", note)
    return made


@pytest.mark.parametrize("shape", [(3, D), (3, 5, D), (D, D, D), (2, 1, D)])
def test_rows_equal_a_loop_in_the_first_pass_and_later(shape: tuple[int, ...], uses: list[RetainedUse]) -> None:
    model, x = Net().double(), torch.randn(shape, dtype=torch.float64)
    for _ in range(3):
        check(model, x)
    assert uses


INSIDE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "relu_": lambda m, h: F.relu(h, inplace=True),
    "add_": lambda m, h: h.add_(1),
    "imul": lambda m, h: h.__imul__(2),
    "a write through a view": lambda m, h: (h[..., :2].mul_(3), h)[1],
    "detach_ of a view": lambda m, h: h + h.detach(),
    "without grad": lambda m, h: h + torch.no_grad()(lambda: m.layers[0](h))(),
    "two uses of one layer": lambda m, h: h + m.layers[0](h),
    "a transpose": lambda m, h: h @ m.layers[0].weight.t(),
    "checkpoint": lambda m, h: checkpoint(lambda h: m.layers[0](h).sin(), h, use_reentrant=False),
    "a hook": lambda m, h: (h.register_hook(lambda grad: 2 * grad), h / 2)[1],
    "eps": lambda m, h: F.layer_norm(h, (D,), m.norms[0].weight, eps=0.1) + F.layer_norm(h, (D,), eps=1e-5),
}


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("name", INSIDE)
def test_uses_without_a_tap(name: str, dims: int) -> None:
    model, x = Net(INSIDE[name]).double(), torch.randn(3, *[5] * (dims - 2), D, dtype=torch.float64)
    for _ in range(2):
        check(model, x)


def test_the_users_retained_gradient_is_kept() -> None:
    model, x = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D)), torch.randn(3, D)
    for _ in range(2):
        with record(model):
            h = model(x)
            h.retain_grad()
            compute_loss(h).sum().backward()
        assert h.grad is not None and h.grad.any()


def test_autograd_grad_leaves_no_rows() -> None:
    model, x = Net().double(), torch.randn(3, D, dtype=torch.float64)
    expected = loop_gradients(model, x, sum_losses)
    for _ in range(2):
        with record(model) as grads:
            out = model(x)
            torch.autograd.grad(compute_loss(out).sum(), out, retain_graph=True)
            compute_loss(out).sum().backward()
        assert_rows_close(grads.dense(), expected)


def test_two_passes_over_one_graph_add_up() -> None:
    model, x = Net().double(), torch.randn(3, D, dtype=torch.float64)
    expected = loop_gradients(model, x, lambda m, x: 2 * sum_losses(m, x))
    for _ in range(2):
        with record(model) as grads:
            loss = compute_loss(model(x)).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        assert_rows_close(grads.dense(), expected)


def test_two_graphs_in_one_block_add_up() -> None:
    model, x = Net().double(), torch.randn(3, D, dtype=torch.float64)
    expected = loop_gradients(model, x, lambda m, x: 3 * sum_losses(m, x))
    for _ in range(2):
        with record(model) as grads:
            first, second = sum_losses(model, x), 2 * sum_losses(model, x)
            first.backward()
            second.backward()
        assert_rows_close(grads.dense(), expected)


def test_backward_after_the_block() -> None:
    model, x = Net().double(), torch.randn(3, D, dtype=torch.float64)
    expected = loop_gradients(model, x, sum_losses)
    for _ in range(2):
        with record(model) as grads:
            loss = compute_loss(model(x)).sum()
        torch.autograd.grad(loss, [p for p in model.parameters()][:1], retain_graph=True, allow_unused=True)
        loss.backward()
        assert_rows_close(grads.dense(), expected)


def test_a_failed_pass_leaves_nothing_for_the_next() -> None:
    def refuse(grad: Tensor) -> None:
        raise ValueError("not this time")

    model, x, hidden = Net().double(), torch.randn(3, D, dtype=torch.float64), []
    expected = loop_gradients(model, x, sum_losses)
    model.layers[0].register_forward_hook(lambda module, args, output: hidden.append(output))
    for _ in range(2):
        with record(model) as grads:
            out = model(x)
            hook = hidden[-1].register_hook(refuse)
            with pytest.raises(ValueError, match="not this time"):
                compute_loss(out).sum().backward(retain_graph=True)
            hook.remove()
            compute_loss(out).sum().backward()
        assert_rows_close(grads.dense(), expected)


def test_inputs_that_were_changed_in_place_are_refused() -> None:
    model, x, seen = Net(), torch.randn(3, D), []
    model.layers[2].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    for _ in range(2):
        with pytest.raises((PerSampleError, RuntimeError), match=r"in place|inplace"), record(model):
            out = model(x)
            with torch.no_grad():
                seen[-1].add_(1)
            compute_loss(out).sum().backward()


def test_nothing_is_kept_alive() -> None:
    model, x = Net(), torch.randn(3, D)
    for _ in range(3):
        with record(model, keep="norms") as grads:
            compute_loss(model(x)).sum().backward()
        grads.norms()
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(o, RetainedUse) for o in gc.get_objects())
        for backward in (True, False):
            with record(model, keep="norms"):
                loss = compute_loss(model(x)).sum()
                if backward:
                    loss.backward()
            del loss
        assert sum(isinstance(o, RetainedUse) for o in gc.get_objects()) == before
    finally:
        gc.enable()


def test_large_results_have_a_tap(monkeypatch: pytest.MonkeyPatch, uses: list[RetainedUse]) -> None:
    from persample.forward import use

    model, x = Net().double(), torch.randn(3, D, dtype=torch.float64)
    monkeypatch.setattr(use, "MAX_ENTRIES", 0)
    check(model, x)
    assert not uses


def test_uses_of_one_shape_are_computed_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[int] = []
    original = retained.stack_uses
    monkeypatch.setattr(
        "persample.backward.collector.stack_uses",
        lambda group, collector: (groups.append(len(group)), original(group, collector))[1],
    )
    model, x = Net().double(), torch.randn(3, 5, D, dtype=torch.float64)
    for _ in range(2):
        groups.clear()
        check(model, x)
    assert max(groups) == 3


def note_steps(monkeypatch: pytest.MonkeyPatch, functions: list[Any]) -> None:
    """Note the functions whose calls have no known effect, and take the steps."""
    MEMO.clear()
    follow = repeats.follow
    monkeypatch.setattr(repeats, "follow", lambda call, t: (functions.append(call.func), follow(call, t))[1])


def test_later_steps_take_the_hot_path_at_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()

    def step(batch: int, length: int) -> None:
        with record(model, keep="norms", verify=False):
            compute_loss(model(torch.randn(batch, length, D))).sum().backward()

    slow: list[Any] = []
    note_steps(monkeypatch, slow)
    step(3, 5)
    step(3, 7)
    for batch, length in ((5, 6), (2, 9), (7, 3)):
        slow.clear()
        step(batch, length)
        assert not {F.linear, F.layer_norm, torch.tanh} & set(slow)


@pytest.mark.parametrize("batch", [2, 3])
def test_a_weight_with_a_row_for_each_sample_is_no_shared_weight(batch: int) -> None:
    """The same functions, layouts and dimensions, and yet another meaning."""
    shared = Calls(lambda m, x: x * m.w, w=nn.Parameter(torch.randn(1, D, dtype=torch.float64)))
    own = Calls(lambda m, x: x * m.w, w=nn.Parameter(torch.randn(batch, D, dtype=torch.float64)))
    x = torch.randn(batch, D, dtype=torch.float64)
    for _ in range(2):
        check(shared, x)
        with record(own) as grads:
            compute_loss(own(x)).sum().backward()
        rows = grads.dense()["w"]
        for n in range(batch):
            (expected,) = torch.autograd.grad(compute_loss(own(x))[n], own.w)
            torch.testing.assert_close(rows[n], expected)


def test_mixing_is_refused_on_the_hot_path_too() -> None:
    model = Calls(lambda m, x: m.a(x).softmax(m.dim), a=nn.Linear(D, D))
    for dim in (1, 1, 0, 0, 1):
        model.dim = dim
        if dim:
            with record(model):
                compute_loss(model(torch.randn(3, D))).sum().backward()
        else:
            with pytest.raises(SamplesMixed), record(model):
                compute_loss(model(torch.randn(3, D))).sum().backward()


# By name: where the samples and their targets lie, for `(B, T, C)` scores and `(B, T)` classes.
TARGETS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "first": lambda h, y: (h[:, 0], y[:, 0]),
    "merged": lambda h, y: (h.flatten(0, 1), y.flatten()),
    "positions": lambda h, y: (h.transpose(1, 2), y),
    "probabilities": lambda h, y: (h[:, 0], h.detach()[:, 1].softmax(1)),
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_of_classes_at_every_shape(name: str, smoothing: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def sum_class_losses(model: nn.Module, x: Tensor) -> Tensor:
        scores, target = TARGETS[name](model(x), x.argmax(2))
        ignored = -100 if target.is_floating_point() else 1
        losses = F.cross_entropy(scores, target, reduction="none", ignore_index=ignored, label_smoothing=smoothing)
        return losses.view(len(x), -1).sum(1).sum()

    model, slow = nn.Linear(D, D).double(), []
    note_steps(monkeypatch, slow)
    for batch, length in ((3, 5), (4, 5), (2, 5), (5, 5), (3, 2)):
        x = torch.randn(batch, length, D, dtype=torch.float64)
        slow.clear()
        with record(model) as grads:
            sum_class_losses(model, x).backward()
        assert_rows_close(grads.dense(), loop_gradients(model, x, sum_class_losses))
        assert (F.cross_entropy in slow) == (batch == 3 and (length == 5 or name == "merged"))


def test_targets_in_another_order_are_refused_on_the_hot_path_too() -> None:
    model, x = nn.Linear(D, D), torch.randn(3, 2, D)
    for is_right in (True, True, False, True):
        with nullcontext() if is_right else pytest.raises(SamplesMixed), record(model):
            y = x.argmax(2)
            scores, target = model(x).flatten(0, 1), (y if is_right else y.t()).flatten()
            F.cross_entropy(scores, target, reduction="none").view(3, 2).sum(1).sum().backward()


# ---- calls that differ only in what a key might leave out ----

WITH_NUMBERS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "layer_norm eps": lambda h, w, number: F.layer_norm(h, (D,), w, eps=number),
    "rms_norm eps": lambda h, w, number: F.rms_norm(h, (D,), w, number),
    "group_norm eps": lambda h, w, number: F.group_norm(h, 2, w, eps=number),
    "batch_norm eps": lambda h, w, number: F.batch_norm(h, torch.zeros_like(w), torch.ones_like(w), w, eps=number),
    "add alpha": lambda h, w, number: torch.add(h, w, alpha=number),
    "sub alpha": lambda h, w, number: h.sub(w, alpha=number),
    "addmm beta": lambda h, w, number: torch.addmm(w, h, torch.eye(D, dtype=h.dtype), beta=number),
    "lerp": lambda h, w, number: torch.lerp(h, w, number),
}


@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_two_uses_that_differ_in_a_number(name: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return WITH_NUMBERS[name](WITH_NUMBERS[name](m.a(x), m.v, 0.25), m.w, 2.0)  # type: ignore[no-any-return]

    weights = [nn.Parameter(torch.randn(D)) for _ in range(2)]
    model = Calls(forward, a=nn.Linear(D, D), v=weights[0], w=weights[1]).double()
    for batch in (3, 3, 5):
        check(model, torch.randn(batch, D, dtype=torch.float64))


def test_two_kernels_of_different_sizes_with_results_of_one_shape() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        return m.b(h) + m.c(h) + m.d(h)  # type: ignore[no-any-return]

    kernels = {name: nn.Conv1d(2, 2, size, stride=2) for name, size in (("b", 2), ("c", 3), ("d", 2))}
    model = Calls(forward, a=nn.Conv1d(2, 2, 3), **kernels).double()
    for _ in range(2):
        check(model, torch.randn(3, 2, 7, dtype=torch.float64))


@pytest.mark.parametrize("added", [(0, 2), (2, 0), (0, 3), (0, 4)])
def test_rows_beside_the_samples_at_other_batch_sizes(added: tuple[int, int]) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        padded = F.pad(m.a(x), (0, 0, *added)).sin()
        return m.a(padded)[added[0] : added[0] + len(x)]  # type: ignore[no-any-return]

    model = Calls(forward, a=nn.Linear(D, D)).double()
    for batch in (2, 3, 4, 3, 6):
        check(model, torch.randn(batch, D, dtype=torch.float64))


LEAVES: dict[str, Callable[[Tensor], Tensor]] = {
    "requires_grad_": lambda x: x.clone().requires_grad_(),
    "requires_grad_ of an argument": lambda x: x.requires_grad_(),
    "a detached result": lambda x: x.sin().detach().requires_grad_().view(x.shape),
    "an attribute": lambda x: (x := x.clone(), setattr(x, "requires_grad", True))[0],
    "a new tensor": lambda x: x + torch.zeros_like(x, requires_grad=True),
}


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_that_the_model_makes(name: str) -> None:
    """No tap is behind the activations of the first layer."""
    model = Calls(lambda m, x: m.b(m.a(LEAVES[name](x)).tanh()), a=nn.Linear(D, D), b=nn.Linear(D, D)).double()
    single = Calls(lambda m, x: m.a(LEAVES[name](x.sin())), a=nn.Linear(D, D)).double()
    check(Net().double(), torch.randn(3, D, dtype=torch.float64))
    for _ in range(3):
        check(model, torch.randn(3, D, dtype=torch.float64))
        check(single, torch.randn(3, D, dtype=torch.float64))


FOREIGN = nn.Linear(D, D).double()

OTHER_GRAPHS: dict[str, Callable[[Tensor], Tensor]] = {
    "another model": lambda x: FOREIGN(x).tanh(),
    "a leaf": lambda x: x * FOREIGN.bias,
    "a tensor from a leaf": lambda x: x * FOREIGN.bias.sin(),
    "a new leaf": lambda x: x + torch.zeros(D, dtype=x.dtype, requires_grad=True),
}


@pytest.mark.parametrize("name", OTHER_GRAPHS)
def test_activations_with_a_graph_that_is_not_recorded(name: str) -> None:
    """They require grad, and no tap is behind them."""
    model = Calls(lambda m, x: m.b(m.a(OTHER_GRAPHS[name](x)).tanh()), a=nn.Linear(D, D), b=nn.Linear(D, D)).double()
    check(Net().double(), torch.randn(3, D, dtype=torch.float64))
    for _ in range(2):
        check(model, torch.randn(3, D, dtype=torch.float64))
    FOREIGN.zero_grad()


def test_weights_that_the_model_freezes_for_a_while() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.a.requires_grad_(False)
        first = m.a(x)
        m.a.requires_grad_(True)
        return m.b(first.tanh()) + m.a(x)  # type: ignore[no-any-return]

    model = Calls(forward, a=nn.Linear(D, D), b=nn.Linear(D, D)).double()
    for _ in range(2):
        check(model, torch.randn(3, D, dtype=torch.float64))


@pytest.mark.parametrize("change", [lambda u: u, lambda u: u.relu_(), lambda u: u.square()])
def test_second_derivatives_of_activations_are_refused(change: Callable[[Tensor], Tensor]) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        (slope,) = torch.autograd.grad(change(m.b(h.tanh())).sum(), h, create_graph=True)
        return m.a(h) * slope  # type: ignore[no-any-return]

    check(Net().double(), torch.randn(3, D, dtype=torch.float64))
    model = Calls(forward, a=nn.Linear(D, D), b=nn.Linear(D, D)).double()
    for _ in range(2):
        with pytest.raises(PerSampleError, match="create_graph=True"), record(model):
            sum_losses(model, torch.randn(3, D, dtype=torch.float64)).backward()


def make_key_of(*args: Any) -> Any:
    found = make_size_free_key(make_call(torch.sum, args, {}, 3, lambda tensor: None), {}, True)
    assert found is not None
    return found[0]


def test_tuples_that_are_equal_but_of_other_types_have_other_keys() -> None:
    integers, booleans, floats = make_key_of((1, 0)), make_key_of((True, False)), make_key_of((1.0, 0.0))
    assert len({integers, booleans, floats}) == 3
    assert integers == make_key_of(tuple([1, 0]))


# ---- hooks of the user on the results of uses ----


def double(grad: Tensor) -> Tensor:
    return 2 * grad


@pytest.mark.parametrize("place", ["inside the model", "in the block", "after the block"])
def test_hooks_that_change_the_gradient_of_a_result(place: str) -> None:
    """The weights of the use receive what the hook returns, as in a plain step."""
    torch.manual_seed(0)

    class Model(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            result = super().forward(x)
            if place == "inside the model":
                result.register_hook(double)
            return result

    model, x = Model(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(), torch.randn(4, 4, dtype=torch.float64)

    def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
        result = model(x)
        if place != "inside the model":
            result.register_hook(double)
        return result.square().sum()

    expected = loop_gradients(model, x, compute_loss)
    for _ in range(3):
        with record(model) as grads:
            if place == "after the block":
                result = model(x)
            else:
                compute_loss(model, x).backward()
        if place == "after the block":
            result.register_hook(double)
            result.square().sum().backward()
        assert_rows_close(grads.dense(), expected)


def test_the_gradient_of_a_result_alone_may_have_a_graph() -> None:
    """A pass that ends at the result of a use does not reach the use."""
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(4, 4)
    for _ in range(3):
        with record(model) as grads:
            result = model(x)
            (found,) = torch.autograd.grad(result.pow(3).sum(), result, create_graph=True)
            result.square().sum().backward()
        assert torch.allclose(found, 3 * result.square())
        assert grads.norms().shape == (4,)
