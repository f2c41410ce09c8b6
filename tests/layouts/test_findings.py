"""Calls in which samples meet, or may meet in a later call: each is right, or refused with the cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from persample import SamplesMixed, record
from persample.layouts import MEMO
from persample.testing import assert_rows_close, loop_gradients
from tests.support.cases import Calls

B, T, D = 6, 5, 4


@pytest.fixture(autouse=True)
def _empty_cache() -> None:
    MEMO.clear()
    torch.manual_seed(0)


def run(model: nn.Module, *inputs: Tensor) -> Any:
    with record(model, loss_reduction="sum") as grads:
        model(*inputs).float().square().sum().backward()
    return grads


def make(forward: Callable[..., Tensor]) -> nn.Module:
    return Calls(forward, a=nn.Linear(D, D))


def check(model: nn.Module, x: Tensor) -> None:
    """Compare a recording with the loop, in float64."""
    model, x = model.double(), x.double() if x.is_floating_point() else x
    expected = loop_gradients(model, x, lambda model, x: model(x).float().square().sum())
    assert_rows_close(run(model, x).dense(), expected, 1e-5)


def make_torch_function(body: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that a mode sees as one call, as it does custom functions of libraries."""

    def function(x: Tensor, *args: Any) -> Tensor:
        if has_torch_function((x,)):
            return handle_torch_function(function, (x,), x, *args)  # type: ignore[no-any-return]
        return body(x, *args)

    return function


def centre(x: Tensor) -> Tensor:
    return x - x.mean(0)


# ---- attention across samples in one sequence (5) ----


def pack(h: Tensor) -> Tensor:
    return h.reshape(1, 1, -1, D)


def pack_by_mask(h: Tensor) -> Tensor:
    return h[torch.ones(h.shape[:2], dtype=torch.bool)].view(1, 1, -1, D)


def pack_unequal(h: Tensor) -> Tensor:
    return h[h[..., 0] > -0.2].view(1, 1, -1, D)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pack", [pack, pack_by_mask, pack_unequal])
