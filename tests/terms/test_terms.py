"""Every answer of every term against its dense form, which is checked against plain autograd.

The battery is `persample.testing.check_term`; here each of its checks is a test. To test a new term, add a factory to
`TERMS`: a function that makes the term, and its expected dense form by plain autograd in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from persample.layouts import Owners
from persample.rules.conv import conv, conv_transpose
from persample.rules.embedding import embedding, scaled_embedding
from persample.rules.matmul import compute_einsum_term
from persample.terms import Blocks, Dense, Joined, Outer, Patches, Rows, Slices, Sum, Term, add_terms
from persample.terms.cost import (
    Algorithm,
    choose_norm_algorithm,
    choose_patch_dense_algorithm,
    choose_patch_norm_algorithm,
    force_algorithm,
)
from persample.terms.patch_algorithms import compute_by_gemm, compute_by_groups
from persample.terms.products import multiply
from persample.terms.sketch import SparseSketch, TensorSketch
from persample.testing.oracle import stack_gradients
from persample.testing.terms import CHECKS, NORM_ALGORITHMS, make_sketch, make_term_case

Factory = Callable[[int], tuple[Term, Tensor]]
f64 = torch.float64


def loop_over_samples(func: Callable[..., Tensor], weight: Tensor, inputs: Tensor, grads: Tensor) -> Tensor:
    """Per-sample gradients of `weight` by plain autograd; `grads[n]` is the gradient of `func(inputs[n], weight)`."""
    weight = weight.clone().requires_grad_()
    losses = ((func(x, weight) * g.conj()).real.sum() for x, g in zip(inputs, grads, strict=True))
    return stack_gradients(losses, {"weight": weight}).get("weight", weight.new_zeros(0, *weight.shape).detach())


def outer(positions: int, dtype: torch.dtype = f64, width: int = 5) -> Factory:
    def make(batch: int) -> tuple[Term, Tensor]:
        a, g = torch.randn(batch, positions, 4, dtype=dtype), torch.randn(batch, positions, width, dtype=dtype)
        return Outer(a, g), loop_over_samples(F.linear, torch.randn(width, 4, dtype=dtype), a, g)

    return make


def rows(positions: int = 6, constant: bool = False, shared: bool = False, **options: Any) -> Factory:
    def make(batch: int) -> tuple[Term, Tensor]:
        ids, g = torch.randint(0, 5, (batch, positions)), torch.randn(batch, positions, 4, dtype=f64)
        if shared:
            ids = torch.randint(0, 5, (1, positions)).expand(batch, -1)
        if constant:
            g = g[:, :1].expand_as(g)
        weight = torch.randn(5, 4, dtype=f64)
        if options.get("scale_grad_by_freq") and batch:  # the rule is not called for an empty batch
            owners = Owners(torch.arange(batch).view(-1, 1, 1).expand_as(g), batch)
            term = scaled_embedding(g, owners, ids, weight, **options)["weight"]
        else:
            term = embedding(g, ids, weight, **options)["weight"]
        assert isinstance(term, Rows)
        return term, loop_over_samples(lambda i, w: F.embedding(i, w, **options), weight, ids, g)

    return make


def patches(dims: int, images: int = 1, **options: Any) -> Factory:
    def make(batch: int) -> tuple[Term, Tensor]:
        op = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
        weight = torch.randn(6, 4 // options.get("groups", 1), *(3, 2, 3)[:dims], dtype=f64)
        x = torch.randn(batch, images, 4, *(8, 7, 6)[:dims], dtype=f64)
        shape = op(torch.zeros(images, *x.shape[2:], dtype=f64), weight, **options).shape
        g = torch.randn(batch, *shape, dtype=f64)
        term = conv(g, x, weight, **options)["weight"]
        assert isinstance(term, Patches)
        return term, loop_over_samples(lambda x, w: op(x, w, **options), weight, x, g)

    return make


def dense(*shape: int) -> Factory:
    def make(batch: int) -> tuple[Term, Tensor]:
        values = torch.randn(batch, *shape, dtype=f64)
        return Dense(values), values

    return make


def folded(equation: str, shape: tuple[int, ...]) -> Factory:
    def make(batch: int) -> tuple[Term, Tensor]:
        weight = torch.randn(shape, dtype=f64)
        label = equation.split(",")[1].split("->")[0][-1]
        x = torch.randn(batch, 1, 5, shape[equation.index(label)], dtype=f64)
        g = torch.randn(batch, *torch.einsum(equation, weight, torch.zeros(x.shape[1:], dtype=f64)).shape, dtype=f64)
        weight_labels, sample_labels, result_labels = equation.replace("->", ",").split(",")
        term = compute_einsum_term(g, (weight_labels, sample_labels, result_labels), x, weight, 0)
        return term, loop_over_samples(lambda x, w: torch.einsum(equation, w, x), weight, x, g)

    return make


def add(*factories: Factory) -> Factory:
    def make(batch: int) -> tuple[Term, Tensor]:
        terms, expected = zip(*(factory(batch) for factory in factories), strict=True)
        return add_terms(list(terms)), sum(expected)  # type: ignore[return-value]

    return make


def blocks(factory: Factory, *starts: int, count: int, single: bool = False) -> Factory:
    """Terms from one factory as blocks of a weight of `count` rows."""

    def make(batch: int) -> tuple[Term, Tensor]:
        parts = [factory(batch) for _ in starts]
        first = parts[0][1]
        expected = first.new_zeros(batch, count, *first.shape[1 if single else 2 :])
        for start, (_, values) in zip(starts, parts, strict=True):
            expected[:, start if single else slice(start, start + values.shape[1])] = values
        return Blocks([term for term, _ in parts], starts, count, single), expected

    return make


def slices(dim: int, *shape: int) -> Factory:
    """Each sample uses one slice along `dim` of a weight of this shape."""

    def make(batch: int) -> tuple[Term, Tensor]:
        index, weight = torch.arange(batch) * 2 % shape[dim], torch.randn(shape, dtype=f64)
        g = torch.randn(batch, *(size for d, size in enumerate(shape) if d != dim), dtype=f64)
        expected = loop_over_samples(lambda i, w: w.select(dim, int(i)), weight, index, g)
        return Slices(g, index, dim, shape[dim]), expected

    return make


def joined(*factories: Factory) -> Factory:
    """The rows of several terms in turn."""

    def make(batch: int) -> tuple[Term, Tensor]:
        rows = [torch.arange(batch)[i :: len(factories)] for i in range(len(factories))]
        terms, parts = zip(*(factory(len(own)) for factory, own in zip(factories, rows, strict=True)), strict=True)
        expected = parts[0].new_zeros(batch, *parts[0].shape[1:])
        for own, part in zip(rows, parts, strict=True):
            expected[own] = part
        return Joined(terms, rows), expected

    return make


TERMS: dict[str, Factory] = {
    "outer, one position": outer(1),
    "outer, few positions": outer(2),
    "outer, many positions": outer(40),
    "outer, complex": outer(3, torch.complex128),
    "rows": rows(),
    "rows, padding": rows(padding_idx=2),
    "rows, scaled by frequency": rows(scale_grad_by_freq=True),
    "rows, one position": rows(1),
    "rows, one gradient for all positions": rows(constant=True),
    "rows, the same for all samples": rows(shared=True),
    "rows, the same for all samples, padding": rows(shared=True, padding_idx=2),
    "patches 1d": patches(1),
    "patches 2d": patches(2, stride=2, padding=1),
    "patches 2d, groups": patches(2, groups=2, dilation=2, padding=2),
    "patches 2d, same": patches(2, padding="same"),
    "patches 2d, several images": patches(2, images=3),
    "patches 2d, groups, several images": patches(2, images=2, groups=2),
    "patches 3d": patches(3, dilation=(1, 2, 1)),
    "dense": dense(5, 4),
    "dense, a vector": dense(7),
    "dense, a number": dense(),
    "dense, 3-D": dense(3, 2, 4),
    "blocks": blocks(outer(2), 1, 6, count=12),
    "a block": blocks(outer(2), 1, count=7),
    "single blocks": blocks(outer(2), 0, 3, count=4, single=True),
    "blocks of vectors": blocks(dense(3), 0, 3, count=6),
    "the same blocks": add(blocks(outer(2), 0, 5, count=10), blocks(outer(3), 5, 0, count=10)),
    "overlapping blocks": add(blocks(outer(2), 0, count=9), blocks(outer(3), 3, count=9)),
    "other blocks": add(blocks(outer(2), 0, count=10), blocks(rows(), 5, count=10)),
    "blocks and the whole": add(blocks(outer(2), 0, count=8), outer(3, width=8)),
    "folded": folded("dhe,btd->bthe", (4, 2, 3)),
    "folded, rows first": folded("hed,btd->bthe", (2, 3, 4)),
    "folded twice": add(folded("dhe,btd->bthe", (4, 2, 3)), folded("dhe,btd->bhet", (4, 2, 3))),
    "folded along different dimensions": add(folded("dhe,btd->bthe", (4, 2, 3)), folded("dhe,bth->btde", (4, 2, 3))),
    "joined": joined(outer(2), outer(7)),
    "joined, other classes": joined(outer(2), rows(), dense(5, 4)),
    "joined twice": add(joined(outer(2), outer(1)), joined(rows(), rows(2))),
    "slices": slices(0, 5, 4),
    "slices of another dimension": slices(1, 2, 5, 4),
    "slices and lookups": add(slices(0, 5, 4), rows()),
    "two uses": add(outer(2), outer(3)),
    "two lookups": add(rows(), rows(4)),
    "tied embedding and head": add(rows(), outer(3)),
    "head, embedding, dense": add(outer(3), rows(), dense(5, 4)),
    "two convolutions": add(patches(2), patches(2, stride=2)),
}
every_term = pytest.mark.parametrize("factory", TERMS.values(), ids=TERMS)


@pytest.mark.parametrize("check", CHECKS)
@every_term
def test_answers(factory: Factory, check: str) -> None:
    CHECKS[check](make_term_case(*factory(4)))


def test_the_dense_form_is_kept_after_norms_if_it_is_smaller() -> None:
    for positions, kind in ((40, Dense), (2, Outer)):
        term, _ = outer(positions)(3)
        with force_algorithm("dense"):
            assert type(term.compute_norms_and_compact()[1]) is kind
    with force_algorithm("ghost"):
        assert type(outer(40)(3)[0].compute_norms_and_compact()[1]) is Outer


@pytest.mark.parametrize("method", ["tensor", "sparse"])
@every_term
def test_projections_are_not_zero(factory: Factory, method: str) -> None:
    term, expected = factory(3)
    if expected.is_complex():
        pytest.skip("only real gradients can be projected")
    assert term.project(make_sketch(method, term.shape)).abs().max() > 0


@every_term
def test_a_batch_of_one_and_an_empty_batch(factory: Factory) -> None:
    for batch in (1, 0):
        term, expected = factory(batch)
        torch.testing.assert_close(term.dense(), expected)
        squares = expected.abs().square().reshape(batch, expected.shape[1:].numel())
        torch.testing.assert_close(term.squared_norms(), squares.sum(1))
        torch.testing.assert_close(term.sum(torch.ones(batch)), expected.sum(0))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 5), st.integers(1, 5), st.sampled_from(["ghost", "dense"]))
def test_outer_of_any_shape(batch: int, positions: int, inputs: int, outputs: int, algorithm: Algorithm) -> None:
    a, g = torch.randn(batch, positions, inputs, dtype=f64), torch.randn(batch, positions, outputs, dtype=f64)
    term, expected = Outer(a, g), torch.einsum("nto,nti->noi", g, a)
    with force_algorithm(algorithm):
        torch.testing.assert_close(term.squared_norms(), expected.square().sum((1, 2)))
    torch.testing.assert_close(term.gram(term), torch.einsum("noi,moi->nm", expected, expected))
    torch.testing.assert_close(term.square_sum(), expected.square().sum(0))


def test_terms_of_one_class_are_merged() -> None:
    (a, _), (b, _) = outer(2)(3), outer(3)(3)
    merged = add_terms([a, b])
    assert isinstance(merged, Outer)
    assert merged.positions == 5
    assert isinstance(add_terms([rows()(3)[0], rows()(3)[0]]), Rows)
    assert isinstance(add_terms([rows()(3)[0], outer(2)(3)[0]]), Sum)


def test_norm_algorithm_of_outer_products() -> None:
    assert choose_norm_algorithm(64, 256, 4096) == "ghost"
    assert choose_norm_algorithm(1024, 27, 32) == "dense"


def test_algorithms_of_convolutions() -> None:
    assert choose_patch_norm_algorithm(pixels=1024, positions=1024, channels=3, kernel=9, outputs=32) == "dense"
    assert choose_patch_norm_algorithm(pixels=64, positions=64, channels=128, kernel=9, outputs=128) == "pixels"
    assert choose_patch_norm_algorithm(pixels=256, positions=64, channels=64, kernel=9, outputs=128) == "ghost"
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    early, late, depthwise, mixing = (1024, 32, 9, 32), (16, 256, 9, 256), (256, 1, 25, 1), (1024, 64, 1, 64)
    assert choose_patch_dense_algorithm(*early, torch.float32, cpu) == "groups"
    assert choose_patch_dense_algorithm(*late, torch.float32, cpu) == "gemm"
    assert choose_patch_dense_algorithm(*depthwise, torch.float32, cpu) == "correlation"
    assert choose_patch_dense_algorithm(*mixing, torch.float32, cpu) == "gemm"
    for dtype in (torch.float64, torch.bfloat16, torch.complex64):
        for sizes in (early, late, depthwise, mixing):
            assert choose_patch_dense_algorithm(*sizes, dtype, cpu) == "gemm"
    assert choose_patch_dense_algorithm(*early, torch.float32, cuda) == "gemm"
    assert choose_patch_dense_algorithm(*depthwise, torch.float32, cuda) == "correlation"


def convolution(
    images: int, size: Sequence[int], kernel: Sequence[int], groups: int, each: tuple[int, int], **options: Any
) -> tuple[Patches, Tensor]:
    """The term of a convolution in float32, and its dense form by plain autograd in float64."""
    op = (F.conv1d, F.conv2d, F.conv3d)[len(size) - 1]
    weight = torch.randn(groups * each[1], each[0], *kernel)
    x = torch.randn(3, images, groups * each[0], *size)
    g = torch.randn(3, *op(x[0], weight, groups=groups, **options).shape)
    term = conv(g, x, weight, groups=groups, **options)["weight"]
    assert isinstance(term, Patches)
    return term, loop_over_samples(
        lambda x, w: op(x, w, groups=groups, **options), weight.double(), x.double(), g.double()
    )


def check_every_algorithm(term: Patches, expected: Tensor) -> None:
    dense_algorithms: list[Algorithm] = ["gemm", "groups", "correlation"]
    norm_algorithms: list[Algorithm] = ["ghost", "pixels", "dense"]
    close = {"rtol": 1e-4, "atol": 1e-4 * expected.abs().max().item()}
    for algorithm in dense_algorithms:
        with force_algorithm(algorithm):
            torch.testing.assert_close(term.dense().double(), expected, **close)
            torch.testing.assert_close(term.sum(torch.ones(3)).double(), expected.sum(0), **close)
    for algorithm in norm_algorithms:
        with force_algorithm(algorithm):
            torch.testing.assert_close(term.squared_norms().double(), expected.square().flatten(1).sum(1), **close)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_convolutions_of_any_shape_by_every_algorithm(data: st.DataObject) -> None:
    numbers = {"kernel": (1, 4), "stride": (1, 3), "padding": (0, 3), "dilation": (1, 2), "more": (0, 4)}
    dims = data.draw(st.integers(1, 3))
    drawn = {name: [data.draw(st.integers(*bounds)) for _ in range(dims)] for name, bounds in numbers.items()}
    kernel, more = drawn.pop("kernel"), drawn.pop("more")
    sizes = zip(kernel, drawn["padding"], drawn["dilation"], more, strict=True)
    size = [max(1, gap * (width - 1) + 1 - 2 * padding) + rest for width, padding, gap, rest in sizes]
    groups, each = data.draw(st.sampled_from([(1, (8, 16)), (2, (8, 8)), (1, (3, 5)), (6, (1, 1)), (3, (1, 2))]))
    check_every_algorithm(*convolution(data.draw(st.integers(1, 2)), size, kernel, groups, each, **drawn))


@pytest.mark.parametrize(("groups", "each"), [(1, (8, 8)), (6, (1, 1))])
@pytest.mark.parametrize("kernel", [(4, 3), (2, 2)])
def test_asymmetric_padding_by_every_algorithm(groups: int, each: tuple[int, int], kernel: tuple[int, int]) -> None:
    check_every_algorithm(*convolution(1, (7, 6), kernel, groups, each, padding="same", dilation=(1, 2)))


@pytest.mark.parametrize(("groups", "each"), [(1, (8, 8)), (6, (1, 1))])
def test_a_transposed_convolution_by_every_algorithm(groups: int, each: tuple[int, int]) -> None:
    options: dict[str, Any] = {"stride": 2, "padding": 1, "output_padding": (1, 0), "groups": groups}
    weight = torch.randn(groups * each[0], each[1], 3, 3)
    x = torch.randn(3, 2, groups * each[0], 4, 5)
    g = torch.randn(3, *F.conv_transpose2d(x[0], weight, **options).shape)
    term = conv_transpose(g, x, weight, **options)["weight"]
    assert isinstance(term, Patches)
    op = lambda x, w: F.conv_transpose2d(x, w, **options)  # noqa: E731
    check_every_algorithm(term, loop_over_samples(op, weight.double(), x.double(), g.double()))


@pytest.mark.parametrize(("groups", "each"), [(1, (8, 16)), (1, (3, 5)), (6, (1, 1))])
def test_channels_last_convolutions_by_every_algorithm(groups: int, each: tuple[int, int]) -> None:
    term, expected = convolution(1, (6, 5), (3, 3), groups, each, padding=1)
    last = [t.movedim(2, -1).contiguous().movedim(-1, 2) for t in (term.input, term.grad)]
    check_every_algorithm(replace(term, input=last[0], grad=last[1]), expected)


@pytest.mark.parametrize("kernel, stride, padding, dilation", [
    ((3, 2), (1, 1), [(1, 1), (0, 1)], (1, 1)),
    ((3, 3), (2, 1), [(0, 2), (1, 1)], (2, 1)),
    ((2, 3), (3, 2), [(-1, 1), (2, -1)], (1, 2)),
])  # fmt: skip
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_in_blocks_of_positions(
    kernel: Any, stride: Any, padding: Any, dilation: Any, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("persample.terms.patch_algorithms._MAX_ADDED", 20)
    torch.manual_seed(0)
    x = torch.randn(3, 2, 4, 11, 9, dtype=torch.float64)
    sizes = [
        (size + sum(widths) - gap * (length - 1) - 1) // step + 1
        for size, widths, gap, length, step in zip(x.shape[3:], padding, dilation, kernel, stride, strict=True)
    ]
    term = Patches(x, torch.randn(3, 2, 6, *sizes, dtype=torch.float64), kernel, stride, padding, dilation, groups)
    weights = torch.rand(3, dtype=torch.float64)
    rows = compute_by_gemm(term)
    torch.testing.assert_close(term.sum(weights), torch.tensordot(weights, rows, 1))
    torch.testing.assert_close(compute_by_groups(term), rows)


@pytest.mark.parametrize("block_size", [1, 400, 2000])
@pytest.mark.parametrize(("groups", "each"), [(1, (8, 16)), (1, (3, 5)), (2, (4, 8)), (6, (1, 1))])
def test_convolutions_in_blocks_of_samples(
    block_size: int, groups: int, each: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("patches", "patch_algorithms"):
        monkeypatch.setattr(f"persample.terms.{module}.BLOCK_SIZE", block_size)
    term, expected = convolution(2, (6, 5), (3, 3), groups, each, padding=1, stride=(1, 2))
    check_every_algorithm(term, expected)
    out = torch.empty(expected.shape)
    with force_algorithm("gemm"):
        term.write(out, 3.0)
    torch.testing.assert_close(out.double(), 3 * expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("algorithm", NORM_ALGORITHMS)
def test_norms_where_positions_cancel(dtype: torch.dtype, algorithm: Algorithm | None) -> None:
    """The positions cancel to 1 % of their size. The rounding error of a sum in half precision exceeds that."""
    a = torch.randn(4, 64, 32, dtype=f64)
    g = torch.randn(4, 64, 16, dtype=f64)
    a[:, 32:], g[:, 32:] = a[:, :32], -g[:, :32] * 0.99
    a, g = a.to(dtype), g.to(dtype)
    exact = torch.einsum("nto,nti->noi", g.double(), a.double()).square().sum((1, 2))
    with force_algorithm(algorithm) if algorithm else nullcontext():
        norms = Outer(a, g).squared_norms()
    assert norms.dtype == torch.float32
    assert ((norms.double() - exact) / exact).abs().max() < 1e-2


@pytest.mark.parametrize("method", ["tensor", "sparse"])
@pytest.mark.parametrize("positions", [1, 16])
def test_projected_inner_products_are_unbiased_with_the_predicted_spread(method: str, positions: int) -> None:
    size, draws = 64, 400
    a, g = torch.randn(2, positions, 12, dtype=f64), torch.randn(2, positions, 10, dtype=f64)
    term = Outer(a, g)
    exact = float(term.gram(term)[0, 1])
    norms = term.squared_norms().sqrt()
    estimates = []
    for seed in range(draws):
        sketch = (
            TensorSketch(size, seed, "w", term.shape, torch.device("cpu"))
            if method == "tensor"
            else SparseSketch(size, seed, "w")
        )
        first, second = term.project(sketch)
        estimates.append(float(first @ second))
    values = torch.tensor(estimates, dtype=f64)
    # A sparse sketch has a spread of at most sqrt(2) times this unit; a tensor sketch has a larger one.
    unit = float(norms[0] * norms[1]) / size**0.5
    assert abs(float(values.mean()) - exact) < 5 * float(values.std()) / draws**0.5
    assert float(values.std()) < (1.5 if method == "sparse" else 3.5) * unit
    assert float(values.std()) > 0.3 * unit


def test_a_projection_depends_on_seed_and_name_only() -> None:
    term, _ = outer(3)(3)
    here = [TensorSketch(8, 3, "w", term.shape, torch.device("cpu")), SparseSketch(8, 3, "w")]
    again = [TensorSketch(8, 3, "w", term.shape, torch.device("cpu")), SparseSketch(8, 3, "w")]
    other = [TensorSketch(8, 3, "v", term.shape, torch.device("cpu")), SparseSketch(8, 4, "w")]
    for one, same, different in zip(here, again, other, strict=True):
        assert torch.equal(term.project(one), term.project(same))
        assert not torch.allclose(term.project(one), term.project(different))


@pytest.mark.parametrize("layouts", ["nn", "nt", "tn", "tt", "sn", "ns", "en", "ne", "on", "no"])
def test_products_of_large_matrices_in_all_layouts(layouts: str) -> None:
    def make(rows: int, columns: int, layout: str) -> Tensor:
        if layout == "t":  # transposed
            return torch.randn(columns, rows).mT
        if layout == "s":  # a slice of columns
            return torch.randn(rows, columns + 5)[:, 3 : columns + 3]
        if layout == "e":  # expanded
            return torch.randn(rows, 1).expand(rows, columns)
        if layout == "o":  # overlapping rows
            return torch.randn(rows + columns).as_strided((rows, columns), (1, 1))
        return torch.randn(rows, columns)

    for rows, inner, columns in ((300, 200, 100), (50, 900, 60), (700, 50, 80), (2, 2, 2), (0, 3, 2)):
        a, b = make(rows, inner, layouts[0]), make(inner, columns, layouts[1])
        product = multiply(a, b)
        assert product.is_contiguous() and product.dtype == torch.float32
        torch.testing.assert_close(product.double(), a.double() @ b.double(), atol=1e-5 * inner, rtol=0)
