"""The rules, driven by the calls with which torch tests its own functions."""

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

# torch says so once in a process, on behalf of whoever comes first
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


# ---- calls ----


@dataclass(frozen=True)
class Place:
    """The place of a weight or of a statistic among the arguments of a call."""

    statistic: bool
    index: int


@dataclass(frozen=True)
class Call:
    """A call of a function whose first argument is the batch; the weights are kept apart from the other arguments.

    So are the running statistics, which the call may change.
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

        def taken(name: str, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            statistic = name in STATISTICS
            kept = statistics if statistic else weights
            kept.append(value.detach())
            return Place(statistic, len(kept) - 1)

        own_args = tuple(taken("", arg) for arg in args)
        own_kwargs = {name: taken(name, value) for name, value in kwargs.items()}
        return cls(func, input.detach(), own_args, own_kwargs, tuple(weights), tuple(statistics))

    @property
    def batch(self) -> int:
        return self.input.shape[0]

    def fresh(self) -> Call:
        """The same with copies of all tensors; the weights require grad if they can."""
        weights = tuple(w.clone().requires_grad_(is_differentiable(w)) for w in self.weights)
        return replace(self, weights=weights, statistics=tuple(s.clone() for s in self.statistics))

    def __call__(self, input: Tensor, weights: Sequence[Any]) -> Tensor:
        def filled(value: Any) -> Any:
            if not isinstance(value, Place):
                return value
            return self.statistics[value.index] if value.statistic else weights[value.index]

        args = map(filled, self.args)
        return self.func(input, *args, **{name: filled(value) for name, value in self.kwargs.items()})


def is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@cache
def calls(name: str, dtype: torch.dtype) -> tuple[Call, ...]:
    """Torch's sample calls of one function that have weights."""
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
    """Whether dim 0 of the input holds samples, for all that an ExpandedWeight by itself can know."""
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
    """There is a batch, and torch itself has a gradient for the weights."""
    return has_batch(call) and not (call.kwargs.get("sparse") and call.kwargs.get("scale_grad_by_freq"))


def with_three_samples(call: Call) -> Call:
    """The call with two more samples: many of torch's own have but one, which would hide a mixture."""
    input = call.input[:1]
    others = (input.flip(-1), input.roll(1, -1) if call.func is F.embedding else input * 0.5 + 1)
    return replace(call, input=torch.cat([input, *others]))


def parameters_of(wanted: Callable[[Call], bool]) -> Iterator[Any]:
    for name in OPS:
        for i, call in enumerate(calls(name, torch.float64)):
            if wanted(call):
                yield pytest.param(name, i, id=f"{name}-{i}")


def each_call(wanted: Callable[[Call], bool]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("name", "index"), list(parameters_of(wanted)))


each_reduction = pytest.mark.parametrize("reduction", ["sum", "mean"])


# ---- the two ways of calling, and the loop over samples ----


def bare(call: Call, input: Tensor, reduction: str = "sum") -> Tensor:
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


def wrapped(call: Call, input: Tensor, reduction: str = "sum") -> Tensor:
    """Through a module; what its parameters receive is passed on to the weights of the call."""
    holder = Holder(call)
    result = call_for_per_sample_grads(holder, loss_reduction=reduction)(input)
    for weight, parameter in zip(call.weights, holder.weights, strict=True):
        weight.holder = parameter
    return result


each_way = pytest.mark.parametrize("way", [bare, wrapped])


def grad_samples(call: Call) -> Gradients:
    found = {}
    for i, weight in enumerate(call.weights):
        owner = getattr(weight, "holder", weight)
        assert owner.grad is None
        found[f"weight {i}"] = owner.grad_sample
    return found


def looped(call: Call) -> Gradients:
    """The gradient of each sample's own loss with plain autograd, each sample being a batch of one."""
    weights = call.fresh().weights
    losses = (compute_test_loss(call.fresh()(call.input[n : n + 1], weights)) for n in range(call.batch))
    expected = stack_gradients(losses, {f"weight {i}": weight for i, weight in enumerate(weights)})
    assert all(rows.isfinite().all() for rows in expected.values())
    return expected


def check(call: Call, way: Callable[..., Tensor], reduction: str = "sum", input_grad: bool = True) -> None:
    """Per-sample gradients, and the gradient of the input, which is the plain one."""
    share = 1 / call.batch if reduction == "mean" else 1
    subject, plain = call.fresh(), call.fresh()
    input = call.input.clone().requires_grad_(input_grad and is_differentiable(call.input))
    (share * compute_test_loss(way(subject, input, reduction), 0)).backward()
    assert_rows_close(grad_samples(subject), looped(call))
    if input.requires_grad:
        same = call.input.clone().requires_grad_()
        (share * compute_test_loss(plain(same, plain.weights), 0)).backward()
        torch.testing.assert_close(input.grad, same.grad, rtol=1e-9, atol=1e-9)
    else:
        assert input.grad is None


