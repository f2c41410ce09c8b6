"""Attention and transformer layers with all their options, against the loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from persample import SamplesMixed, call_for_per_sample_grads, record
from persample.testing.oracle import Gradients, assert_rows_close, compute_test_loss, find_tensors
from tests.support.case import Case
from tests.support.cases import Calls

B, D, HEADS = 3, 4, 2
LENGTHS = [(5, 4), (B, B)]  # of the queries and of the keys

# Torch warns about layers that it cannot run on its fast path, which exists only in eval().
pytestmark = pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors"
)


# ---- the two front ends ----


def compute_by_call(module: nn.Module, args: Any, kwargs: Any, case: Case) -> tuple[Any, Gradients]:
    outputs = call_for_per_sample_grads(module, **case.options)(*args, **kwargs)
    compute_test_loss(outputs, case.out_dim).backward()
    return outputs, {name: p.grad_sample for name, p in module.named_parameters() if hasattr(p, "grad_sample")}


def compute_by_record(module: nn.Module, args: Any, kwargs: Any, case: Case) -> tuple[Any, Gradients]:
    batch_dim = 0 if case.options.get("batch_first", True) else 1
    with record(module, batch_dim=batch_dim, loss_reduction="sum") as grads:
        outputs = module(*args, **kwargs)
        compute_test_loss(outputs, case.out_dim).backward()
    return outputs, grads.dense()


FRONT_ENDS = [compute_by_call, compute_by_record]


def fill_with_zeros(rows: Gradients, module: nn.Module) -> Gradients:
    """Add rows of zeros for trained parameters that were not used."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    return {name: rows.get(name, p.detach().new_zeros(B, *p.shape)) for name, p in trained.items()}


def check(case: Case, same_bits: bool = True) -> None:
    module, args, kwargs = case.build()
    expected = case.loop_gradients(copy.deepcopy(module), args, kwargs, B)
    plain = list(find_tensors(copy.deepcopy(module)(*args, **kwargs)))
    assert all(rows.isfinite().all() for rows in expected.values())
    for front_end in FRONT_ENDS:
        subject = copy.deepcopy(module)
        outputs, rows = front_end(subject, args, kwargs, case)
        for ours, theirs in zip(find_tensors(outputs), plain, strict=True):
            torch.testing.assert_close(ours, theirs, **({"rtol": 0, "atol": 0} if same_bits else {}))
        assert_rows_close(fill_with_zeros(rows, subject), fill_with_zeros(expected, subject))


def check_by_slices(case: Case) -> None:
    """Check a model with dropout: the oracle is the plain batch with the same seed and the loss of one sample."""
    module, args, kwargs = case.build()
    by_slice = []
    for n in range(B):
        own = copy.deepcopy(module)
        torch.manual_seed(5)
        outputs = [output.narrow(case.out_dim, n, 1) for output in find_tensors(own(*args, **kwargs))]
        compute_test_loss(outputs, case.out_dim).backward()
        by_slice.append({name: p.grad for name, p in own.named_parameters()})
    expected = {name: torch.stack([rows[name] for rows in by_slice]) for name in by_slice[0]}
    for front_end in FRONT_ENDS:
        subject, plain = copy.deepcopy(module), copy.deepcopy(module)
        torch.manual_seed(5)
        theirs = list(find_tensors(plain(*args, **kwargs)))
        after = torch.get_rng_state()
        torch.manual_seed(5)
        outputs, rows = front_end(subject, args, kwargs, case)
        assert torch.equal(torch.get_rng_state(), after)
        for got, want in zip(find_tensors(outputs), theirs, strict=True):
            assert torch.equal(got, want)
        assert_rows_close(rows, expected)
        compute_test_loss(theirs, case.out_dim).backward()
        for name, p in plain.named_parameters():
            torch.testing.assert_close(rows[name].sum(0), p.grad)


# ---- MultiheadAttention ----

LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "bias_kv, zero_attn": {"add_bias_kv": True, "add_zero_attn": True},
    "kdim, vdim": {"kdim": 3, "vdim": 6},
    "kdim, vdim, bias_kv": {"kdim": 3, "vdim": 6, "add_bias_kv": True, "bias": False},
}

# Arguments of `forward` besides query, key and value. A string names a mask that is made for each case.
CALLS: dict[str, dict[str, Any]] = {
    "weights": {},
    "no weights": {"need_weights": False},
    "weights of each head": {"average_attn_weights": False},
    "padding": {"key_padding_mask": "flags"},
    "padding, no weights": {"key_padding_mask": "flags", "need_weights": False},
    "padding in floats": {"key_padding_mask": "floats"},
    "mask": {"attn_mask": "bool (T, S)"},
    "mask in floats": {"attn_mask": "float (T, S)", "need_weights": False},
    "mask for each head": {"attn_mask": "bool heads"},
    "mask for each head in floats": {"attn_mask": "float heads", "need_weights": False},
    "mask and padding": {"attn_mask": "float (T, S)", "key_padding_mask": "floats", "need_weights": False},
}


