"""Calls of submodules in place of the model: what is recorded is known by parameter, not by the entry point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import PerSampleError, record, watch
from persample.errors import SamplesMixed
from persample.isolation import Isolation


class Model(nn.Module):
    """Words and positions, a recurrent layer with a state, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(11, 6), nn.Embedding(7, 6)
        self.recurrent = nn.GRU(6, 5, num_layers=2, batch_first=True)
        self.encoder = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.LayerNorm(8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        h = self.words(x) + self.positions(torch.arange(x.shape[1]))
        return self.head(self.encoder(self.recurrent(h, state)[0]))


def call_parts(model: Model, x: Tensor, state: Tensor) -> Tensor:
    h = model.words(x) + model.positions(torch.arange(x.shape[1]))
    return model.head(model.encoder(model.recurrent(h, state)[0]))


def call_positions_first(model: Model, x: Tensor, state: Tensor) -> Tensor:
    positions = model.positions(torch.arange(x.shape[1]))
    h = model.recurrent(model.words(x) + positions, state)[0]
    return model.head(model.encoder(h))


def call_small_parts(model: Model, x: Tensor, state: Tensor) -> Tensor:
    h = model.words(x) + model.positions(torch.arange(x.shape[1]))[None]
    h, _ = model.recurrent(h, state)
    h = model.encoder[2](model.encoder[1](model.encoder[0](h.flatten(0, 1))))
    return model.head(h).unflatten(0, x.shape)


def call_one_part_twice(model: Model, x: Tensor, state: Tensor) -> Tensor:
    h = model.words(x.flip(1)).flip(1) + model.positions(torch.arange(x.shape[1]))
    return model.head(model.encoder(model.recurrent(h, state)[0]))


def make_inputs(batch: int, length: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(batch)
    return (
        torch.randint(11, (batch, length)),
        torch.randn(2, batch, 5, dtype=torch.float64),
        torch.randint(4, (batch, length)),
    )


def compute_loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1).mean()


def compute_rows_by_loop(model: Model, x: Tensor, state: Tensor, y: Tensor) -> Tensor:
    rows = []
    for n in range(len(x)):
        loss = compute_loss(model(x[n : n + 1], state[:, n : n + 1]), y[n : n + 1])
        grads = torch.autograd.grad(loss, list(model.parameters()))
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    return torch.stack(rows)


CLIP = {"keep": "clip", "max_norm": 0.1, "loss_reduction": "mean"}


@pytest.mark.parametrize("call", [call_parts, call_positions_first, call_small_parts, call_one_part_twice])
@pytest.mark.parametrize("options", [{}, CLIP, {**CLIP, "guard": Isolation, "verify": "always"}, {**CLIP, "passes": 2}])
def test_calls_of_parts_equal_calls_of_the_model(call: Callable[..., Tensor], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    if "guard" in options:
        options = {**options, "guard": options["guard"]()}
    model = Model().double()
    batches = [make_inputs(batch) for batch in (3, 5, 4, 2)]  # 4 is the length, 2 the number of layers
    expected = [compute_rows_by_loop(model, *batch) for batch in batches]
    found: list[Any] = []
    with watch(model, found.append, options) as watched:
        for (x, state, y), rows in zip(batches, expected, strict=True):
            if len(x) == x.shape[1] and call is call_positions_first:
                continue  # positions would be taken for samples
            watched.add_samples((x, y))
            compute_loss(call(model, x, state), y).backward()
            with torch.no_grad():
                call(model, x, state)
            got = found.pop()
            torch.testing.assert_close(got.norms(), rows.norm(dim=1))
            if "max_norm" in options:
                clipped = torch.cat([total.flatten() for total in got.clip().values()])
                factors = (0.1 / rows.norm(dim=1)).clamp(max=1)
                torch.testing.assert_close(clipped, factors @ rows)
            else:
                dense = torch.cat([part.flatten(1) for part in got.dense().values()], 1)
                torch.testing.assert_close(dense, rows)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_states_of_recurrent_layers_need_no_batch_dim() -> None:
    torch.manual_seed(0)
    model = Model().double()
    for batch in (3, 5, 4, 2):
        x, state, y = make_inputs(batch)
        with record(model) as grads:
            compute_loss(model(x, state), y).backward()
        dense = torch.cat([part.flatten(1) for part in grads.dense().values()], 1)
        torch.testing.assert_close(dense, compute_rows_by_loop(model, x, state, y))


def test_arguments_that_do_not_fit_are_refused() -> None:
    model = Model().double()
    x, state, _ = make_inputs(5)
    for wrong in (state[:, :3, :3], state.flatten(0, 1)[:7, :3]):
        with record(model), pytest.raises(PerSampleError, match="different sizes"):
            model(x, wrong)
    with record(model, batch_dim={"x": 0, "state": 0}), pytest.raises(PerSampleError, match="different sizes"):
        model(x, state)


def test_parts_that_mix_samples_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with watch(model, lambda grads: None, {}), pytest.raises(SamplesMixed, match="'1'"):
        model[2](model[1](model[0](torch.randn(5, 3)))).sum().backward()


def test_a_new_batch_while_the_last_output_is_alive() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    found: list[Any] = []
    with watch(model, found.append, {}):
        kept = model[1](model[0](torch.randn(5, 3)))
        model[1](model[0](torch.randn(4, 3))).square().sum().backward()
        assert found.pop().batch_size == 4
        with pytest.raises(PerSampleError):
            kept.sum().backward()


def test_an_interrupt_in_a_part() -> None:
    class Interrupted(nn.Linear):
        is_interrupted = True

        def forward(self, x: Tensor) -> Tensor:
            if self.is_interrupted:
                raise KeyboardInterrupt
            return super().forward(x)

    model = nn.Sequential(Interrupted(3, 4), nn.Linear(4, 2))
    found: list[Any] = []
    with watch(model, found.append, {}):
        with pytest.raises(KeyboardInterrupt):
            model[0](torch.randn(5, 3))
        model[0].is_interrupted = False
        model[1](model[0](torch.randn(4, 3))).sum().backward()
    assert found.pop().batch_size == 4


def test_a_part_without_samples_is_not_recorded() -> None:
    class Prompt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self) -> Tensor:
            return 2 * self.weight

    model = nn.Sequential(Prompt(), nn.Linear(3, 2))
    found: list[Any] = []
    with watch(model, found.append, {}) as watched:
        assert model[0]().shape == (3,)
        with pytest.raises(PerSampleError, match="not recorded"):
            model[0]().sum().backward()
        x = torch.randn(4, 3)
        watched.add_samples(x)
        model[1](x + model[0]()).sum().backward()
    assert found.pop().norms(per_parameter=True)["0.weight"].shape == (4,)


def test_a_compiled_part_is_called_as_a_whole() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with watch(model, lambda grads: None, {}), torch.no_grad():
        compiled = torch.compile(model[:2], backend="eager", fullgraph=True)
        x = torch.randn(5, 3)
        torch.testing.assert_close(compiled(x), model[1](model[0](x)))
