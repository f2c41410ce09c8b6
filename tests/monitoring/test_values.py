"""value(): sums equal the first-order change of the validation loss, and values are Shapley values."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import persample
from persample import PerSampleError
from persample.testing import loop_gradients

pytestmark = pytest.mark.quick

SIZE, CLASSES, RATE = 5, 3, 0.1
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=RATE, weight_decay=0.1),
    "maximized": lambda p: torch.optim.SGD(p, lr=RATE, maximize=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.9, dampening=0.3),
    "Nesterov": lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, CLASSES)).double()


def make_batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    for _ in range(count):
        yield torch.randn(SIZE, 4).double(), torch.randint(CLASSES, (SIZE,))


X, Y = torch.randn(7, 4, generator=torch.Generator().manual_seed(2)).double(), torch.arange(7) % CLASSES


def validate(model: Any) -> Tensor:
    return F.cross_entropy(model(X), Y)


def differentiate(model: nn.Module) -> Tensor:
    model = copy.deepcopy(model)  # whose calls are not measured
    return flatten(torch.autograd.grad(validate(model), list(model.parameters())))


def flatten(parts: Any) -> Tensor:
    return torch.cat([part.detach().flatten() for part in parts])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sums_equal_the_first_order_change_of_the_validation_loss(name: str, reduction: str) -> None:
    """The change by the whole step, less the change by a step with the same normalisation and the gradient zero."""
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    with persample.value(model, validation=validate, optimizer=optimizer) as values:
        for x, y in make_batches(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y, reduction=reduction).backward()
            gradient, before = differentiate(model), flatten(model.parameters())
            rest = compute_rest(optimizer, model)
            optimizer.step()
            change = float(gradient @ (flatten(model.parameters()) - before - rest))
            assert values.latest is not None and change
            torch.testing.assert_close(-float(values.latest.values.sum()), change, rtol=1e-9, atol=0)


def compute_rest(optimizer: Any, model: nn.Module) -> Tensor:
    """What a step does without the gradient of the batch: momentum of earlier steps, weight decay."""
    found = []
    (group,) = optimizer.param_groups
    for p in model.parameters():
        state = optimizer.state.get(p, {})
        decay, rate = group["weight_decay"] * p.detach(), group["lr"]
        if isinstance(optimizer, torch.optim.SGD):
            old = state.get("momentum_buffer")
            old = torch.zeros_like(p) if old is None else group["momentum"] * old
            found.append(-rate * ((group["momentum"] * old if group["nesterov"] else old) + decay))
            continue
        (beta1, beta2), step = group["betas"], float(state.get("step", 0)) + 1
        is_decoupled = isinstance(optimizer, torch.optim.AdamW)
        grad = p.grad if is_decoupled else p.grad + decay
        squares = beta2 * state.get("exp_avg_sq", torch.zeros_like(p)) + (1 - beta2) * grad.square()
        squares = torch.maximum(squares, state.get("max_exp_avg_sq", squares)) if group["amsgrad"] else squares
        scale = (squares / (1 - beta2**step)).sqrt() + group["eps"]
        moment = beta1 * state.get("exp_avg", torch.zeros_like(p)) + (0 if is_decoupled else (1 - beta1) * decay)
        found.append(-rate * moment / (1 - beta1**step) / scale - (rate * decay if is_decoupled else 0))
    return flatten(found)


def test_muon_has_a_matrix_form() -> None:
    """torch runs the iteration in bfloat16, so its update differs by that much."""
    model = make_model()
    weights = [p for p in model.parameters() if p.dim() == 2]
    optimizer = torch.optim.Muon(weights, lr=RATE, weight_decay=0.0, momentum=0.5)
    with persample.value(model, validation=validate, optimizer=optimizer) as values:
        ((x, y),) = make_batches(1)
        F.cross_entropy(model(x), y).backward()
        gradient, before = differentiate(model), flatten(model.parameters())
        optimizer.step()
    change = float(gradient @ (flatten(model.parameters()) - before))
    assert values.latest is not None
    torch.testing.assert_close(-float(values.latest.values.sum()), change, rtol=0.03, atol=0)


def compute_shapley(count: int, play: Callable[[tuple[int, ...]], float]) -> list[float]:
    """The Shapley values of a game, by its definition."""
    found = []
    for i in range(count):
        others, total = [j for j in range(count) if j != i], 0.0
        for size in range(count):
            weight = math.factorial(size) * math.factorial(count - 1 - size) / math.factorial(count)
            for group in itertools.combinations(others, size):
                total += weight * (play((*group, i)) - play(group))
        found.append(total)
    return found


@pytest.mark.parametrize("order", [1, 2])
def test_values_are_shapley_values(order: Any) -> None:
    """Efficiency, symmetry and the dummy player follow, and are tested on their own."""
    model = make_model()
    ((x, y),) = make_batches(1)
    x[1], y[1] = x[0], y[0]
    weights = torch.ones(SIZE).double()
    weights[2] = 0.0  # a player without an effect
    rows = loop_gradients(
        model, (x, y, weights), lambda m, b: (F.cross_entropy(m(b[0]), b[1], reduction="none") * b[2]).sum()
    )
    matrix = torch.cat([part.flatten(1) for part in rows.values()], 1) * RATE / SIZE
    gradient = differentiate(model)
    parameters = list(model.parameters())
    parts = torch.autograd.grad(validate(model), parameters, create_graph=True)
    flat = torch.cat([part.flatten() for part in parts])
    hessian = torch.stack([flatten(torch.autograd.grad(one, parameters, retain_graph=True)) for one in flat])

    def play(group: tuple[int, ...]) -> float:
        step = matrix[list(group)].sum(0)
        curved = 0.5 * step @ hessian @ step if order == 2 else 0.0
        return float(gradient @ step - curved)

    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with persample.value(model, validation=validate, optimizer=optimizer, order=order) as values:
        (F.cross_entropy(model(x), y, reduction="none") * weights).mean().backward()
    assert values.latest is not None
    found = values.latest.values
    expected = torch.tensor(compute_shapley(SIZE, play), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-15)
    assert float(found.sum()) == pytest.approx(play(tuple(range(SIZE))), rel=1e-9)
    assert float(found[0]) == pytest.approx(float(found[1]), rel=1e-9) and float(found[2]) == 0.0


def train(values_of: Any = None, steps: int = 6, model: nn.Module | None = None, **options: Any) -> Any:
    """Train on 15 examples in batches of 5, twice; returns the weights and the values."""
    model = make_model() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    batches = list(make_batches(3)) * 2
    with persample.value(model, validation=validate, optimizer=optimizer, **options) as values:
        if values_of is not None:
            values.load_state_dict(values_of)
        for t, (x, y) in enumerate(batches[:steps]):
            values.ids = [f"{t % 3}/{n}" for n in range(SIZE)]
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return flatten(model.parameters()), values


def test_totals_equal_a_loop_and_the_run_stays_as_it_is() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    expected: dict[str, float] = {}
    for t, (x, y) in enumerate(list(make_batches(3)) * 2):
        own = RATE
        gradient = differentiate(model)
        for n in range(SIZE):
            parts = torch.autograd.grad(F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]), list(model.parameters()))
            key = f"{t % 3}/{n}"
            expected[key] = expected.get(key, 0.0) + own * float(gradient @ flatten(parts)) / SIZE
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    weights, values = train()
    torch.testing.assert_close(weights, flatten(model.parameters()), rtol=1e-12, atol=1e-14)
    assert values.totals() == pytest.approx(expected, rel=1e-9)
    assert set(values.counts().values()) == {2}
    worst = min(expected, key=lambda key: expected[key])
    assert values.ranked(1)[0][0] == worst


def test_checkpoints_keep_the_totals() -> None:
    model = make_model()
    _, first = train(steps=3, model=model)
    state = first.state_dict()
    _, second = train(values_of=state, steps=0, model=model)
    assert second.totals() == first.totals() and second.step == 3


def test_one_gradient_of_the_validation_loss_serves_several_steps() -> None:
    calls = []

    def count(model: Any) -> Tensor:
        calls.append(model.training)
        return validate(model)

    model = make_model()
    with persample.value(model, validation=count, refresh=3) as values:
        for x, y in make_batches(6):
            F.cross_entropy(model(x), y).backward()
            assert model.training and all(module.training for module in model.modules())
    assert calls == [False, False] and values.latest is not None and values.latest.ids is None and not values.totals()


def test_values_share_the_recording_of_a_monitor() -> None:
    for first in (True, False):
        model = make_model()
        watching = persample.monitor(model, every=2) if first else None
        values = persample.value(model, validation=validate)
        watching = watching or persample.monitor(model, every=2)
        for x, y in make_batches(4):
            F.cross_entropy(model(x), y).backward()
        watching.stop(), values.stop()
        assert [found.step for found in watching.history] == [0, 2] and values.latest.step == 3
        assert all(found.noise is not None for found in watching.history)
        assert not model._forward_pre_hooks and all(not p._backward_hooks for p in model.parameters())


def test_attention_has_a_second_order() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(3, 4, 8)
    with persample.value(model, validation=lambda m: m(x).square().mean(), order=2) as values:
        model(x).square().mean().backward()
    assert values.latest is not None and bool(values.latest.values.isfinite().all())


class Tied(nn.Module):
    """Sequences; one weight has two uses, and a table has sparse rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.layer = nn.Embedding(9, 6), nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.layer(self.table(ids))))
        return (h + self.layer(h)).mean(1)[:, :CLASSES]


