"""The rules of expanded weights, with the sample inputs of torch's own tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db

from persample import ExpandedWeight, call_for_per_sample_grads
from persample.testing.oracle import Gradients, assert_rows_close, compute_test_loss, stack_gradients

OPS = {op.name.rpartition(".")[2]: op for op in op_db if op.supports_expanded_weight}
STATISTICS = ("running_mean", "running_var")

# torch warns once in a process, in the first test that runs
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


# ---- calls ----


@dataclass(frozen=True)
class Place:
    """The position of a weight or of a statistic in the arguments of a call."""

    statistic: bool
    index: int


@dataclass(frozen=True)
class Call:
    """A call of a function whose first argument is the batch.

    The weights, and the running statistics that the call may change, are kept apart from the other arguments.
    """

    func: Callable[..., Any]
    input: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    weights: tuple[Tensor, ...]
    statistics: tuple[Tensor, ...]

    @classmethod
    def of(cls, func: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Call:
        weights: list[Tensor] = []
        statistics: list[Tensor] = []

        def take(name: str, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            statistic = name in STATISTICS
            kept = statistics if statistic else weights
            kept.append(value.detach())
            return Place(statistic, len(kept) - 1)

        own_args = tuple(take("", arg) for arg in args)
        own_kwargs = {name: take(name, value) for name, value in kwargs.items()}
        return cls(func, input.detach(), own_args, own_kwargs, tuple(weights), tuple(statistics))

    @property
    def batch(self) -> int:
        return self.input.shape[0]

    def copy(self) -> Call:
        """The same call with copies of all tensors. Floating-point weights require gradients."""
        weights = tuple(w.clone().requires_grad_(is_differentiable(w)) for w in self.weights)
        return replace(self, weights=weights, statistics=tuple(s.clone() for s in self.statistics))

    def __call__(self, input: Tensor, weights: Sequence[Any]) -> Tensor:
        def fill(value: Any) -> Any:
            if not isinstance(value, Place):
                return value
            return self.statistics[value.index] if value.statistic else weights[value.index]

        args = map(fill, self.args)
        return self.func(input, *args, **{name: fill(value) for name, value in self.kwargs.items()})


def is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@cache
def list_calls(name: str, dtype: torch.dtype) -> tuple[Call, ...]:
    """The sample inputs of one function that have weights."""
    torch.manual_seed(0)
    found = []
    for sample in OPS[name].sample_inputs("cpu", dtype, requires_grad=False):
        if name == "embedding":
            call = Call.of(F.embedding, sample.args[0], sample.input, **sample.kwargs)
        else:
            call = Call.of(OPS[name].op, sample.input, *sample.args, **sample.kwargs)
        if call.weights:
            found.append(call)
    return tuple(found)


def has_batch(call: Call) -> bool:
    """Whether dimension 0 of the input is a batch dimension, as far as an ExpandedWeight can tell."""
    dims = call.input.dim()
    if dims == 0 or call.batch == 0:
        return False
    if call.func is F.embedding or call.func is F.linear:
        return dims > 1
    if call.func is F.layer_norm:
        return dims > len(call.args[0])
    if call.func in (F.conv1d, F.conv2d, F.conv3d):
        return dims == call.weights[0].dim()
    return True


def has_gradient(call: Call) -> bool:
    """Whether there is a batch, and torch itself can differentiate the call."""
    return has_batch(call) and not (call.kwargs.get("sparse") and call.kwargs.get("scale_grad_by_freq"))


def extend_to_three_samples(call: Call) -> Call:
    """The call with three samples: many sample inputs have one, which would hide mixed samples."""
    input = call.input[:1]
    others = (input.flip(-1), input.roll(1, -1) if call.func is F.embedding else input * 0.5 + 1)
    return replace(call, input=torch.cat([input, *others]))


def list_parameters(wanted: Callable[[Call], bool]) -> Iterator[Any]:
    for name in OPS:
        for i, call in enumerate(list_calls(name, torch.float64)):
            if wanted(call):
                yield pytest.param(name, i, id=f"{name}-{i}")


def each_call(wanted: Callable[[Call], bool]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("name", "index"), list(list_parameters(wanted)))


each_reduction = pytest.mark.parametrize("reduction", ["sum", "mean"])


# ---- the two ways to call, and the loop over samples ----


def run_bare(call: Call, input: Tensor, reduction: str = "sum") -> Tensor:
    size = input.shape[0] if input.dim() and input.shape[0] else 1
    return call(input, [ExpandedWeight(w, size, reduction) for w in call.weights])


class Holder(nn.Module):
    """A call as a module: its weights are parameters, its statistics buffers."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(w, w.requires_grad) for w in call.weights])
        for i, statistic in enumerate(call.statistics):
            self.register_buffer(f"statistic{i}", statistic)
        self.call = call

    def forward(self, input: Tensor) -> Tensor:
        return self.call(input, list(self.weights))