def make_attention(
    layer: dict[str, Any],
    call: dict[str, Any],
    lengths: tuple[int, int],
    first: bool,
    cross: bool,
    dropout: float = 0.0,
) -> Case:
    """The samples of the inputs lie in dim 0. The layer takes them there (`first`) or in dim 1."""
    t, s = lengths if cross else lengths[:1] * 2
    widths = (layer.get("kdim", D), layer.get("vdim", D))

    def forward(m: Any, query: Tensor, key: Tensor, value: Tensor, **masks: Tensor) -> Any:
        given: dict[str, Any] = dict(call)
        for name, mask in masks.items():  # torch expects one mask for each head as (B * heads, T, S)
            given[name] = mask.flatten(0, 1) if mask.dim() == 4 else mask
        if hasattr(m, "mask"):
            given["attn_mask"] = m.mask
        if not cross:
            key = value = query
        parts = (query, key, value) if first else (part.transpose(0, 1) for part in (query, key, value))
        output, weights = m.a(*parts, **given)
        output = output if first else output.transpose(0, 1)
        return output if weights is None else (output, weights)

    def make_flags(*shape: int) -> Tensor:
        masked = torch.rand(shape) < 0.4
        masked[..., 0] = False
        return masked

    def make_masks() -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for name in ("key_padding_mask", "attn_mask"):
            kind = call.get(name, "")
            shape = (B, HEADS, t, s) if "heads" in kind else (B, s)
            if name == "key_padding_mask" or "heads" in kind:
                if "float" in kind:
                    made[name] = torch.randn(shape)
                elif kind:
                    made[name] = make_flags(*shape)
        return made

    def module() -> nn.Module:
        kind = call.get("attn_mask", "")
        constants = {"mask": make_flags(t, s) if "bool" in kind else torch.randn(t, s)} if "(T, S)" in kind else {}
        return Calls(forward, a=nn.MultiheadAttention(D, HEADS, dropout, batch_first=first, **layer), **constants)

    def inputs() -> list[Tensor]:
        return [torch.randn(B, t, D), torch.randn(B, s, widths[0]), torch.randn(B, s, widths[1])]

    return Case("attention", module, inputs, make_masks)


def make_attention_cases() -> Iterator[Any]:
    for layer_name, layer in LAYERS.items():
        cross = "kdim" in layer
        for i, (call_name, call) in enumerate(CALLS.items()):
            for t, s in LENGTHS:
                case = make_attention(layer, call, (t, s), i % 2 == 0, cross)
                yield pytest.param(case, id=f"{layer_name}-{call_name}-{t}")
    for call_name, call in CALLS.items():
        for first in (True, False):
            yield pytest.param(make_attention({}, call, LENGTHS[0], first, True), id=f"cross-{call_name}-{first}")


@pytest.mark.parametrize("case", list(make_attention_cases()))
def test_attention(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(("t", "need_weights"), [(5, True), (5, False), (B, False)])
def test_causal_attention(t: int, need_weights: bool) -> None:
    def forward(m: Any, h: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(h.shape[1], dtype=h.dtype)
        return m.a(h, h, h, attn_mask=mask, is_causal=True, need_weights=need_weights)[0]

    check(
        Case("", lambda: Calls(forward, a=nn.MultiheadAttention(D, HEADS, batch_first=True)), lambda: [make_inputs(t)])
    )


@pytest.mark.parametrize("t", [5, B])
def test_attention_with_the_samples_in_dim_1(t: int) -> None:
    module = Calls(lambda m, h: m.a(h, h, h, need_weights=False)[0], a=nn.MultiheadAttention(D, HEADS))
    options = {"batch_first": False}
    check(Case("", lambda: module, lambda: [torch.randn(t, B, D)], dims=[1], out_dim=1, options=options))


@pytest.mark.parametrize("call", ["weights", "no weights", "padding", "mask for each head in floats"])
@pytest.mark.parametrize("first", [True, False])
def test_attention_with_dropout(call: str, first: bool) -> None:
    check_by_slices(make_attention({}, CALLS[call], LENGTHS[0], first, True, dropout=0.4))


def test_attention_without_a_batch_dimension() -> None:
    def forward(m: Any, h: Tensor, padding: Tensor) -> Tensor:
        return torch.stack([m.a(own, own, own, key_padding_mask=p)[0] for own, p in zip(h, padding, strict=True)])

    module = Calls(forward, a=nn.MultiheadAttention(D, HEADS))
    check(Case("", lambda: module, lambda: [make_inputs(5), torch.arange(5).expand(B, 5) > 3]))


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.MultiheadAttention(D, HEADS), (B, D)),  # the samples are read as steps of one sequence
        (lambda: nn.MultiheadAttention(D, HEADS), (B, 5, D)),  # the layer expects the samples in dim 1
        (lambda: nn.MultiheadAttention(D, HEADS), (B, B, D)),
        (lambda: nn.MultiheadAttention(D, HEADS, batch_first=True, add_bias_kv=True), (B, D)),
    ],
)
def test_attention_across_the_samples_is_refused(front_end: Any, layer: Callable[[], nn.Module], shape: Any) -> None:
    module = Calls(lambda m, h: m.a(h, h, h)[0], a=layer())
    with pytest.raises(SamplesMixed):
        front_end(module, [torch.randn(shape)], {}, Case("", lambda: module, list))