def make_convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 18, CLASSES))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "layers": (make_model, lambda n: torch.randn(n, 4)),
    "sequences": (Tied, lambda n: torch.randint(9, (n, 20))),
    "convolutions": (make_convolutions, lambda n: torch.randn(n, 2, 20)),
}


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", ["none", "momentum", "AdamW"])
@pytest.mark.parametrize("kind", MODELS)
def test_values_from_the_terms_equal_a_loop(kind: str, name: str, joint: bool) -> None:
    """Also if the examples of validation are part of the batch, whose gradient is then left out."""
    make, draw = MODELS[kind]
    torch.manual_seed(3)
    model = make().double()
    x, held_out = (t.double() if t.is_floating_point() else t for t in (draw(SIZE), draw(7)))
    y = torch.arange(SIZE) % CLASSES
    parameters = list(model.parameters())
    optimizer = OPTIMIZERS[name](parameters) if name in OPTIMIZERS else None
    rows = torch.stack(
        [
            flatten(torch.autograd.grad(F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]) / SIZE, parameters))
            for n in range(SIZE)
        ]
    )
    direction = flatten(torch.autograd.grad(F.cross_entropy(model(held_out), Y), parameters))
    if name == "momentum":
        direction = direction * RATE
    elif name == "AdamW":  # in its first step
        total = rows.sum(0)
        direction = direction * 1e-3 / (total.abs() + 1e-8)

    def validate_model(m: Any) -> Tensor:
        return F.cross_entropy(m(held_out), Y)

    with persample.value(model, validation=7 if joint else validate_model, optimizer=optimizer) as values:
        values.ids = range(SIZE)
        if joint:
            out = model(torch.cat([x, held_out]))
            (F.cross_entropy(out[:SIZE], y) + F.cross_entropy(out[SIZE:], Y)).backward()
        else:
            F.cross_entropy(model(x), y).backward()
    assert values.latest is not None and values.latest.ids == list(range(SIZE))
    torch.testing.assert_close(values.latest.values, rows @ direction, rtol=1e-7, atol=1e-12)
    torch.testing.assert_close(flatten(p.grad for p in parameters), rows.sum(0), rtol=1e-9, atol=1e-12)