def run_wrapped(call: Call, input: Tensor, reduction: str = "sum") -> Tensor:
    """Run the call in a wrapped module; `read_grad_samples` finds the gradients of its parameters."""
    holder = Holder(call)
    result = call_for_per_sample_grads(holder, loss_reduction=reduction)(input)
    for weight, parameter in zip(call.weights, holder.weights, strict=True):
        weight.holder = parameter
    return result


each_way = pytest.mark.parametrize("way", [run_bare, run_wrapped])


def read_grad_samples(call: Call) -> Gradients:
    found = {}
    for i, weight in enumerate(call.weights):
        owner = getattr(weight, "holder", weight)
        assert owner.grad is None
        found[f"weight {i}"] = owner.grad_sample
    return found


def loop_over_samples(call: Call) -> Gradients:
    """Per-sample gradients by plain autograd, with each sample as a batch of one."""
    weights = call.copy().weights
    losses = (compute_test_loss(call.copy()(call.input[n : n + 1], weights)) for n in range(call.batch))
    expected = stack_gradients(losses, {f"weight {i}": weight for i, weight in enumerate(weights)})
    assert all(rows.isfinite().all() for rows in expected.values())
    return expected


def check(call: Call, way: Callable[..., Tensor], reduction: str = "sum", input_grad: bool = True) -> None:
    """Check the per-sample gradients and the gradient of the input."""
    share = 1 / call.batch if reduction == "mean" else 1
    subject, plain = call.copy(), call.copy()
    input = call.input.clone().requires_grad_(input_grad and is_differentiable(call.input))
    (share * compute_test_loss(way(subject, input, reduction), 0)).backward()
    assert_rows_close(read_grad_samples(subject), loop_over_samples(call))
    if input.requires_grad:
        same = call.input.clone().requires_grad_()
        (share * compute_test_loss(plain(same, plain.weights), 0)).backward()
        torch.testing.assert_close(input.grad, same.grad, rtol=1e-9, atol=1e-9)
    else:
        assert input.grad is None


# ---- gradients ----


@each_call(has_gradient)
@each_way
@each_reduction
def test_gradients(name: str, index: int, way: Callable[..., Tensor], reduction: str) -> None:
    check(list_calls(name, torch.float64)[index], way, reduction)


@each_call(has_gradient)
@each_way
def test_gradients_if_the_input_needs_none(name: str, index: int, way: Callable[..., Tensor]) -> None:
    check(list_calls(name, torch.float64)[index], way, input_grad=False)


@each_call(has_gradient)
@each_way
@each_reduction
def test_gradients_of_three_samples(name: str, index: int, way: Callable[..., Tensor], reduction: str) -> None:
    check(extend_to_three_samples(list_calls(name, torch.float64)[index]), way, reduction)


