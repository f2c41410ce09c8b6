"""Tiny models of Hugging Face transformers with random weights. A model is one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tests.support.case import Case

B = 3
HIDDEN = 24
VOCABULARY = 50
IMAGE_TOKEN = 0

Settings = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """Which dimension is as large as the batch, on which side sequences are padded, and the form of the mask."""

    name: str
    length: int = 5
    heads: int = 2
    padding: str | None = None
    mask: torch.dtype = torch.long

    @property
    def image(self) -> tuple[int, int]:
        """The image size for patches of 4 pixels. With a class token, there are B tokens if the length is B."""
        return (4, 8) if self.length == B else (16, 16)


PLAIN = Size("T != B")
SQUARE = Size("T == B", length=B)
HEADS = Size("heads == B", heads=B)
RIGHT = Size("padded on the right", padding="right")
LEFT = Size("padded on the left", padding="left")
FLOATS = Size("padded, mask of floats", padding="right", mask=torch.float)

ONCE = (PLAIN,)
WITHOUT_HEADS = (PLAIN, SQUARE)
IMAGES = (PLAIN, HEADS)
ALL = (PLAIN, SQUARE, HEADS)
PADDED = (*ALL, RIGHT)
PADDED_CAUSAL = (*PADDED, LEFT)

ROUNDS = 1e-4  # for float32, and for layers that always compute in float32


def make_common_settings(size: Size) -> Settings:
    """Settings by the names that most configs have."""
    sizes = {
        **{"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 20, "max_position_embeddings": 16},
        **{"num_hidden_layers": 2, "num_attention_heads": size.heads, "num_key_value_heads": 1},
        **{"encoder_layers": 2, "encoder_attention_heads": size.heads, "encoder_ffn_dim": 20},
        **{"decoder_layers": 2, "decoder_attention_heads": size.heads, "decoder_ffn_dim": 20},
        **{"head_dim": HIDDEN // size.heads, "embedding_size": 12},
        **{"image_size": size.image, "patch_size": 4, "num_channels": 3},
    }
    dropouts = (
        *("dropout", "attention_dropout", "activation_dropout", "hidden_dropout", "dropout_rate", "drop_path_rate"),
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
        *("resid_dropout", "embed_dropout", "classifier_dropout", "feat_proj_dropout", "final_dropout"),
        *("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "drop_connect_rate"),
    )
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return {**sizes, **dict.fromkeys(dropouts, 0.0), **tokens}


def select_known(config_class: Any, settings: Settings, own: Settings) -> Settings:
    """The settings that the config has a field for, except those that the model sets itself."""
    names = {name: config_class.attribute_map.get(name, name) for name in settings}
    available = {f.name for f in fields(config_class)} - own.keys()
    return {name: settings[name] for name, true_name in names.items() if true_name in available}


def tokens(length: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (B, length))


def text(size: Size) -> dict[str, Tensor]:
    inputs = {"input_ids": tokens(size.length)}
    if size.padding:
        kept = torch.arange(size.length) < torch.tensor([[size.length], [size.length - 2], [size.length - 1]])
        inputs["attention_mask"] = (kept if size.padding == "right" else kept.flip(1)).to(size.mask)
    return inputs


def ended_text(size: Size) -> dict[str, Tensor]:
    """Texts with the largest token at the end, where CLIP pools."""
    inputs = text(size)
    inputs["input_ids"][torch.arange(B), [1, size.length - 1, 1]] = VOCABULARY
    return inputs


def two_texts(size: Size) -> dict[str, Tensor]:
    return {**text(size), "decoder_input_ids": tokens(B if size.length == B else 4)}


def image(size: Size) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(B, 3, *size.image)}


def large_image(size: Size) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(B, 3, 32, 32)}


def image_and_noise(size: Size) -> dict[str, Tensor]:
    return {**image(size), "noise": torch.rand(B, size.image[0] * size.image[1] // 16)}


def image_and_text(size: Size) -> dict[str, Tensor]:
    return {**ended_text(size), **image(PLAIN)}


def images_for_tokens(size: Size) -> dict[str, Tensor]:
    """One image token for each patch, and a text."""
    image_tokens = torch.full((B, 16), IMAGE_TOKEN)
    return {"input_ids": torch.cat([image_tokens, tokens(size.length)], 1), **image(PLAIN)}


def sound(size: Size) -> dict[str, Tensor]:
    return {"input_values": torch.randn(B, 12 * size.length)}


def spectrogram_and_text(size: Size) -> dict[str, Tensor]:
    return {"input_features": torch.randn(B, 8, 2 * size.length), "decoder_input_ids": tokens(4)}


def video(size: Size) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(B, B if size.length == B else 2, 3, 8, 8)}


def attended_text(size: Size) -> dict[str, Tensor]:
    """Texts with a global token; the second one is padded."""
    inputs = {"input_ids": tokens(8), "attention_mask": torch.ones(B, 8, dtype=torch.long)}
    inputs["attention_mask"][1, 5:] = 0
    is_global = torch.zeros(B, 8, dtype=torch.long)
    is_global[torch.arange(B), torch.tensor([0, 2, 1])] = 1
    return {**inputs, "global_attention_mask": is_global}


def series(size: Size) -> dict[str, Tensor]:
    """Time series in which something was observed."""
    observed = torch.ones(B, 9)
    observed[0, 2:5] = observed[1, 7] = 0
    return {
        **{"past_values": torch.randn(B, 9), "past_time_features": torch.randn(B, 9, 2)},
        **{"past_observed_mask": observed, "future_values": torch.randn(B, 4)},
        "future_time_features": torch.randn(B, 4, 2),
    }


@dataclass(frozen=True)
class Model:
    """A class of transformers by name, its special settings, and its inputs.

    `outputs` names the outputs that have samples, if there are others.
    """

    name: str
    cls: str
    settings: Settings | Callable[[Size], Settings] = field(default_factory=dict)
    inputs: Callable[[Size], dict[str, Tensor]] = text
    sizes: Sequence[Size] = ALL
    double: bool = True
    tolerance: float = 1e-9
    outputs: Sequence[str] = ()

    def module(self, size: Size) -> nn.Module:
        cls = getattr(transformers, self.cls)
        own = self.settings(size) if callable(self.settings) else self.settings
        module = cls(cls.config_class(**select_known(cls.config_class, make_common_settings(size), own), **own))
        if self.outputs:
            module.register_forward_hook(lambda _module, _args, given: {name: given[name] for name in self.outputs})
        return module  # type: ignore[no-any-return]


@dataclass(frozen=True)
class TinyModel(Case):
    """A model at one size."""

    tolerance: float = 1e-9

    def build(self) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """Build the model in train mode without dropout. No parameter keeps an initial 0 or 1."""
        torch.manual_seed(0)
        module, kwargs = self.module().train(), self.kwargs()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter += 0.15 * torch.randn_like(parameter)
        calibrate(module, kwargs)
        if self.double:
            module = module.double()
            kwargs = {key: value.double() if value.is_floating_point() else value for key, value in kwargs.items()}
        return module, (), kwargs


def calibrate(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Give BatchNorm the statistics of a mirrored batch, and set a model with BatchNorm to eval mode."""
    norms = [norm for norm in module.modules() if isinstance(norm, _BatchNorm)]
    for norm in norms:
        norm.momentum = 1.0
    if norms:
        with torch.no_grad():
            module(**{key: value.flip(-1) for key, value in kwargs.items()})
        module.eval()