def test_examples_of_validation_are_never_trained_on() -> None:
    """A step whose gradient would contain them is an error, also in eval() and for a model that is refused."""
    model, data = make_model(), torch.cat([next(make_batches(1))[0], X])
    labels = torch.arange(len(data)) % CLASSES
    with persample.value(model, validation=7) as values:
        model.eval()
        F.cross_entropy(model(data), labels).backward()
        assert values.latest is not None and len(values.latest.values) == SIZE
        with pytest.raises(PerSampleError, match="of which 7 should be of validation"):
            model(X[:3]).square().mean().backward()
    for options in ({"every": 2}, {"order": 2}, {"parameters": ["0.weight"]}, {"refresh": 2}):
        with pytest.raises(PerSampleError, match="With a number of examples as validation"):
            persample.value(model, validation=7, **options)  # type: ignore[arg-type]
    mixing = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, CLASSES)).double()
    with persample.value(mixing, validation=7), pytest.raises(PerSampleError):
        F.cross_entropy(mixing(data), labels).backward()
    recorded, refused = persample.record(make_model()), pytest.raises(PerSampleError, match="Something else records")
    with persample.value(model, validation=7), recorded, refused:
        model(data)


def test_a_call_without_a_backward_pass_is_given_up() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with persample.value(model, validation=validate) as values:
        for x, y in make_batches(2):
            model(x)
            values.ids = range(SIZE)
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.1)
            expected = differentiate(model)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            found = values.latest
            assert found is not None and found.ids == list(range(SIZE))
            assert float(found.values.sum()) == pytest.approx(
                float(expected @ flatten(p.grad for p in model.parameters())), rel=1e-9
            )