# ---- transformer layers and stacks ----


def make_inputs(t: int) -> Tensor:
    return torch.randn(B, t, D)


def make_padding(t: int) -> Tensor:
    return torch.arange(t) >= torch.tensor([[t], [t - 2], [t - 1]])


def make_causal_mask(t: int) -> Tensor:
    return torch.ones(t, t).triu(1).bool()


def swish(x: Tensor) -> Tensor:
    return x * x.sigmoid()


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm first": {"norm_first": True},
    "gelu": {"activation": "gelu"},
    "own activation, no bias": {"activation": swish, "bias": False},
    "gelu, norm first": {"activation": "gelu", "norm_first": True, "layer_norm_eps": 1e-3},
}
TRAINING = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
EACH_SETTING = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
EACH_LENGTH = pytest.mark.parametrize(("t", "s"), LENGTHS)
FIRST = pytest.mark.parametrize("first", [True, False], ids=["first", "second"])


def swap(parts: Any, first: bool) -> tuple[Any, ...]:
    return tuple(part if first else part.transpose(0, 1) for part in parts)


def encode(m: Any, h: Tensor, **masks: Any) -> Tensor:
    """Apply `m.e`; input and output have the samples in dim 0."""
    (output,) = swap([m.e(*swap([h], m.first), **masks)], m.first)
    return output


def decode(m: Any, h: Tensor, memory: Tensor, **masks: Any) -> Tensor:
    (output,) = swap([m.d(*swap([h, memory], m.first), **masks)], m.first)
    return output


def make_encoder_layer(setting: dict[str, Any], first: bool = True, dropout: float = 0.0) -> nn.Module:
    return nn.TransformerEncoderLayer(D, HEADS, 6, dropout, batch_first=first, **setting)


def make_decoder_layer(setting: dict[str, Any], first: bool = True, dropout: float = 0.0) -> nn.Module:
    return nn.TransformerDecoderLayer(D, HEADS, 6, dropout, batch_first=first, **setting)


@EACH_SETTING
@EACH_LENGTH
@FIRST
@TRAINING
def test_encoder_layer(setting: dict[str, Any], t: int, s: int, first: bool, training: bool) -> None:
    def module() -> nn.Module:
        return Calls(
            lambda m, h, p: encode(m, h, src_mask=m.mask, src_key_padding_mask=p),
            e=make_encoder_layer(setting, first), mask=make_causal_mask(t), first=first,
        ).train(training)  # fmt: skip

    check(Case("", module, lambda: [make_inputs(t), make_padding(t)]))


@EACH_SETTING
@EACH_LENGTH
@FIRST
def test_decoder_layer(setting: dict[str, Any], t: int, s: int, first: bool) -> None:
    def forward(m: Any, h: Tensor, memory: Tensor, padding: Tensor, memory_padding: Tensor) -> Tensor:
        masks = {"tgt_mask": m.mask, "tgt_is_causal": True, "memory_mask": m.memory_mask}
        return decode(m, h, memory, **masks, tgt_key_padding_mask=padding, memory_key_padding_mask=memory_padding)

    def module() -> nn.Module:
        masks = {
            "mask": torch.zeros(t, t).masked_fill(make_causal_mask(t), float("-inf")),
            "memory_mask": torch.randn(t, s),
        }
        return Calls(forward, d=make_decoder_layer(setting, first), first=first, **masks)

    def inputs() -> list[Tensor]:
        flags = [torch.zeros(B, n).masked_fill(make_padding(n), float("-inf")) for n in (t, s)]
        return [make_inputs(t), make_inputs(s), *flags]

    check(Case("", module, inputs))