@each_call(lambda call: call.func in (F.linear, F.conv1d, F.conv2d, F.conv3d) and has_batch(call))
@each_way
def test_gradients_of_complex_numbers(name: str, index: int, way: Callable[..., Tensor]) -> None:
    check(extend_to_three_samples(list_calls(name, torch.complex128)[index]), way)


@each_call(lambda call: call.func is F.embedding and call.input.dim() == 1)
@each_reduction
def test_one_id_for_each_sample_inside_a_module(name: str, index: int, reduction: str) -> None:
    check(list_calls(name, torch.float64)[index], run_wrapped, reduction)


@each_call(lambda call: not has_batch(call))
@pytest.mark.parametrize("input_grad", [True, False], ids=["grad", "nograd"])
def test_call_without_a_batch_raises(name: str, index: int, input_grad: bool) -> None:
    call = list_calls(name, torch.float64)[index].copy()
    input = call.input.clone().requires_grad_(input_grad and is_differentiable(call.input))
    with pytest.raises(RuntimeError, match="Expanded Weights"):
        run_bare(call, input)


# ---- outputs, in every dtype ----


def forward_cases() -> Iterator[Any]:
    """All functions, dtypes and ways to call. Integers cannot be ExpandedWeights; in a module they are frozen."""
    for name, op in OPS.items():
        for dtype in sorted(op.supported_dtypes("cpu"), key=str):
            ways = [run_bare, run_wrapped] if dtype.is_floating_point or dtype.is_complex else [run_wrapped]
            for way in ways:
                yield pytest.param(name, dtype, way, id=f"{name}-{str(dtype).removeprefix('torch.')}-{way.__name__}")


@pytest.mark.parametrize(("name", "dtype", "way"), list(forward_cases()))
@pytest.mark.parametrize("input_grad", [True, False], ids=["grad", "nograd"])
def test_output_and_side_effects_are_the_same(
    name: str, dtype: torch.dtype, way: Callable[..., Tensor], input_grad: bool
) -> None:
    chosen = [call for call in list_calls(name, dtype) if has_batch(call)]
    assert chosen
    for call in chosen:
        plain, subject = call.copy(), call.copy()
        input = call.input.clone().requires_grad_(input_grad and is_differentiable(call.input))
        expected = plain(input, plain.weights)
        result = way(subject, input)
        pairs = [(result, expected), *zip(subject.weights, plain.weights, strict=True)]
        pairs += zip(subject.statistics, plain.statistics, strict=True)
        for got, want in pairs:
            torch.testing.assert_close(got.detach(), want.detach(), rtol=0, atol=0, equal_nan=True)


# ---- keyword arguments, and functions of torch with other signatures ----