def test_packed_attention_without_a_mask_is_refused(pack: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        p = pack(m.a(x).to(dtype))
        return F.scaled_dot_product_attention(p, p, p)

    with pytest.raises(SamplesMixed, match=r"attends from each sample to the others|mixes|position"):
        run(make(forward), torch.randn(64, T, D))


def attend_packed(m: Any, x: Tensor, mask: Callable[[Tensor], Tensor]) -> Tensor:
    sample = torch.arange(len(x)).repeat_interleave(T)
    is_own = sample[:, None] == sample
    p = pack(m.a(x))
    return F.scaled_dot_product_attention(p, p, p, attn_mask=mask(is_own)).view(len(x), T, D)


@pytest.mark.parametrize(
    "mask",
    [
        lambda own: own,
        lambda own: own & own.tril(),
        lambda own: torch.zeros(own.shape).double().masked_fill(~own, -torch.inf),
    ],
    ids=["bool", "causal", "floats"],
)
def test_packed_attention_with_a_mask_of_blocks_is_followed(mask: Callable[[Tensor], Tensor]) -> None:
    check(make(lambda m, x: attend_packed(m, x, mask)), torch.randn(B, T, D))


@pytest.mark.parametrize(
    "mask",
    [
        lambda own: own | torch.eye(len(own)).roll(T, 0).bool(),  # one key of another sample
        lambda own: own & False,  # nothing is allowed
        lambda own: torch.zeros(own.shape).masked_fill(~own, -8.0),  # others count less
        lambda own: torch.ones_like(own).tril(),
    ],
    ids=["one other key", "no key", "low scores", "causal only"],
)
def test_packed_attention_with_other_masks_is_refused(mask: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(SamplesMixed):
        run(make(lambda m, x: attend_packed(m, x, mask)), torch.randn(B, T, D))


def test_a_mask_of_blocks_is_read_in_each_call() -> None:
    allowed = [True]
    model = make(lambda m, x: attend_packed(m, x, lambda own: own if allowed[0] else own | True))
    run(model, torch.randn(B, T, D))
    allowed[0] = False
    with pytest.raises(SamplesMixed):
        run(model, torch.randn(B, T, D))


# ---- rounding (2, 3, 4) ----


@make_torch_function
def mix_in_bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().softmax(0).float()


@make_torch_function
def return_bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16() * 2


@make_torch_function
def mix_a_little(x: Tensor) -> Tensor:
    return x * 2 + 1e-6 * x.sum(0)


@make_torch_function
def double_in_float32(x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        raise TypeError("only float32")
    return x * 2


@make_torch_function
def mix_in_float32(x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        raise TypeError("only float32")
    return x * 2 + 1e-6 * x.sum(0)


@make_torch_function
def double_in_half_precision(x: Tensor) -> Tensor:
    if x.dtype != torch.bfloat16:
        raise TypeError("only bfloat16")
    return x * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [mix_in_bfloat16, return_bfloat16, mix_a_little])
def test_a_difference_that_few_digits_would_explain_is_not_accepted(function: Any, dtype: torch.dtype) -> None:
    with pytest.raises(SamplesMixed):
        run(make(lambda m, x: function(m.a(x).to(dtype))), torch.randn(512, D))


def test_functions_that_accept_one_precision_only() -> None:
    run(make(lambda m, x: double_in_float32(m.a(x))), torch.randn(B, D))
    with pytest.raises(SamplesMixed):
        run(make(lambda m, x: mix_in_float32(m.a(x))), torch.randn(B, D))
    with pytest.raises(SamplesMixed, match=r"computes in torch.bfloat16"):
        run(make(lambda m, x: double_in_half_precision(m.a(x).bfloat16())), torch.randn(B, D))


# ---- what a trial must not remember (6, 20 to 25) ----


class Switch:
    def __init__(self) -> None:
        self.is_on = False

    def __call__(self, x: Tensor) -> Tensor:
        return centre(x) if self.is_on else x * 2


SWITCH = Switch()


@make_torch_function
def read_an_argument(x: Tensor, switch: Switch) -> Tensor:
    return switch(x)


@make_torch_function
def read_a_global(x: Tensor) -> Tensor:
    return SWITCH(x)


@make_torch_function
def read_a_list(x: Tensor, flags: list[bool]) -> Tensor:
    return centre(x) if flags[0] else x * 2


@make_torch_function
def read_a_tensor(x: Tensor, flag: Tensor) -> Tensor:
    return centre(x) if bool(flag) else x * 2


STATE: dict[str, Callable[[Tensor], Tensor]] = {
    "an object": lambda h: read_an_argument(h, SWITCH),
    "a global": read_a_global,
    "a list": lambda h: read_a_list(h, [SWITCH.is_on]),
    "a tensor": lambda h: read_a_tensor(h, torch.tensor(SWITCH.is_on)),
    "a closure": make_torch_function(lambda x: SWITCH(x)),
    "a callable object": make_torch_function(SWITCH),
}


@pytest.mark.parametrize("name", STATE)
def test_functions_that_read_state_are_tried_again(name: str) -> None:
    function = STATE[name]
    model, x = make(lambda m, x: function(m.a(x))), torch.randn(B, D)
    SWITCH.is_on = False
    try:
        run(model, x)
        SWITCH.is_on = True
        with pytest.raises(SamplesMixed):
            run(model, x)
        SWITCH.is_on = False
        run(model, x)
    finally:
        SWITCH.is_on = False


@contextmanager
def set_default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def set_deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


FLAGS: dict[str, tuple[Callable[[], bool], Callable[[], Any]]] = {
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda: torch.autocast("cpu", torch.bfloat16)),
    "default dtype": (lambda: torch.get_default_dtype() == torch.float64, set_default_dtype),
    "deterministic": (torch.are_deterministic_algorithms_enabled, set_deterministic),
    "attention": (lambda: not torch.backends.cuda.math_sdp_enabled(), lambda: torch.nn.attention.sdpa_kernel([])),
}


@pytest.mark.parametrize("mixes_inside", [True, False])
@pytest.mark.parametrize("name", FLAGS)
def test_functions_that_read_a_flag_are_tried_again(name: str, mixes_inside: bool) -> None:
    """Accepted once with the flag and later without it, and the reverse."""
    is_set, set_flag = FLAGS[name]
    function = make_torch_function(lambda x: centre(x) if is_set() == mixes_inside else x * 2)
    layer, x = nn.Linear(D, D), torch.randn(B, D)

    def step(inside: bool) -> None:
        with record(layer, loss_reduction="sum"):
            h = layer(x)
            if inside:
                with set_flag():
                    h = function(h)
            else:
                h = function(h)
            h.float().square().sum().backward()

    step(not mixes_inside)
    with pytest.raises(SamplesMixed):
        step(mixes_inside)


@pytest.mark.parametrize("first", [False, True])
def test_functions_that_read_the_grad_mode_are_tried_again(first: bool) -> None:
    function = make_torch_function(lambda x: centre(x) if torch.is_grad_enabled() else x * 2)
    layer, x = nn.Linear(D, D), torch.randn(B, D)
    for enabled in (first, not first):
        with record(layer, loss_reduction="sum"):
            with torch.set_grad_enabled(enabled):
                h = function(layer(x).detach())
            if not enabled:
                (layer(x) * h).square().sum().backward()
                continue
            with pytest.raises(SamplesMixed):
                (layer(x) * h).square().sum().backward()


LIBRARY = torch.library.Library("persample_findings", "DEF")
LIBRARY.define("mixes_beyond(Tensor x, float limit) -> Tensor")


def mix_beyond(x: Tensor, limit: float) -> Tensor:
    return x * 2 if x.abs().max() <= limit else x - x.mean(0)


LIBRARY.impl("mixes_beyond", mix_beyond, "CompositeImplicitAutograd")


@pytest.mark.parametrize("limit", [20.0, 1e4])
@pytest.mark.parametrize("kind", ["operator", "function"])
def test_a_custom_op_that_mixes_large_values_is_refused_where_it_does(kind: str, limit: float) -> None:
    functions = {"operator": torch.ops.persample_findings.mixes_beyond, "function": make_torch_function(mix_beyond)}
    layer = nn.Linear(D, D)

    def step(scale: float) -> None:
        with record(layer, loss_reduction="sum"):
            functions[kind](layer(torch.randn(B, D)) * scale, limit).square().sum().backward()

    if limit > 1e3:  # beyond all values that a trial invents
        step(1.0)
    with pytest.raises(SamplesMixed):
        step(10 * limit)
    with pytest.raises(SamplesMixed):
        step(10 * limit)


def test_a_function_that_never_changes_shows_nothing() -> None:
    """A trial in which no value made a difference is no reason to accept a function."""
    function = make_torch_function(lambda x: centre(x).clamp(min=1e9))
    with pytest.raises(SamplesMixed):
        run(make(lambda m, x: function(m.a(x))), torch.randn(B, D))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_distance_object_that_changes(reduction: str) -> None:
    switch = Switch()

    def distance(a: Tensor, b: Tensor) -> Tensor:
        return (switch(a) - b).square().sum(1)

    layer, x = nn.Linear(D, D), torch.randn(B, D)

    def step() -> Any:
        with record(layer, loss_reduction=reduction) as grads:
            h = layer(x)
            loss = F.triplet_margin_with_distance_loss(
                h, x, x.flip(1), distance_function=distance, margin=20.0, reduction=reduction
            )
            loss.backward()
        return grads

    def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
        h = model(x)
        return F.triplet_margin_with_distance_loss(h, x, x.flip(1), distance_function=distance, margin=20.0)

    assert_rows_close(
        {name: rows.double() for name, rows in step().dense().items()}, loop_gradients(layer, x, compute_loss), 1e-5
    )
    switch.is_on = True
    with pytest.raises(SamplesMixed):
        step()


def test_tensor_split_with_other_indices() -> None:
    """The rows of each part follow the values of the index tensor."""
    for at in ([2], [4], [1, 3], [0, 6]):
        index = torch.tensor(at)
        check(
            make(lambda m, x, index=index: torch.cat([p * 2 for p in m.a(x).tensor_split(index[: len(x)])])),
            torch.randn(B, D),
        )


@pytest.mark.parametrize("at", [[2], [4], [2, 4]])
def test_parts_of_a_tensor_split_by_a_tensor(at: list[int]) -> None:
    model = make(lambda m, x: m.a(x.detach().tensor_split(m.at)[0]))
    x = torch.randn(B, D)
    for index in ([1], at):
        model.at = torch.tensor(index)
        norms = run(model, x).norms()
        assert (norms > 0).nonzero().flatten().tolist() == list(range(index[0]))


SCANS: dict[str, Callable[[Tensor], Tensor]] = {
    "cumprod": lambda k: k.cumprod(0),
    "cumprod of a function": lambda k: torch.cumprod(k, dim=0),
    "cummax": lambda k: k.cummax(0)[0],
    "cummin": lambda k: torch.cummin(k, 0).values,
    "cumsum": lambda k: k.cumsum(0),
}


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("name", SCANS)
def test_scans_over_the_batch_are_refused_for_all_values(name: str, zeros: bool) -> None:
    """A product of integers with zeros in the first row is zero, whatever the other rows are."""
    k = torch.zeros(B, D, dtype=torch.long) if zeros else torch.randint(1, 4, (B, D))
    model = make(lambda m, x, k: m.a(x) * SCANS[name](k))
    with pytest.raises(SamplesMixed, match="combines samples"):
        run(model, torch.randn(B, D), k)


# ---- means over unequal rows (26) ----


MASK = torch.tensor([[True, True], [True, False], [False, True]])


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("reduction", ["batchmean", "mean"])
def test_kl_div_of_unequal_rows_is_refused(reduction: str) -> None:
    layer = nn.Linear(D, D)
    x, q = torch.randn(3, 2, D), torch.randn(3, 2, D).softmax(-1)
    with pytest.raises(SamplesMixed, match="mean over"), record(layer, divisor="refuse"):
        F.kl_div(layer(x).log_softmax(-1)[MASK], q[MASK], reduction=reduction).backward()


def test_kl_div_of_equal_rows_is_followed() -> None:
    layer = nn.Linear(D, D).double()
    x, q = torch.randn(3, 2, D).double(), torch.randn(3, 2, D).softmax(-1).double()
    mask = torch.tensor([[True, False], [False, True], [True, False]])
    with record(layer) as grads:
        F.kl_div(layer(x).log_softmax(-1)[mask], q[mask], reduction="batchmean").backward()
    expected = loop_gradients(
        layer,
        {"x": x, "q": q, "mask": mask},
        lambda m, b: F.kl_div(m(b["x"]).log_softmax(-1)[b["mask"]], b["q"][b["mask"]], reduction="batchmean"),
    )
    assert_rows_close(grads.dense(), expected)


# ---- functions of discrete values, in which a trial rarely makes a difference (24) ----

LOOKED_UP: dict[str, Callable[[Tensor], Tensor]] = {
    "isin": lambda k: torch.isin(k, k[:1]),
    "isin the batch": lambda k: torch.isin(k, k),
    "bucketize": lambda k: torch.bucketize(k, k[:, 0].sort()[0]),
    "searchsorted": lambda k: torch.searchsorted(k[:, 0].sort()[0], k),
    "searchsorted along the batch": lambda k: torch.searchsorted(k.T.sort()[0].contiguous(), k.T.contiguous()).T,
}


@pytest.mark.parametrize("name", LOOKED_UP)
def test_values_that_are_looked_up_in_other_samples_are_refused(name: str) -> None:
    model = Calls(lambda m, x, k: m.a(x) * LOOKED_UP[name](k), a=nn.Linear(D, D))
    for k in (torch.zeros(B, D).long(), torch.randint(0, 5, (B, D))):
        with pytest.raises(SamplesMixed), record(model, verify=False):
            model(torch.randn(B, D), k).square().sum().backward()


def test_values_that_are_looked_up_in_constants_and_in_the_own_sample() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        own = torch.searchsorted(x.sort()[0], x - 0.1)
        levels = torch.linspace(-1, 1, 6).double()
        return m.a(x) * (own + torch.searchsorted(levels, x) + torch.bucketize(x, levels))  # type: ignore[no-any-return]

    for batch in (B, 3):
        check(make(forward), torch.randn(batch, D))
