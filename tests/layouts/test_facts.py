"""Facts about torch functions: one record for an operator, and a list of the functions without one."""

from __future__ import annotations

import operator
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import get_overridable_functions, resolve_name

from persample._internal.facts import _RECORDS, all_with, describe, facts, find_functions
from persample.forward.equivalents import is_composite
from persample.layouts import DECLARATIONS
from persample.rules.registry import HANDLED_FUNCTIONS, get_rules

TORCH = "2.13"  # the version that the list is for

# Why functions have no record. Names are relative to torch; private functions, and functions with a rule or with Python
# code that is followed op by op, need none.
WITHOUT_RECORD = {
    "they make, take or describe sparse tensors, which are refused": """
        Tensor.ccol_indices Tensor.coalesce Tensor.col_indices Tensor.crow_indices Tensor.indices Tensor.row_indices
        Tensor.resize_as_sparse_ Tensor.smm Tensor.sparse_mask Tensor.sparse_resize_ Tensor.sparse_resize_and_clear_
        Tensor.sspaddmm Tensor.to_dense Tensor.to_sparse Tensor.values ccol_indices_copy col_indices_copy
        crow_indices_copy indices_copy row_indices_copy values_copy hspmm smm sspaddmm
    """,
    "quantized tensors have no gradients": """
        Tensor.dequantize Tensor.int_repr Tensor.q_per_channel_axis Tensor.q_per_channel_scales
        Tensor.q_per_channel_zero_points Tensor.q_scale Tensor.q_zero_point Tensor.qscheme choose_qparams_optimized
        dequantize fake_quantize_per_channel_affine fake_quantize_per_tensor_affine fbgemm_linear_fp16_weight
        fbgemm_linear_fp16_weight_fp32_activation fbgemm_linear_int8_weight fbgemm_linear_int8_weight_fp32_activation
        fbgemm_linear_quantize_weight fbgemm_pack_gemm_matrix_fp16 fbgemm_pack_quantized_matrix
        fused_moving_avg_obs_fake_quant int_repr q_per_channel_axis q_per_channel_scales q_per_channel_zero_points
        q_scale q_zero_point quantize_per_channel quantize_per_tensor quantize_per_tensor_dynamic quantized_batch_norm
        quantized_gru_cell quantized_lstm_cell quantized_max_pool1d quantized_max_pool2d quantized_max_pool3d
        quantized_rnn_relu_cell quantized_rnn_tanh_cell
    """,
    "the type of the result says that it is a decision": """
        Tensor.__bool__ Tensor.__contains__ Tensor.__nonzero__ Tensor.is_nonzero Tensor.is_set_to is_nonzero
    """,
    "they print, pickle, load or name a tensor, or belong to its place in the graph or on a device": """
        Tensor.__array_wrap__ Tensor.__dlpack_device__ Tensor.__format__ Tensor.__reduce_ex__ Tensor.__repr__
        Tensor.__setstate__ Tensor.dim_order Tensor.grad.__get__ Tensor.grad_dtype.__get__ Tensor.module_load
        Tensor.name.__get__ Tensor.output_nr.__get__ Tensor.record_stream Tensor.storage_type Tensor.to_mkldnn
        Tensor.volatile.__get__ autocast
    """,
    "they compute with sizes": "sym_float sym_ite sym_max sym_min sym_not sym_sqrt sym_sum",
    "torch.nn.functional calls them, and is followed instead": """
        affine_grid_generator batch_norm_elemt batch_norm_stats binary_cross_entropy_with_logits cosine_embedding_loss
        ctc_loss hinge_embedding_loss kl_div margin_ranking_loss native_group_norm native_layer_norm poisson_nll_loss
        triplet_margin_loss
    """,
    "kernels of a backward pass or of one backend": """
        batch_norm_backward_elemt batch_norm_backward_reduce miopen_convolution miopen_convolution_add_relu
        miopen_convolution_relu miopen_convolution_transpose miopen_depthwise_convolution miopen_rnn
    """,
    "the tracker handles them, or the audit": "Tensor.set_ Tensor.type_as",
    "they are rare, and tried": """
        Tensor.__reversed__ Tensor.apply_ Tensor.as_strided_scatter Tensor.diagflat Tensor.diagonal_scatter
        Tensor.fill_diagonal_ Tensor.geqrf Tensor.hash_tensor Tensor.index Tensor.lu Tensor.map2_ Tensor.map_
        Tensor.ormqr Tensor.put Tensor.put_ Tensor.resize Tensor.resize_as Tensor.slice_inverse
        Tensor.sum_to_size Tensor.take as_strided_scatter combinations diagflat diagonal_scatter frobenius_norm
        functional.block_diag functional.cartesian_prod functional.lu functional.pca_lowrank functional.svd_lowrank
        geqrf hash_tensor linalg.lstsq linalg.tensorinv linalg.tensorsolve lobpcg native_norm nn.functional.pdist
        norm_except_dim nuclear_norm ormqr put slice_inverse take
    """,
}
LISTED = {name for names in WITHOUT_RECORD.values() for name in names.split()}