def test_what_cannot_be_computed_at_once_is_computed_from_the_next_step_on() -> None:
    """Adam needs the gradient of a penalty, which arrives last."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with persample.value(model, validation=validate, optimizer=optimizer) as values:
        for x, y in make_batches(3):
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) + 0.1 * sum(p.square().sum() for p in model.parameters())).backward()
    assert values.latest is not None and values.latest.step == 2


@pytest.mark.filterwarnings("ignore")
def test_reentrant_checkpoints_are_valued_from_the_second_step_on() -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            hidden = super().forward
            return checkpoint(hidden, x, use_reentrant=True) if self.training else hidden(x)

    model = nn.Sequential(nn.Linear(4, 8), Checkpointed(nn.Linear(8, CLASSES), nn.Tanh())).double()
    found = []
    with persample.value(model, validation=validate) as values:
        for x, y in make_batches(3):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            change = float(differentiate(model.eval()) @ flatten(p.grad for p in model.parameters()))
            model.train()
            found.append((None if values.latest is None else float(values.latest.values.sum()), change))
    assert found[0][0] is None
    assert [one for one, _ in found[1:]] == pytest.approx([change for _, change in found[1:]], rel=1e-6)


def test_a_value_is_zero_without_a_finite_gradient() -> None:
    model = nn.Linear(4, 3)
    x = torch.ones(3, 4)
    x[1] = torch.inf
    with persample.value(model, validation=lambda m: m(torch.ones(2, 4)).square().mean()) as values:
        model(x).square().mean().backward()
    assert values.latest is not None
    found = values.latest.values
    assert float(found[1]) == 0.0 and bool(found[[0, 2]].isfinite().all()) and bool(found[[0, 2]].all())


def test_the_age_of_the_gradient_is_told() -> None:
    model, ages = make_model(), []
    with persample.value(model, validation=validate, refresh=3) as values:
        for x, y in make_batches(4):
            F.cross_entropy(model(x), y).backward()
            ages.append(values.latest.age if values.latest is not None else None)
    assert ages == [0, 1, 2, 0]


def test_refusals() -> None:
    model = make_model()
    with pytest.raises(PerSampleError, match="The update of Adagrad is not known"):
        persample.value(model, validation=validate, optimizer=torch.optim.Adagrad(model.parameters()))
    with pytest.raises(PerSampleError, match="order must be 1 or 2"):
        persample.value(model, validation=validate, order=2, refresh=2)


def test_a_validation_that_returns_no_loss_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    with persample.value(model, validation=lambda m: m(X)):
        ((x, y),) = make_batches(1)
        F.cross_entropy(model(x), y).backward()
    assert "validation must return a loss without dimensions" in caplog.text


@pytest.mark.parametrize("make", [lambda m: persample.value(m, validation=validate), persample.dynamics])
@pytest.mark.filterwarnings("ignore:Secure RNG")
def test_private_training_goes_on_and_is_not_measured(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    from persample.private import PrivacyEngine

    model = make_model()
    data = torch.utils.data.TensorDataset(*next(make_batches(1)))
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=RATE), noise_multiplier=1.0, max_grad_norm=1.0,
        data_loader=torch.utils.data.DataLoader(data, batch_size=SIZE), poisson_sampling=False,
    )  # fmt: skip
    before = flatten(model.parameters())
    with make(model) as found:
        for x, y in loader:
            found.ids = range(SIZE)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    optimizer.release()
    assert "without its rows" in caplog.text and not torch.equal(flatten(model.parameters()), before)
