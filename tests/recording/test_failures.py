"""After a failure anywhere in a step, everything is as after the same failure without persample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from persample import PerSampleError, call_for_per_sample_grads, record, watch

B, D = 4, 3


class Stop(BaseException):
    """Like an interrupt: not an Exception."""


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, error: BaseException) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ctx.error


class Model(nn.Module):
    """Fails at a place that is set from outside. Its parts have a buffer, dropout and a transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 2)
        self.norm = nn.BatchNorm1d(D).eval()
        self.transformer = nn.TransformerEncoderLayer(D, 1, 4, dropout=0.1, batch_first=True)
        self.register_buffer("count", torch.zeros(2))
        self.place, self.error = "", ValueError()

    def fail(self, place: str) -> None:
        if self.place == place:
            raise self.error

    def forward(self, x: Tensor) -> Tensor:
        self.fail("start of forward")
        self.count[0] += 1
        h = F.dropout(self.norm(self.first(x)), 0.5)
        self.fail("middle of forward")
        h = checkpoint(self.run_last, self.transformer(h.unsqueeze(1)).squeeze(1), use_reentrant=False)
        if self.place == "backward":
            h = Raises.apply(h, self.error)
        if self.place == "hook of an activation":
            h.register_hook(self.raise_in_hook)
        if self.place == "mixed samples":
            h = h - h.mean(0)
        if self.place == "mixed samples before a weight":
            h = self.last(self.first(x).softmax(0))
        if self.place == "unknown use":
            h = h + self.last.weight.sum()
        return h

    def run_last(self, h: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() >= 0:
            self.fail("recomputation")
        return self.last(h)

    def raise_in_hook(self, grad: Tensor) -> None:
        raise self.error


# Places where the user's code fails, and places where a recording refuses.
PLACES = [
    "start of forward", "middle of forward", "loss", "backward", "hook of an activation", "recomputation", "receive",
]  # fmt: skip
REFUSED = ["mixed samples", "mixed samples before a weight", "wrong batch", "penalty"]


def read_everything(model: nn.Module) -> dict[str, Any]:
    """Everything around a step that could be left changed."""
    modules = list(model.modules())
    return {
        "parameters": {name: (id(p), p._version, p.detach().clone()) for name, p in model.named_parameters()},
        "grads": {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        "attributes of parameters": {name: sorted(vars(p)) for name, p in model.named_parameters()},
        "hooks of parameters": [
            len(hooks or ()) for p in model.parameters() for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)
        ],
        "flags": [(p.requires_grad, p.is_leaf) for p in model.parameters()],
        "training": [m.training for m in modules],
        "attributes of modules": [sorted(vars(m)) for m in modules],
        "hooks of modules": [
            {key: len(value) for key, value in vars(m).items() if "hook" in key and value is not None} for m in modules
        ],
        "function modes": list(map(type, _get_current_function_mode_stack())),
        "dispatch modes": list(map(type, _get_current_dispatch_mode_stack())),
        "saved tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(False),
        "settings": (
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
            torch.get_default_dtype(), torch.is_anomaly_enabled(), torch._C._current_graph_task_id(),
        ),
        "buffers": {name: b.clone() for name, b in model.named_buffers()},
        "rng": torch.get_rng_state(),
    }  # fmt: skip


def check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key, value in expected.items():
        if key in ("parameters", "grads", "buffers", "rng"):
            torch.testing.assert_close(found[key], value, rtol=0, atol=0, msg=lambda text, key=key: f"{key}: {text}")
        else:
            assert found[key] == value, key


def run_step(model: Model, x: Tensor) -> None:
    out = model(x)
    model.fail("loss")
    if model.place == "penalty":
        out = out.square().sum() + model.last.weight.square().sum()
    out.square().sum().backward()


def run_plain(model: Model, x: Tensor) -> None:
    run_step(model, x)
    model.fail("receive")


def run_record(model: Model, x: Tensor, **options: Any) -> None:
    if model.place == "wrong batch":
        options["batch_size"] = B + 1
    with record(model, **options) as grads:
        run_step(model, x)
        grads.norms()
        model.fail("receive")


def run_watch(model: Model, x: Tensor) -> None:
    def receive(grads: Any) -> None:
        model.fail("receive")

    options = {"keep": "clip", "max_norm": 1.0, **({"batch_size": B + 1} if model.place == "wrong batch" else {})}
    with watch(model, receive, options):
        run_step(model, x)


def run_dropped_watch(model: Model, x: Tensor) -> None:
    """The watch is stopped later, after the error."""

    def receive(grads: Any) -> None:
        model.fail("receive")

    watched = watch(model, receive, {"batch_size": B + 1} if model.place == "wrong batch" else {})
    try:
        run_step(model, x)
    except BaseException as error:
        watched.stop()
        raise error


FRONT_ENDS: dict[str, Callable[[Model, Tensor], None]] = {
    "record": run_record,
    "two passes": lambda model, x: run_record(model, x, keep="clip", max_norm=1.0, passes=2),
    "watch": run_watch,
    "watch, stopped later": run_dropped_watch,
}


def make_model(place: str, error: BaseException) -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(B, D)
    model.place, model.error = place, error  # type: ignore[assignment]
    for p in model.parameters():
        p.grad = torch.ones_like(p)  # must survive
    return model, x


@pytest.mark.parametrize(
    ("front_end", "error"),
    [*((front_end, ValueError) for front_end in FRONT_ENDS), ("record", Stop), ("watch", Stop)],
)
@pytest.mark.parametrize("place", PLACES)
def test_a_failure_of_the_users_code_leaves_nothing(front_end: str, place: str, error: type[BaseException]) -> None:
    model, x = make_model(place, error())
    with pytest.raises(error):
        run_plain(model, x)
    plain = read_everything(model)
    model, x = make_model(place, error())
    before = read_everything(model)
    with pytest.raises(error):
        FRONT_ENDS[front_end](model, x)
    after = read_everything(model)
    # Buffers change as in a plain step, and as many random numbers are drawn; nothing else has changed.
    check_equal(after, {**before, "buffers": plain["buffers"], "rng": plain["rng"]})
    model.place = ""
    run_record(model, x)


@pytest.mark.parametrize("place", REFUSED)
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_refusal_restores_everything(front_end: str, place: str) -> None:
    model, x = make_model(place, ValueError())
    before = read_everything(model)
    with pytest.raises(PerSampleError):
        FRONT_ENDS[front_end](model, x)
    after = read_everything(model)
    if "watch" in front_end and place == "penalty":  # a loss that is refused outside of any call of a watch
        before |= {"buffers": after["buffers"], "rng": after["rng"]}
    check_equal(after, before)
    model.place = ""
    run_record(model, x)


@pytest.mark.parametrize("place", ["start of forward", "middle of forward", "mixed samples before a weight"])
def test_a_failed_call_for_per_sample_grads_restores_everything(place: str) -> None:
    model, x = make_model(place, ValueError())
    before = read_everything(model)
    with pytest.raises((ValueError, PerSampleError)):
        call_for_per_sample_grads(model)(x)
    check_equal(read_everything(model), before)