def find_functions_without_record() -> set[str]:
    """The names of all functions that a mode can see, without those of private functions."""
    found = set()
    for functions in get_overridable_functions().values():
        for function in functions:
            name = str(resolve_name(function)).removeprefix("torch.")
            is_private = any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
            if not (is_private or function in _RECORDS or function in HANDLED_FUNCTIONS or is_composite(function)):
                found.add(name)
    return found


def test_functions_without_a_record_are_listed() -> None:
    missing = find_functions_without_record() - LISTED
    advice = (
        f"torch {torch.__version__} has functions without a record of facts: {', '.join(sorted(missing))}. Describe or "
        "declare them (CONTRIBUTING.md, 'Add a function'), or list them in WITHOUT_RECORD with the reason."
    )
    if missing and not torch.__version__.startswith(f"{TORCH}."):
        pytest.skip(advice)
    assert not missing, advice


def test_listed_functions_have_no_record() -> None:
    if not torch.__version__.startswith(f"{TORCH}."):
        pytest.skip(f"the list is for torch {TORCH}")
    assert not LISTED - find_functions_without_record()


def test_all_declared_functions_have_a_record() -> None:
    assert _RECORDS.keys() >= DECLARATIONS.keys()


SPELLINGS: dict[str, list[Any]] = {
    "div": [torch.div, torch.divide, torch.true_divide, Tensor.div_, Tensor.divide, Tensor.__truediv__],
    "cat": [torch.cat, torch.concat, torch.concatenate],
    "vstack": [torch.vstack, torch.row_stack],
    "split": [torch.split, Tensor.split, torch.unsafe_split, torch.split_copy],
    "rsub": [torch.rsub, Tensor.__rsub__],
    "dropout": [F.dropout, torch.dropout, torch.dropout_],
    "rrelu": [F.rrelu, torch.rrelu, F.rrelu_],
    "shape": [Tensor.shape.__get__],  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_all_spellings_share_a_record(name: str) -> None:
    records = {facts(function) for function in SPELLINGS[name]}
    assert {record.operator for record in records} == {name} and len(records) == 1


def find_documented_aliases() -> dict[str, tuple[Any, Any]]:
    """Functions whose documentation says that they are aliases, with the functions that it names."""
    found = {}
    for owner, name in [(o, name) for o in (torch, Tensor, torch.special, torch.linalg) for name in dir(o)]:
        function = getattr(owner, name)
        text = re.match(r"(?s).{0,200}?[Aa]lias (?:of|for) :\w+:`~?(?:torch\.)?([\w.]+)`", str(function.__doc__))
        if text is not None and callable(function):
            found[f"{owner.__name__}.{name}"] = (function, operator.attrgetter(text[1])(torch))
    return found


ALIASES = find_documented_aliases()


@pytest.mark.parametrize("name", ALIASES)
def test_documented_aliases_share_everything(name: str) -> None:
    alias, function = ALIASES[name]
    assert replace(facts(alias), operator="") == replace(facts(function), operator="")
    assert DECLARATIONS.get(alias) is DECLARATIONS.get(function)
    assert get_rules(alias) == get_rules(function)


def test_aliases_are_documented() -> None:
    assert "torch.divide" in ALIASES and "Tensor.clip_" in ALIASES and len(ALIASES) > 60


@pytest.mark.parametrize("name", ["sub", "div", "pow"])
def test_reflected_forms_of_operators_that_do_not_commute_are_others(name: str) -> None:
    assert not any(function in find_functions(name) for function in (Tensor.__rsub__, Tensor.__rdiv__, Tensor.__rpow__))


def test_a_second_record_is_an_error() -> None:
    with pytest.raises(ValueError, match="__rand__ has two records: as and and rand"):
        describe("rand", is_random=True)


def test_facts_that_were_collected_do_not_change() -> None:
    assert torch.add in all_with("is_size_free")
    with pytest.raises(ValueError, match="is_size_free"):
        describe(test_facts_that_were_collected_do_not_change, is_size_free=True)