# ---- torch's calls ----


@each_call(has_gradient)
@each_way
@each_reduction
def test_gradients(name: str, index: int, way: Callable[..., Tensor], reduction: str) -> None:
    check(calls(name, torch.float64)[index], way, reduction)


@each_call(has_gradient)
@each_way
def test_gradients_where_the_input_needs_none(name: str, index: int, way: Callable[..., Tensor]) -> None:
    check(calls(name, torch.float64)[index], way, input_grad=False)


@each_call(has_gradient)
@each_way
@each_reduction
def test_gradients_of_three_samples(name: str, index: int, way: Callable[..., Tensor], reduction: str) -> None:
    check(with_three_samples(calls(name, torch.float64)[index]), way, reduction)


@each_call(lambda call: call.func in (F.linear, F.conv1d, F.conv2d, F.conv3d) and has_batch(call))
@each_way
def test_gradients_of_complex_numbers(name: str, index: int, way: Callable[..., Tensor]) -> None:
    check(with_three_samples(calls(name, torch.complex128)[index]), way)


@each_call(lambda call: call.func is F.embedding and call.input.dim() == 1)
@each_reduction
def test_one_id_for_each_sample_is_enough_inside_a_module(name: str, index: int, reduction: str) -> None:
    check(calls(name, torch.float64)[index], wrapped, reduction)


@each_call(lambda call: not has_batch(call))
@pytest.mark.parametrize("input_grad", [True, False], ids=["grad", "nograd"])
def test_unsupported(name: str, index: int, input_grad: bool) -> None:
    call = calls(name, torch.float64)[index].fresh()
    input = call.input.clone().requires_grad_(input_grad and is_differentiable(call.input))
    with pytest.raises(RuntimeError, match="Expanded Weights"):
        bare(call, input)


# ---- the same bits, in every dtype ----


def forward_cases() -> Iterator[Any]:
    """Integers cannot have gradients: they pass through a module as frozen weights, and are no ExpandedWeights."""
    for name, op in OPS.items():
        for dtype in sorted(op.supported_dtypes("cpu"), key=str):
            ways = [bare, wrapped] if dtype.is_floating_point or dtype.is_complex else [wrapped]
            for way in ways:
                yield pytest.param(name, dtype, way, id=f"{name}-{str(dtype).removeprefix('torch.')}-{way.__name__}")


@pytest.mark.parametrize(("name", "dtype", "way"), list(forward_cases()))
@pytest.mark.parametrize("input_grad", [True, False], ids=["grad", "nograd"])
def test_output_and_side_effects_are_the_same(
    name: str, dtype: torch.dtype, way: Callable[..., Tensor], input_grad: bool
) -> None:
    chosen = [call for call in calls(name, dtype) if has_batch(call)]
    assert chosen
    for call in chosen:
        plain, subject = call.fresh(), call.fresh()
        input = call.input.clone().requires_grad_(input_grad and is_differentiable(call.input))
        expected = plain(input, plain.weights)
        result = way(subject, input)
        pairs = [(result, expected), *zip(subject.weights, plain.weights, strict=True)]
        pairs += zip(subject.statistics, plain.statistics, strict=True)
        for got, want in pairs:
            torch.testing.assert_close(got.detach(), want.detach(), rtol=0, atol=0, equal_nan=True)


# ---- keyword arguments in any order, and the other spellings ----


def numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 31 * len(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def ids() -> Tensor:
    return torch.tensor([[1, 4, 4], [0, 2, 1], [3, 3, 3], [2, 0, 4]])


BY_KEYWORD: dict[str, tuple[Callable[..., Tensor], Tensor, dict[str, Any]]] = {
    "linear": (F.linear, numbers(3, 2, 5), {"weight": numbers(4, 5), "bias": numbers(4)}),
    "conv1d": (
        F.conv1d,
        numbers(3, 4, 9),
        {"weight": numbers(6, 2, 3), "bias": numbers(6), "stride": 2, "padding": 1, "dilation": 2, "groups": 2},
    ),
    "conv2d": (
        F.conv2d,
        numbers(3, 4, 7, 6),
        {
            "weight": numbers(6, 2, 3, 2),
            "bias": numbers(6),
            "stride": [2, 1],
            "padding": (1, 2),
            "dilation": [1, 2],
            "groups": 2,
        },
    ),
    "conv3d": (
        F.conv3d,
        numbers(3, 2, 4, 5, 4),
        {"weight": numbers(2, 2, 2, 3, 2), "bias": None, "padding": "same", "dilation": (1, 2, 1), "groups": 1},
    ),
    "layer_norm": (
        F.layer_norm,
        numbers(3, 2, 4, 5),
        {"normalized_shape": (4, 5), "weight": numbers(4, 5), "bias": numbers(4, 5), "eps": 0.1},
    ),
    "group_norm": (
        F.group_norm,
        numbers(3, 6, 4),
        {"num_groups": 3, "weight": numbers(6), "bias": numbers(6), "eps": 0.1},
    ),
    "instance_norm": (
        F.instance_norm,
        numbers(3, 4, 5),
        {"weight": numbers(4), "bias": numbers(4), "use_input_stats": True, "momentum": 0.3, "eps": 0.1},
    ),
    "instance_norm with statistics": (
        F.instance_norm,
        numbers(3, 4, 5),
        {
            "running_mean": numbers(4),
            "running_var": numbers(4).abs() + 0.5,
            "weight": numbers(4),
            "bias": numbers(4),
            "use_input_stats": False,
            "momentum": 0.3,
            "eps": 0.1,
        },
    ),
    "embedding": (
        F.embedding,
        ids(),
        {"weight": numbers(5, 3), "padding_idx": -1, "scale_grad_by_freq": True, "sparse": False},
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
def test_the_input_by_keyword_too(name: str, order: str, way: Callable[..., Tensor]) -> None:
    func, input, kwargs = BY_KEYWORD[name]

    def call(input: Tensor, **others: Any) -> Tensor:
        return func(**ORDERS[order]({"input": input} | others))

    check(Call.of(call, input, **kwargs), way)


@pytest.mark.parametrize("name", BY_KEYWORD)
@each_way
def test_all_arguments_by_position(name: str, way: Callable[..., Tensor]) -> None:
    """In the order of the function's signature, with its defaults for what the table leaves out."""
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


W, B = numbers(6), numbers(6) + 1
RUNNING = {"running_mean": numbers(6), "running_var": numbers(6).abs() + 0.5}
NO_RUNNING = {"running_mean": None, "running_var": None}
TORCH_SPELLINGS: dict[str, Call] = {
    "conv1d": Call.of(torch.conv1d, numbers(3, 4, 9), numbers(6, 4, 3), numbers(6), 2, 1),
    "conv2d": Call.of(torch.conv2d, numbers(3, 4, 7, 6), numbers(6, 2, 3, 2), numbers(6), (2, 1), [1, 2], 1, 2),
    "conv2d keywords": Call.of(
        torch.conv2d, numbers(3, 4, 7, 6), groups=2, bias=numbers(6), weight=numbers(6, 2, 3, 2)
    ),
    "conv3d": Call.of(torch.conv3d, numbers(3, 2, 4, 5, 4), numbers(2, 2, 2, 3, 2), None, 1, "same"),
    "layer_norm": Call.of(torch.layer_norm, numbers(3, 4, 6), [6], W, B, 0.1, False),
    "layer_norm keywords": Call.of(torch.layer_norm, numbers(3, 4, 6), eps=0.1, bias=B, weight=W, normalized_shape=[6]),
    "group_norm": Call.of(torch.group_norm, numbers(3, 6, 4), 2, W, B, 0.1, False),
    "group_norm keywords": Call.of(torch.group_norm, numbers(3, 6, 4), eps=0.1, bias=B, weight=W, num_groups=2),
    "instance_norm": Call.of(
        torch_instance_norm, numbers(3, 6, 4), weight=W, bias=B, use_input_stats=True, **NO_RUNNING
    ),
    "instance_norm statistics": Call.of(
        torch_instance_norm, numbers(3, 6, 4), weight=W, bias=B, use_input_stats=False, **RUNNING
    ),
    "instance_norm keywords": Call.of(
        torch_instance_norm_by_keyword, numbers(3, 6, 4), use_input_stats=False, bias=B, **RUNNING, weight=W
    ),
    "embedding": Call.of(torch_embedding, ids(), numbers(5, 3)),
    "embedding padding": Call.of(torch_embedding, ids(), numbers(5, 3), 4, True),
    "embedding keywords": Call.of(
        torch_embedding_by_keyword, ids(), scale_grad_by_freq=True, padding_idx=4, weight=numbers(5, 3)
    ),
}


@pytest.mark.parametrize("spelling", TORCH_SPELLINGS)
@each_reduction
@each_way
def test_torch_spellings(spelling: str, reduction: str, way: Callable[..., Tensor]) -> None:
    check(TORCH_SPELLINGS[spelling], way, reduction)


def test_every_function_that_torch_marks_is_here() -> None:
    assert set(OPS) >= {
        "linear", "conv1d", "conv2d", "conv3d", "embedding", "layer_norm", "group_norm", "instance_norm",
    }  # fmt: skip