def make_numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 31 * len(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def make_ids() -> Tensor:
    return torch.tensor([[1, 4, 4], [0, 2, 1], [3, 3, 3], [2, 0, 4]])


BY_KEYWORD: dict[str, tuple[Callable[..., Tensor], Tensor, dict[str, Any]]] = {
    "linear": (F.linear, make_numbers(3, 2, 5), {"weight": make_numbers(4, 5), "bias": make_numbers(4)}),
    "conv1d": (
        F.conv1d,
        make_numbers(3, 4, 9),
        {
            "weight": make_numbers(6, 2, 3),
            "bias": make_numbers(6),
            "stride": 2,
            "padding": 1,
            "dilation": 2,
            "groups": 2,
        },
    ),
    "conv2d": (
        F.conv2d,
        make_numbers(3, 4, 7, 6),
        {
            "weight": make_numbers(6, 2, 3, 2),
            "bias": make_numbers(6),
            "stride": [2, 1],
            "padding": (1, 2),
            "dilation": [1, 2],
            "groups": 2,
        },
    ),
    "conv3d": (
        F.conv3d,
        make_numbers(3, 2, 4, 5, 4),
        {"weight": make_numbers(2, 2, 2, 3, 2), "bias": None, "padding": "same", "dilation": (1, 2, 1), "groups": 1},
    ),
    "layer_norm": (
        F.layer_norm,
        make_numbers(3, 2, 4, 5),
        {"normalized_shape": (4, 5), "weight": make_numbers(4, 5), "bias": make_numbers(4, 5), "eps": 0.1},
    ),
    "group_norm": (
        F.group_norm,
        make_numbers(3, 6, 4),
        {"num_groups": 3, "weight": make_numbers(6), "bias": make_numbers(6), "eps": 0.1},
    ),
    "instance_norm": (
        F.instance_norm,
        make_numbers(3, 4, 5),
        {"weight": make_numbers(4), "bias": make_numbers(4), "use_input_stats": True, "momentum": 0.3, "eps": 0.1},
    ),
    "instance_norm with statistics": (
        F.instance_norm,
        make_numbers(3, 4, 5),
        {
            "running_mean": make_numbers(4),
            "running_var": make_numbers(4).abs() + 0.5,
            "weight": make_numbers(4),
            "bias": make_numbers(4),
            "use_input_stats": False,
            "momentum": 0.3,
            "eps": 0.1,
        },
    ),
    "embedding": (
        F.embedding,
        make_ids(),
        {"weight": make_numbers(5, 3), "padding_idx": -1, "scale_grad_by_freq": True, "sparse": False},
    ),
}
ORDERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "declared": dict,
    "reversed": lambda kwargs: dict(reversed(kwargs.items())),
    "sorted": lambda kwargs: dict(sorted(kwargs.items())),
}


@pytest.mark.parametrize("name", BY_KEYWORD)
@pytest.mark.parametrize("order", ORDERS)
@each_way
def test_keyword_arguments_in_any_order(name: str, order: str, way: Callable[..., Tensor]) -> None:
    func, input, kwargs = BY_KEYWORD[name]
    check(Call.of(func, input, **ORDERS[order](kwargs)), way)


@pytest.mark.parametrize("name", BY_KEYWORD)
@pytest.mark.parametrize("order", ORDERS)
@each_way
def test_input_by_keyword(name: str, order: str, way: Callable[..., Tensor]) -> None:
    func, input, kwargs = BY_KEYWORD[name]

    def call(input: Tensor, **others: Any) -> Tensor:
        return func(**ORDERS[order]({"input": input} | others))

    check(Call.of(call, input, **kwargs), way)


@pytest.mark.parametrize("name", BY_KEYWORD)
@each_way
def test_all_arguments_by_position(name: str, way: Callable[..., Tensor]) -> None:
    """All arguments in the order of the signature, with defaults for those that the table leaves out."""
    func, input, kwargs = BY_KEYWORD[name]
    if func is F.embedding:
        kwargs = {"max_norm": None, "norm_type": 2.0} | kwargs
    if func is F.instance_norm:
        kwargs = {"running_mean": None, "running_var": None} | kwargs
    if func in (F.conv1d, F.conv2d, F.conv3d):
        kwargs = {"stride": 1} | kwargs
    order = [part for part in POSITIONS[func] if part in kwargs]

    def call(input: Tensor, **others: Any) -> Tensor:
        return func(input, *(others[part] for part in order))

    check(Call.of(call, input, **kwargs), way)