@TRAINING
@EACH_LENGTH
@pytest.mark.parametrize("nested", [True, False])
def test_encoder_of_two_layers(t: int, s: int, training: bool, nested: bool) -> None:
    def module() -> nn.Module:
        stack = nn.TransformerEncoder(make_encoder_layer({}), 2, nn.LayerNorm(D), enable_nested_tensor=nested)
        return Calls(lambda m, h, p: encode(m, h, src_key_padding_mask=p) * ~p[..., None], e=stack, first=True).train(
            training
        )

    check(Case("", module, lambda: [make_inputs(t), make_padding(t)]))


@TRAINING
@EACH_LENGTH
def test_decoder_of_two_layers(t: int, s: int, training: bool) -> None:
    def module() -> nn.Module:
        stack = nn.TransformerDecoder(make_decoder_layer({"norm_first": True}, False), 2, nn.LayerNorm(D))
        masks = {"tgt_mask": make_causal_mask(t), "tgt_is_causal": True}
        return Calls(lambda m, h, memory: decode(m, h, memory, **masks), d=stack, first=False).train(training)

    check(Case("", module, lambda: [make_inputs(t), make_inputs(s)]))


@TRAINING
@EACH_LENGTH
@FIRST
def test_transformer(t: int, s: int, first: bool, training: bool) -> None:
    def forward(m: Any, source: Tensor, target: Tensor, flags: Tensor) -> Tensor:
        masks = {"src_key_padding_mask": flags, "memory_key_padding_mask": flags, "tgt_mask": m.mask}
        return swap([m.t(*swap([source, target], first), tgt_is_causal=True, **masks)], first)[0]

    def module() -> nn.Module:
        whole = nn.Transformer(D, HEADS, 1, 2, 6, 0.0, batch_first=first, norm_first=first)
        return Calls(forward, t=whole, mask=make_causal_mask(t)).train(training)

    check(Case("", module, lambda: [make_inputs(s), make_inputs(t), make_padding(s)]))


@pytest.mark.parametrize("t", [5, B])
def test_transformer_with_the_samples_in_dim_1(t: int) -> None:
    def inputs() -> list[Tensor]:
        return [torch.randn(4, B, D), torch.randn(t, B, D)]

    options = {"batch_first": False}
    check(Case("", lambda: nn.Transformer(D, HEADS, 1, 1, 6, 0.0), inputs, dims=[1, 1], out_dim=1, options=options))


@FIRST
def test_layers_with_dropout(first: bool) -> None:
    def forward(m: Any, h: Tensor, p: Tensor) -> Tensor:
        memory = encode(m, h, src_key_padding_mask=p)
        return decode(m, h.sin(), memory, tgt_mask=m.mask, memory_key_padding_mask=p)

    def module() -> nn.Module:
        layers = {"e": make_encoder_layer({}, first, 0.3), "d": make_decoder_layer({"norm_first": True}, first, 0.3)}
        return Calls(forward, mask=make_causal_mask(5), first=first, **layers)

    check_by_slices(Case("", module, lambda: [make_inputs(5), make_padding(5)]))


# ---- frozen layers: in eval(), torch runs a layer without trained parameters on its fast path ----


def make_tagger(trained: str) -> Callable[[], nn.Module]:
    """An encoder in eval() with one trained parameter."""

    def module() -> nn.Module:
        stack = nn.TransformerEncoder(make_encoder_layer({}), 2, nn.LayerNorm(D), enable_nested_tensor=False)
        made = Calls(lambda m, h: m.o(m.e(m.i(h))), i=nn.Linear(D, D), e=stack, o=nn.Linear(D, 2)).eval()
        for name, p in made.named_parameters():
            p.requires_grad_(name == trained)
        return made

    return module


ENCODER = "e.layers.{}.{}"
PARTS = ("self_attn.in_proj_weight", "self_attn.out_proj.bias", "linear1.weight", "linear2.bias", "norm1.weight")


@pytest.mark.parametrize(
    "trained", ["i.weight", "o.weight", "e.norm.bias", *(ENCODER.format(k, part) for k in (0, 1) for part in PARTS)]
)
@pytest.mark.parametrize("t", [5, B])
def test_one_trained_parameter(trained: str, t: int) -> None:
    check(Case("", make_tagger(trained), lambda: [make_inputs(t)]), same_bits=False)


def test_a_model_without_trained_parameters() -> None:
    module, args, kwargs = Case("", make_tagger(""), lambda: [make_inputs(5)]).build()
    with pytest.raises(RuntimeError, match="does not require grad"):
        compute_by_call(module, args, kwargs, Case("", make_tagger(""), list))


def test_a_frozen_encoder_has_the_same_output() -> None:
    def module() -> nn.Module:
        stack = nn.TransformerEncoder(make_encoder_layer({}), 2).requires_grad_(False)
        return Calls(lambda m, h, p: m.o(m.e(h, src_key_padding_mask=p)), e=stack, o=nn.Linear(D, 2)).eval()

    check(Case("", module, lambda: [make_inputs(5), make_padding(5)]))
