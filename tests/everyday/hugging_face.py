"""Loops of the task scripts of Hugging Face: batches as collators make them, and the model's own loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from tests.everyday.loop import MONITOR, PRIVATE, RECORD, SCAN, WATCH, Batch, Origin
from tests.support.hf_models import PLAIN, make_common_settings, select_known

tasks = Origin("Hugging Face tasks")

WORDS, LENGTH = 50, 7
ROUNDS = 2e-5  # the models' losses of language models are computed in float32


def make(cls: str, **own: Any) -> Callable[[], nn.Module]:
    """A tiny model of this class, without dropout, in training mode."""

    def make_model() -> nn.Module:
        config_class = getattr(transformers, cls).config_class
        settings = select_known(config_class, make_common_settings(PLAIN), own)
        if "num_hidden_layers" not in own and "num_hidden_layers" in settings:
            settings["num_hidden_layers"] = 1
        config = config_class(**settings, **own)
        if not hasattr(config, "decoder_start_token_id"):
            config.decoder_start_token_id = 1
        return getattr(transformers, cls)(config).train()  # type: ignore[no-any-return]

    return make_model


def tokens(size: int, length: int = LENGTH) -> Tensor:
    return torch.randint(3, WORDS, (size, length))


def padded(size: int, length: int = LENGTH, pad: int = 0) -> dict[str, Tensor]:
    """Texts of several lengths, padded on the right."""
    lengths = torch.tensor([length - (2 * n) % 4 for n in range(size)])
    mask = torch.arange(length) < lengths[:, None]
    return {"input_ids": tokens(size, length).where(mask, pad), "attention_mask": mask.long()}


def causal(size: int) -> dict[str, Tensor]:
    batch = padded(size)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def count_next(batch: Batch) -> Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


def count_labels(batch: Batch) -> Tensor:
    return (batch["labels"] != -100).sum()


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


COUNTED = {"private": "targets|mean over|average"}
COUNTED_FRONT_ENDS = (RECORD, MONITOR)

tasks(
    "causal language model, GPT-2",
    make("GPT2LMHeadModel"),
    causal,
    tolerance=ROUNDS,
    count=count_next,
    front_ends=(RECORD, WATCH, MONITOR, PRIVATE, SCAN),
    refused=COUNTED,
)(own_loss)
tasks("causal language model, Llama", make("LlamaForCausalLM"), causal, tolerance=ROUNDS, count=count_next)(own_loss)
tasks(
    "causal language model, OPT",
    make("OPTForCausalLM", ffn_dim=20, word_embed_proj_dim=24),
    causal,
    tolerance=ROUNDS,
    count=count_next,
    front_ends=(RECORD,),
)(own_loss)


@tasks(
    "causal language model, loss in the script", make("GPTNeoXForCausalLM"), causal, tolerance=ROUNDS, count=count_next
)
def shifted_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    shift_logits, shift_labels = logits[..., :-1, :].contiguous(), batch["labels"][..., 1:].contiguous()
    return nn.CrossEntropyLoss()(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1))


def grouped(size: int) -> dict[str, Tensor]:
    ids = tokens(size)
    return {"input_ids": ids, "labels": ids.clone()}


tasks(
    "causal language model on blocks of one length",
    make("GPT2LMHeadModel"),
    grouped,
    tolerance=ROUNDS,
    front_ends=(RECORD, WATCH, MONITOR, SCAN, PRIVATE),
)(own_loss)


@tasks(
    "causal language model, num_items_in_batch over accumulated batches",
    make("LlamaForCausalLM"),
    lambda size: {**causal(size), "num_items_in_batch": torch.tensor(6 * size + 24)},
    share=lambda model, sample, batch: own_loss(model, sample),
    tolerance=ROUNDS,
)
def with_items(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


@tasks(
    "causal language model, num_items_in_batch as a number",
    make("GPT2LMHeadModel"),
    causal,
    tolerance=ROUNDS,
    count=count_next,
)
def with_items_as_number(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch, num_items_in_batch=int((batch["labels"][:, 1:] != -100).sum())).loss  # type: ignore[no-any-return]


def masked(size: int) -> dict[str, Tensor]:
    batch = padded(size)
    chosen = torch.rand(size, LENGTH) < 0.4
    chosen[:, 1] = True
    chosen &= batch["attention_mask"] == 1
    labels = batch["input_ids"].masked_fill(~chosen, -100)
    return {**batch, "input_ids": batch["input_ids"].masked_fill(chosen, 4), "labels": labels}


tasks(
    "masked language model, BERT",
    make("BertForMaskedLM"),
    masked,
    count=count_labels,
    front_ends=(RECORD, WATCH, MONITOR, PRIVATE, SCAN),
    refused=COUNTED,
)(own_loss)
tasks("masked language model, RoBERTa", make("RobertaForMaskedLM"), masked, count=count_labels, front_ends=(RECORD,))(
    own_loss
)
tasks(
    "masked language model, DistilBERT",
    make("DistilBertForMaskedLM", hidden_dim=20),
    masked,
    count=count_labels,
    front_ends=(MONITOR,),
)(own_loss)


def two_texts(size: int) -> dict[str, Tensor]:
    labels = tokens(size, 5)
    labels[::2, 3:] = -100
    return {**padded(size), "labels": labels}


T5 = {"d_model": 24, "d_kv": 8, "d_ff": 20, "num_layers": 1, "num_heads": 2, "relative_attention_num_buckets": 8}
tasks("summarisation, T5", make("T5ForConditionalGeneration", **T5), two_texts, count=count_labels, tolerance=ROUNDS)(
    own_loss
)
BART = {"d_model": 24, "encoder_layers": 1, "decoder_layers": 1}
tasks(
    "translation, BART", make("BartForConditionalGeneration", **BART), two_texts, count=count_labels, tolerance=ROUNDS
)(own_loss)


@tasks(
    "translation, BART with label smoothing in the script",
    make("BartForConditionalGeneration", **BART),
    two_texts,
    count=count_labels,
    front_ends=(RECORD,),
)
def smoothed(model: Any, batch: Batch) -> Tensor:
    outputs, labels = model(**batch), batch["labels"].unsqueeze(-1)
    log_probs = -F.log_softmax(outputs.logits, dim=-1)
    padding_mask = labels.eq(-100)
    nll_loss = log_probs.gather(dim=-1, index=labels.clamp(min=0)).masked_fill(padding_mask, 0.0)
    smoothed_loss = log_probs.sum(dim=-1, keepdim=True).masked_fill(padding_mask, 0.0)
    active = padding_mask.numel() - padding_mask.long().sum()
    return 0.9 * nll_loss.sum() / active + 0.1 * smoothed_loss.sum() / (active * log_probs.shape[-1])


def tagged(size: int) -> dict[str, Tensor]:
    batch = padded(size)
    labels = torch.randint(3, (size, LENGTH)).masked_fill(batch["attention_mask"] == 0, -100)
    labels[:, 0] = -100
    return {**batch, "labels": labels}


tasks("named entities, tags of tokens", make("BertForTokenClassification", num_labels=3), tagged, count=count_labels)(
    own_loss
)


def answered(size: int) -> dict[str, Tensor]:
    starts = torch.randint(1, 3, (size,))
    return {**padded(size), "start_positions": starts, "end_positions": starts + 1}


tasks("extractive answers", make("BertForQuestionAnswering"), answered, front_ends=(RECORD, WATCH, MONITOR))(own_loss)


def choices(size: int) -> dict[str, Tensor]:
    batch = {name: value.view(size, 2, -1) for name, value in padded(2 * size).items()}
    return {**batch, "labels": torch.randint(2, (size,))}


tasks("multiple choice", make("BertForMultipleChoice"), choices)(own_loss)


def classified(size: int) -> dict[str, Tensor]:
    return {**padded(size), "labels": torch.randint(3, (size,))}


tasks(
    "GLUE, classes of texts",
    make("BertForSequenceClassification", num_labels=3),
    classified,
    front_ends=(RECORD, WATCH, MONITOR, PRIVATE),
)(own_loss)
tasks(
    "classes of texts, GPT-2 at the last token",
    make("GPT2ForSequenceClassification", num_labels=3),
    classified,
    front_ends=(RECORD, MONITOR),
)(own_loss)
tasks(
    "regression on texts (STS-B)",
    make("RobertaForSequenceClassification", num_labels=1),
    lambda size: {**padded(size), "labels": torch.randn(size)},
)(own_loss)
tasks(
    "several labels per text",
    make("BertForSequenceClassification", num_labels=3, problem_type="multi_label_classification"),
    lambda size: {**padded(size), "labels": torch.randint(2, (size, 3)).double()},
)(own_loss)


def pictures(size: int, side: int = 16) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(size, 3, side, side), "labels": torch.randint(3, (size,))}


VIT = {"image_size": 8, "patch_size": 4, "num_labels": 3}
tasks(
    "image classification, ViT",
    make("ViTForImageClassification", **VIT),
    lambda size: pictures(size, 8),
    front_ends=(RECORD, WATCH, MONITOR, SCAN, PRIVATE),
)(own_loss)


@tasks(
    "image classification, mixup in the script",
    make("ViTForImageClassification", **VIT),
    lambda size: (pictures(size, 8), F.one_hot(torch.randint(3, (size,)), 3).double()),
    prepare=lambda batch: mix(*batch),
    front_ends=(RECORD, MONITOR),
)
def soft_targets(model: Any, batch: Batch) -> Tensor:
    images, targets = batch
    return F.cross_entropy(model(pixel_values=images).logits, targets)


def mix(images: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
    lam, order = 0.3, torch.randperm(len(targets))
    x = images["pixel_values"]
    return lam * x + (1 - lam) * x[order], lam * targets + (1 - lam) * targets[order]


SOUND = {
    **{"conv_dim": (4, 4), "conv_kernel": (3, 3), "conv_stride": (2, 2), "num_feat_extract_layers": 2},
    **{
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
        "mask_time_prob": 0.0,
        "apply_spec_augment": False,
    },
    **{"feat_extract_norm": "layer", "conv_bias": True, "do_stable_layer_norm": True},
}


def sounds(size: int) -> dict[str, Tensor]:
    lengths = torch.tensor([80 - 10 * (n % 3) for n in range(size)])
    mask = torch.arange(80) < lengths[:, None]
    return {"input_values": torch.randn(size, 80) * mask, "attention_mask": mask.long()}


tasks(
    "audio classification, Wav2Vec2",
    make("Wav2Vec2ForSequenceClassification", **SOUND, num_labels=3, classifier_proj_size=8),
    lambda size: {**sounds(size), "labels": torch.randint(3, (size,))},
)(own_loss)


def spoken(size: int) -> dict[str, Tensor]:
    labels = torch.randint(1, 12, (size, 4))
    labels[::2, 3:] = -100
    return {**sounds(size), "labels": labels}


CTC = {"vocab_size": 12, "pad_token_id": 0}
tasks(
    "speech recognition by CTC, Wav2Vec2, sum", make("Wav2Vec2ForCTC", **SOUND, **CTC, ctc_loss_reduction="sum"), spoken
)(own_loss)
tasks(
    "speech recognition by CTC, Wav2Vec2, mean",
    make("Wav2Vec2ForCTC", **SOUND, **CTC, ctc_loss_reduction="mean"),
    spoken,
    tolerance=ROUNDS,
)(own_loss)

SEGFORMER = {
    **{"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 8], "patch_sizes": [3, 3]},
    **{
        "strides": [2, 2],
        "num_attention_heads": [2, 2],
        "mlp_ratios": [2, 2],
        "decoder_hidden_size": 8,
        "num_labels": 3,
    },
    **{"drop_path_rate": 0.0, "classifier_dropout_prob": 0.0},
}


def segmented(size: int, ignored: bool = True) -> dict[str, Tensor]:
    labels = torch.randint(3, (size, 16, 16))
    if ignored:
        labels[0, :3] = 255
    return {"pixel_values": torch.randn(size, 3, 16, 16), "labels": labels}


def make_segformer() -> nn.Module:
    model = make("SegformerForSemanticSegmentation", **SEGFORMER)()
    norm: Any = model.get_submodule("decode_head.batch_norm")
    norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2.0)
    norm.eval()
    return model


tasks(
    "semantic segmentation, Segformer with a frozen BatchNorm",
    make_segformer,
    segmented,
    count=lambda batch: (batch["labels"] != 255).sum(),
    front_ends=(RECORD, MONITOR, SCAN),
)(own_loss)
tasks(
    "semantic segmentation, Segformer, BatchNorm in training mode",
    make("SegformerForSemanticSegmentation", **SEGFORMER),
    segmented,
    front_ends=(RECORD,),
    refused={"all": "BatchNorm"},
)(own_loss)


def boxes(size: int) -> dict[str, Any]:
    counts = [1 + n % 3 for n in range(size)]
    labels = [{"class_labels": torch.randint(3, (k,)), "boxes": 0.2 + 0.3 * torch.rand(k, 4)} for k in counts]
    return {"pixel_values": torch.randn(size, 3, 16, 16), "labels": labels}


def take_image(batch: Batch, n: int) -> Batch:
    return {"pixel_values": batch["pixel_values"][n : n + 1], "labels": batch["labels"][n : n + 1]}


YOLOS = {"image_size": [16, 16], "patch_size": 8, "num_detection_tokens": 5, "num_labels": 3}


@tasks(
    "object detection, YOLOS, boxes matched to queries",
    make("YolosForObjectDetection", **YOLOS),
    boxes,
    take=take_image,
    front_ends=(RECORD, MONITOR),
)
def matched_boxes(model: Any, batch: Batch) -> Tensor:
    from scipy.optimize import linear_sum_assignment

    outputs, targets = model(pixel_values=batch["pixel_values"]), batch["labels"]
    cost = torch.cdist(outputs.pred_boxes.detach(), torch.cat([t["boxes"] for t in targets]), p=2)
    sizes = [len(t["boxes"]) for t in targets]
    indices = [linear_sum_assignment(c[i].T) for i, c in enumerate(cost.split(sizes, -1))]
    batch_idx = torch.cat([torch.full((len(query),), i) for i, (_, query) in enumerate(indices)])
    query_idx = torch.cat([torch.as_tensor(query) for _, query in indices])
    order = [torch.as_tensor(box) for box, _ in indices]
    wanted_boxes = torch.cat([t["boxes"][o] for t, o in zip(targets, order, strict=True)])
    wanted = torch.full(outputs.logits.shape[:2], 3)
    wanted[batch_idx, query_idx] = torch.cat([t["class_labels"][o] for t, o in zip(targets, order, strict=True)])
    loss_ce = F.cross_entropy(outputs.logits.transpose(1, 2), wanted)
    loss_bbox = F.l1_loss(outputs.pred_boxes[batch_idx, query_idx], wanted_boxes, reduction="sum") / len(targets)
    return loss_ce + 5 * loss_bbox


def share_of_image(model: Any, sample: Batch, batch: Batch) -> Tensor:
    """An unmatched query has the weight 0.1; losses of boxes are divided by their number."""
    terms, counts = model(**sample).loss_dict, [len(target["boxes"]) for target in batch["labels"]]
    own = len(sample["labels"][0]["boxes"])
    weight, weights = own + 0.1 * (5 - own), sum(k + 0.1 * (5 - k) for k in counts)
    boxes = 5 * terms["loss_bbox"] + 2 * terms["loss_giou"]
    return terms["loss_ce"] * weight / weights + boxes * own / sum(counts)


tasks(
    "object detection, YOLOS with the model's own loss",
    make("YolosForObjectDetection", **YOLOS),
    boxes,
    take=take_image,
    front_ends=(RECORD, MONITOR),
    share=share_of_image,
)(own_loss)


def image_texts(size: int) -> dict[str, Any]:
    batch = padded(size)
    batch["input_ids"][:, -1] = WORDS
    return {
        **batch,
        "attention_mask": torch.ones(size, LENGTH).long(),
        "pixel_values": torch.randn(size, 3, 8, 8),
        "return_loss": True,
    }


def make_clip() -> nn.Module:
    text = {
        "vocab_size": WORDS + 1,
        "hidden_size": 12,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
        "eos_token_id": WORDS,
    }
    vision = {
        "image_size": 8,
        "patch_size": 4,
        "hidden_size": 12,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    return transformers.CLIPModel(config).train()


tasks(
    "CLIP, contrastive loss over the batch",
    make_clip,
    image_texts,
    front_ends=(RECORD, MONITOR, PRIVATE),
    refused={"all": "mixe|combine"},
)(own_loss)
tasks(
    "CLIP, contributions asked for",
    make_clip,
    image_texts,
    front_ends=(RECORD, MONITOR),
    contributions=True,
    options={"coupled": "contributions"},
)(own_loss)