CONV = ("weight", "bias", "stride", "padding", "dilation", "groups")
POSITIONS: dict[Callable[..., Tensor], Sequence[str]] = {
    F.linear: ("weight", "bias"),
    F.conv1d: CONV,
    F.conv2d: CONV,
    F.conv3d: CONV,
    F.layer_norm: ("normalized_shape", "weight", "bias", "eps"),
    F.group_norm: ("num_groups", "weight", "bias", "eps"),
    F.instance_norm: (*STATISTICS, "weight", "bias", "use_input_stats", "momentum", "eps"),
    F.embedding: ("weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
}


def torch_embedding(indices: Tensor, weight: Any, *args: Any, **kwargs: Any) -> Tensor:
    return torch.embedding(weight, indices, *args, **kwargs)


def torch_embedding_by_keyword(indices: Tensor, **kwargs: Any) -> Tensor:
    return torch.embedding(indices=indices, **kwargs)


def torch_instance_norm(input: Tensor, running_mean: Any, running_var: Any, **kwargs: Any) -> Tensor:
    return torch.instance_norm(
        input, kwargs["weight"], kwargs["bias"], running_mean, running_var, kwargs["use_input_stats"], 0.3, 0.1, False
    )


def torch_instance_norm_by_keyword(input: Tensor, **kwargs: Any) -> Tensor:
    return torch.instance_norm(input, momentum=0.3, eps=0.1, cudnn_enabled=False, **kwargs)


W, B = make_numbers(6), make_numbers(6) + 1
RUNNING = {"running_mean": make_numbers(6), "running_var": make_numbers(6).abs() + 0.5}
NO_RUNNING = {"running_mean": None, "running_var": None}
TORCH_SPELLINGS: dict[str, Call] = {
    "conv1d": Call.of(torch.conv1d, make_numbers(3, 4, 9), make_numbers(6, 4, 3), make_numbers(6), 2, 1),
    "conv2d": Call.of(
        torch.conv2d, make_numbers(3, 4, 7, 6), make_numbers(6, 2, 3, 2), make_numbers(6), (2, 1), [1, 2], 1, 2
    ),
    "conv2d keywords": Call.of(
        torch.conv2d, make_numbers(3, 4, 7, 6), groups=2, bias=make_numbers(6), weight=make_numbers(6, 2, 3, 2)
    ),
    "conv3d": Call.of(torch.conv3d, make_numbers(3, 2, 4, 5, 4), make_numbers(2, 2, 2, 3, 2), None, 1, "same"),
    "layer_norm": Call.of(torch.layer_norm, make_numbers(3, 4, 6), [6], W, B, 0.1, False),
    "layer_norm keywords": Call.of(
        torch.layer_norm, make_numbers(3, 4, 6), eps=0.1, bias=B, weight=W, normalized_shape=[6]
    ),
    "group_norm": Call.of(torch.group_norm, make_numbers(3, 6, 4), 2, W, B, 0.1, False),
    "group_norm keywords": Call.of(torch.group_norm, make_numbers(3, 6, 4), eps=0.1, bias=B, weight=W, num_groups=2),
    "instance_norm": Call.of(
        torch_instance_norm, make_numbers(3, 6, 4), weight=W, bias=B, use_input_stats=True, **NO_RUNNING
    ),
    "instance_norm statistics": Call.of(
        torch_instance_norm, make_numbers(3, 6, 4), weight=W, bias=B, use_input_stats=False, **RUNNING
    ),
    "instance_norm keywords": Call.of(
        torch_instance_norm_by_keyword, make_numbers(3, 6, 4), use_input_stats=False, bias=B, **RUNNING, weight=W
    ),
    "embedding": Call.of(torch_embedding, make_ids(), make_numbers(5, 3)),
    "embedding padding": Call.of(torch_embedding, make_ids(), make_numbers(5, 3), 4, True),
    "embedding keywords": Call.of(
        torch_embedding_by_keyword, make_ids(), scale_grad_by_freq=True, padding_idx=4, weight=make_numbers(5, 3)
    ),
}


@pytest.mark.parametrize("spelling", TORCH_SPELLINGS)
@each_reduction
@each_way
def test_torch_spellings(spelling: str, reduction: str, way: Callable[..., Tensor]) -> None:
    check(TORCH_SPELLINGS[spelling], way, reduction)


def test_every_supported_function_is_tested() -> None:
    assert set(OPS) >= {
        "linear", "conv1d", "conv2d", "conv3d", "embedding", "layer_norm", "group_norm", "instance_norm",
    }  # fmt: skip
