"""Models of Hugging Face transformers: both front ends equal the loop."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import persample
from persample.errors import SamplesMixed
from persample.testing.oracle import Gradients, assert_rows_close, compute_test_loss, find_tensors

pytest.importorskip("transformers")

import transformers

from tests.support.hf_models import CLIP, CLIP_EMBEDDINGS, MODELS, TIME_SERIES, B, TinyModel, make_cases

FrontEnd = Callable[[nn.Module, dict[str, Any]], tuple[Any, Gradients]]

CASES = list(make_cases(MODELS))
CHECKPOINTED = [
    case for case in CASES if case.name in ("BERT, T == B", "GPT-2, T == B", "Llama, T != B", "ViT, T != B")
]

# A softmax over keys does not depend on the bias of the keys; pooling minus its input does not depend on a bias.
NO_GRADIENT = re.compile(r"\bk(ey|ey_global|_proj|_lin)?\.bias|before_norm\.bias")


def run_record(module: nn.Module, kwargs: dict[str, Any]) -> tuple[Any, Gradients]:
    with persample.record(module, loss_reduction="sum") as grads:
        outputs = module(**kwargs)
        compute_test_loss(outputs, 0).backward()
    return outputs, {name: rows for name, rows in grads.dense().items() if rows.any()}


def run_call(module: nn.Module, kwargs: dict[str, Any]) -> tuple[Any, Gradients]:
    outputs = persample.call_for_per_sample_grads(module, loss_reduction="sum")(**kwargs)
    compute_test_loss(outputs, 0).backward()
    return outputs, {name: p.grad_sample for name, p in module.named_parameters() if hasattr(p, "grad_sample")}


both_front_ends = pytest.mark.parametrize("front_end", [run_record, run_call])


@both_front_ends
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_equal_the_loop(case: TinyModel, front_end: FrontEnd) -> None:
    module, args, kwargs = case.build()
    expected = case.loop_gradients(copy.deepcopy(module), args, kwargs, B)
    plain_outputs = copy.deepcopy(module)(**kwargs)
    outputs, actual = front_end(module, kwargs)
    assert_rows_close(actual, expected, case.tolerance)
    for ours, theirs in zip(find_tensors(outputs), find_tensors(plain_outputs), strict=True):
        assert torch.equal(ours, theirs), f"the output differs by {(ours - theirs).abs().max()}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_models_cannot_hide_a_bug(case: TinyModel) -> None:
    """The rows of the loop differ between samples, and add up to the ordinary gradient."""
    module, args, kwargs = case.build()
    expected = case.loop_gradients(copy.deepcopy(module), args, kwargs, B)
    compute_test_loss(module(**kwargs), 0).backward()
    plain = {name: p.grad[None] for name, p in module.named_parameters() if p.grad is not None}
    assert_rows_close({name: rows.sum(0, keepdim=True) for name, rows in expected.items()}, plain, case.tolerance)
    for name, rows in expected.items():
        if not NO_GRADIENT.search(name):
            assert rows.flatten(1).norm(dim=1).min() > 1e-3, name
            assert not torch.allclose(rows[0], rows[1], rtol=1e-3), name


@both_front_ends
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("case", CHECKPOINTED, ids=str)
def test_gradient_checkpointing(case: TinyModel, reentrant: bool, front_end: FrontEnd) -> None:
    module, args, kwargs = case.build()
    expected = case.loop_gradients(copy.deepcopy(module), args, kwargs, B)
    module.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_rows_close(front_end(module, kwargs)[1], expected, case.tolerance)


@both_front_ends
def test_contrastive_logits_are_refused(front_end: FrontEnd) -> None:
    (case,) = make_cases([CLIP])
    module, _, kwargs = case.build()
    with pytest.raises(SamplesMixed):
        front_end(module, kwargs)


@both_front_ends
def test_contrastive_loss_is_refused(front_end: FrontEnd) -> None:
    (case,) = make_cases([CLIP])
    module, _, kwargs = case.build()
    module.register_forward_hook(lambda _module, _args, given: given.loss)
    with pytest.raises(SamplesMixed):
        front_end(module, {**kwargs, "return_loss": True})


@both_front_ends
def test_embeddings_beside_unused_contrastive_logits(front_end: FrontEnd) -> None:
    (case,) = make_cases([CLIP_EMBEDDINGS])
    module, args, kwargs = case.build()
    module.logit_scale.requires_grad_(False)  # otherwise the logits would use a weight
    expected = case.loop_gradients(copy.deepcopy(module), args, kwargs, B)
    assert_rows_close(front_end(module, kwargs)[1], expected, case.tolerance)


def test_loss_of_a_language_model() -> None:
    """With labels, the model computes a mean over tokens, of which the samples may have different numbers."""
    config = transformers.GPT2Config(
        n_embd=16, n_layer=1, n_head=2, vocab_size=40, n_positions=8, bos_token_id=0, eos_token_id=1
    )
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(0, 40, (3, 7))
    labels = tokens.clone()
    assert persample.check(model, {"input_ids": tokens, "labels": labels}, lambda model, batch: model(**batch).loss).ok
    labels[0, 4:] = -100
    report = persample.check(model, {"input_ids": tokens, "labels": labels}, lambda model, batch: model(**batch).loss)
    assert report.ok and "divides by a number of the whole batch" in str(report)


@both_front_ends
def test_a_series_without_observations_is_refused(front_end: FrontEnd) -> None:
    """It is scaled by the mean of the batch."""
    (case,) = make_cases([TIME_SERIES])
    module, _, kwargs = case.build()
    kwargs["past_observed_mask"][0] = 0
    with pytest.raises(SamplesMixed, match=r"where takes entries .* in 1 of 3 places"):
        front_end(module, kwargs)