def make_cases(models: Iterable[Model]) -> Iterator[TinyModel]:
    for model in models:
        for size in model.sizes:
            yield TinyModel(
                name=f"{model.name}, {size.name}" if len(model.sizes) > 1 else model.name,
                module=lambda model=model, size=size: model.module(size),
                inputs=lambda: [],
                kwargs=lambda model=model, size=size: model.inputs(size),
                double=model.double,
                tolerance=model.tolerance,
            )


EAGER = {"attn_implementation": "eager"}

RELATIVE = {
    **{"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4, "norm_rel_ebd": "layer_norm"},
    **{"position_biased_input": False, "share_att_key": True, "type_vocab_size": 2},
}

ENCODERS = [
    Model("BERT", "BertModel", sizes=(*PADDED, FLOATS)),
    Model("BERT, all outputs", "BertModel", {**EAGER, "output_hidden_states": True, "output_attentions": True}),
    Model("RoBERTa", "RobertaModel", sizes=PADDED),
    Model("ELECTRA", "ElectraModel"),
    Model("ALBERT", "AlbertModel"),
    Model("DeBERTa-v2", "DebertaV2Model", RELATIVE, sizes=PADDED),
    Model("MPNet", "MPNetModel"),
    Model("DistilBERT", "DistilBertModel", {"hidden_dim": 20}),
    Model("ModernBERT", "ModernBertModel", {"local_attention": 4, "cls_token_id": 1, "sep_token_id": 2}, sizes=PADDED),
    Model("FNet", "FNetModel", sizes=WITHOUT_HEADS),
]

DECODERS = [
    Model("GPT-2", "GPT2Model", sizes=PADDED_CAUSAL),
    Model("GPT-2, tied head", "GPT2LMHeadModel"),
    Model("GPT-Neo", "GPTNeoModel", {"attention_types": [[["global", "local"], 1]], "window_size": 2}),
    Model("GPT-NeoX", "GPTNeoXModel", {"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5}}),
    Model("OPT", "OPTModel", {"ffn_dim": 20, "word_embed_proj_dim": 12}),
    Model("BLOOM", "BloomModel"),
    Model("Falcon", "FalconModel"),
    Model("Falcon, ALiBi", "FalconModel", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    Model("Llama", "LlamaModel", sizes=PADDED_CAUSAL),
    Model("Llama, eager attention", "LlamaModel", EAGER, sizes=(SQUARE, HEADS, RIGHT)),
    Model("Llama, tied head", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    Model("Mistral", "MistralModel", {"sliding_window": 2}),
    Model("Qwen2", "Qwen2Model"),
    Model("Qwen3", "Qwen3Model"),
    Model("Gemma", "GemmaModel", tolerance=ROUNDS),
    Model("Gemma 2", "Gemma2ForCausalLM", {"sliding_window": 2}, tolerance=ROUNDS),
    Model("OLMo 2", "Olmo2Model"),
    Model("Cohere", "CohereModel", {"use_qk_norm": True}, tolerance=ROUNDS),
    Model("StableLM", "StableLmModel", {"use_qkv_bias": True, "qk_layernorm": True, "partial_rotary_factor": 0.5}),
    Model("Starcoder 2", "Starcoder2Model"),
    Model("Phi", "PhiModel", {"partial_rotary_factor": 0.5, "qk_layernorm": True}),
    Model("Phi-3", "Phi3Model"),
]

STEPS = {"time_step_min": 0.5, "time_step_max": 1.0, "state_size": 4}


def mamba_2(size: Size) -> Settings:
    return {**STEPS, "num_heads": size.heads, "head_dim": 2 * HIDDEN // size.heads, "n_groups": 1, "chunk_size": 4}


RECURRENT = [
    Model("Mamba", "MambaModel", {**STEPS, "time_step_rank": 3}, sizes=WITHOUT_HEADS, tolerance=ROUNDS),
    Model("Mamba-2", "Mamba2Model", mamba_2, tolerance=ROUNDS),
    Model("RWKV", "RwkvModel", sizes=WITHOUT_HEADS),
]


def experts(name: str, cls: str) -> list[Model]:
    counts = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    return [
        Model(f"{name}, eager", cls, {**counts, "experts_implementation": "eager"}),
        Model(f"{name}, batched", cls, {**counts, "experts_implementation": "batched_mm"}),
        Model(
            f"{name}, grouped", cls, {**counts, "experts_implementation": "grouped_mm"}, double=False, tolerance=ROUNDS
        ),
    ]


MIXTURES = [
    *experts("Mixtral", "MixtralModel"),
    *experts("Qwen3-MoE", "Qwen3MoeModel"),
    *experts("GPT-OSS", "GptOssModel"),
]

T5 = {"d_model": HIDDEN, "d_kv": 8, "d_ff": 20}


def whisper(size: Size) -> Settings:
    return {"d_model": HIDDEN, "num_mel_bins": 8, "max_source_positions": size.length, "max_target_positions": 8}


PAIRS = [
    Model("T5", "T5Model", {**T5, "relative_attention_num_buckets": 8}, two_texts, PADDED),
    Model("T5, eager attention", "T5Model", {**T5, **EAGER}, two_texts, (SQUARE, HEADS)),
    Model("T5, gated and tied", "T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu"}, two_texts),
    Model("BART", "BartModel", {"d_model": HIDDEN}, two_texts, PADDED),
    Model("Marian", "MarianMTModel", {"d_model": HIDDEN}, two_texts),
    Model("Whisper", "WhisperModel", whisper, spectrogram_and_text),
]

MAE = {
    **{"decoder_hidden_size": 12, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2},
    **{"decoder_intermediate_size": 16, "mask_ratio": 0.5},
}


def swin(size: Size) -> Settings:
    return {"embed_dim": 12, "depths": [2, 1], "num_heads": [size.heads, size.heads], "window_size": 2}


SQUARE_IMAGE = {"image_size": PLAIN.image[0]}
PROJECTION = {"projection_dim": 8}


def clip(size: Size) -> Settings:
    text_config = {**make_common_settings(size), "vocab_size": VOCABULARY + 1}
    return {"text_config": text_config, "vision_config": {**make_common_settings(size), **SQUARE_IMAGE}, **PROJECTION}


def llava(size: Size) -> Settings:
    text_config = {"model_type": "llama", **make_common_settings(size)}
    vision_config = {"model_type": "clip_vision_model", **make_common_settings(size), **SQUARE_IMAGE}
    return {"text_config": text_config, "vision_config": vision_config, "image_token_index": IMAGE_TOKEN}


IMAGE_TRANSFORMERS = [
    Model("ViT", "ViTModel", inputs=image),
    Model("ViT, eager attention", "ViTModel", EAGER, image),
    Model("DeiT", "DeiTModel", {}, image, IMAGES),
    Model("BEiT", "BeitModel", {"use_relative_position_bias": True, "use_mean_pooling": False}, image, IMAGES),
    Model("DINOv2", "Dinov2Model", {"mlp_ratio": 2}, image, IMAGES),
    Model("ViT-MAE", "ViTMAEForPreTraining", MAE, image_and_noise, IMAGES, outputs=["logits"]),
    Model("Swin", "SwinModel", swin, image, IMAGES),
    Model("CLIP, images", "CLIPVisionModelWithProjection", {**SQUARE_IMAGE, **PROJECTION}, image, IMAGES),
    Model("CLIP, texts", "CLIPTextModelWithProjection", {"vocab_size": VOCABULARY + 1, **PROJECTION}, ended_text),
    Model("AIMv2, pooled by a learned query", "Aimv2VisionModel", SQUARE_IMAGE, image, IMAGES, tolerance=ROUNDS),
    Model("LLaVA", "LlavaForConditionalGeneration", llava, images_for_tokens, IMAGES, outputs=["logits"]),
]

STAGES = {"num_stages": 2, "num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [8, 12]}
SEGFORMER = {
    **{"sr_ratios": [2, 1], "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2]},
    **{"mlp_ratios": [2, 2]},
}
POOLFORMER = {"patch_sizes": [7, 3], "strides": [4, 2], "padding": [2, 1], "mlp_ratio": 2.0}
MOBILENET = {"depth_multiplier": 0.1, "depth_divisible_by": 4, "min_depth": 4, "expand_ratio": 2}
EFFICIENTNET = {
    **{"width_coefficient": 1.0, "depth_coefficient": 1.0, "depth_divisor": 4, "kernel_sizes": [3, 5]},
    **{"in_channels": [32, 8], "out_channels": [8, 12], "strides": [1, 2], "num_block_repeats": [1, 2]},
    **{"expand_ratios": [1, 2], "hidden_dim": 1280},
}

CONVOLUTIONS = [
    Model("ConvNeXt", "ConvNextModel", STAGES, image, ONCE),
    Model("ConvNeXt V2", "ConvNextV2Model", STAGES, image, ONCE),
    Model("ResNet", "ResNetModel", {**STAGES, "embedding_size": 8}, image, ONCE),
    Model("MobileNetV2", "MobileNetV2Model", MOBILENET, large_image, ONCE),
    Model("EfficientNet", "EfficientNetModel", EFFICIENTNET, large_image, ONCE),
    Model("SegFormer", "SegformerModel", {**STAGES, **SEGFORMER}, image, ONCE),
    Model("PoolFormer", "PoolFormerModel", {**STAGES, **POOLFORMER}, image, ONCE),
]

WAVES = {
    **{"conv_dim": [8, 8], "conv_stride": [4, 3], "conv_kernel": [4, 3], "apply_spec_augment": False},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
}
STABLE = {"conv_bias": True, "feat_extract_norm": "layer", "do_stable_layer_norm": True}

SOUND = [
    Model("Wav2Vec2", "Wav2Vec2Model", WAVES, sound),
    Model("Wav2Vec2, layer norms first", "Wav2Vec2Model", {**WAVES, **STABLE}, sound, ONCE),
]


def timesformer(size: Size) -> Settings:
    return {"image_size": 8, "num_frames": B if size.length == B else 2, "drop_path_rate": 0}


def joint_timesformer(size: Size) -> Settings:
    return {**timesformer(size), "attention_type": "joint_space_time"}


LONG = {"attention_window": 4, "max_position_embeddings": 40, "pad_token_id": 1}
LONG_PAIR = {"attention_window": [4, 4], "max_encoder_position_embeddings": 40, "d_model": HIDDEN}
SERIES = {
    **{"prediction_length": 4, "context_length": 6, "lags_sequence": [1, 3], "num_time_features": 2, "scaling": "mean"},
    "d_model": HIDDEN,
}
TIME_SERIES = Model("Time series, scaled by the mean", "TimeSeriesTransformerModel", SERIES, series, ONCE)

# Models that use rows, sizes or statistics of the batch in ways that do not mix samples.
BATCH_AWARE = [
    Model("TimeSformer", "TimesformerModel", timesformer, video),
    Model("TimeSformer, joint attention", "TimesformerModel", joint_timesformer, video, ONCE),
    Model("Longformer, global tokens", "LongformerModel", LONG, attended_text, (PLAIN, HEADS)),
    Model(
        "LED, global tokens",
        "LEDModel",
        LONG_PAIR,
        lambda size: {**attended_text(size), "decoder_input_ids": tokens(4)},
        ONCE,
    ),
    TIME_SERIES,
]

MODELS = [
    *ENCODERS,
    *DECODERS,
    *RECURRENT,
    *MIXTURES,
    *PAIRS,
    *IMAGE_TRANSFORMERS,
    *CONVOLUTIONS,
    *SOUND,
    *BATCH_AWARE,
]

CLIP = Model("CLIP", "CLIPModel", clip, image_and_text, ONCE)
CLIP_EMBEDDINGS = Model(
    "CLIP, embeddings", "CLIPModel", clip, image_and_text, ONCE, outputs=["image_embeds", "text_embeds"]
)
