"""Models of transformers are planned: the peak of a step is known before the first one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from elastic_mbs import ElasticMBS, MemoryBudget
from tests.helpers.planned import peak_of
from tests.helpers.steps import quiet, there

pytestmark = pytest.mark.no_oom_injection

WORDS, LENGTH, SAMPLES = 64, 32, 8
Batch = dict[str, Tensor]

SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2 * LENGTH,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4}
LAYERS = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": WORDS}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 0}
WIDTHS = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 2 * LENGTH}
PICTURES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
SPEECH = {
    **SIZES,
    "conv_dim": (8, 8),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,  # a layer that a drawn number leaves out has no plan
}


def ids(**more: Tensor) -> Batch:
    words = torch.randint(1, WORDS, (SAMPLES, LENGTH))
    return {"input_ids": words, "labels": words.clone(), **more}


def pictures() -> Batch:
    return {
        "pixel_values": torch.randn(SAMPLES, 3, 32, 32),
        "labels": torch.randint(0, 2, (SAMPLES,)),
    }


def sound() -> Batch:
    labels = torch.randint(1, WORDS, (SAMPLES, 12))
    labels[::2, 8:] = -100
    return {"input_values": torch.randn(SAMPLES, 800), "labels": labels}


# class of the model, its configuration, its batch
MODELS: dict[str, tuple[str, dict[str, Any], Callable[[], Batch]]] = {
    "Llama": ("LlamaForCausalLM", GROUPED, ids),
    "Mistral": ("MistralForCausalLM", GROUPED, ids),
    "Qwen2": ("Qwen2ForCausalLM", GROUPED, ids),
    "Qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}, ids),
    "Gemma2": ("Gemma2ForCausalLM", {**GROUPED, "head_dim": 8}, ids),
    "Gemma3": ("Gemma3ForCausalLM", {**GROUPED, "head_dim": 8}, ids),
    "GPT2": (
        "GPT2LMHeadModel",
        {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4},
        ids,
    ),
    "GPTNeoX": ("GPTNeoXForCausalLM", SIZES, ids),
    "Cohere": ("CohereForCausalLM", GROUPED, ids),
    "Olmo2": ("Olmo2ForCausalLM", GROUPED, ids),
    "Phi3": ("Phi3ForCausalLM", GROUPED, ids),
    "StableLm": ("StableLmForCausalLM", GROUPED, ids),
    "Granite": ("GraniteForCausalLM", GROUPED, ids),
    "OPT": ("OPTForCausalLM", {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32}, ids),
    "Mixtral": ("MixtralForCausalLM", EXPERTS, ids),
    "Qwen3Moe": (
        "Qwen3MoeForCausalLM",
        {**EXPERTS, "head_dim": 8, "moe_intermediate_size": 32},
        ids,
    ),
    "Bert": ("BertForMaskedLM", SIZES, ids),
    "Roberta": ("RobertaForMaskedLM", SIZES, ids),
    "DebertaV2": (
        "DebertaV2ForMaskedLM",
        {**SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        ids,
    ),
    "T5": (
        "T5ForConditionalGeneration",
        {"vocab_size": WORDS, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2}
        | {"num_heads": 4, "decoder_start_token_id": 0},
        ids,
    ),
    "Bart": ("BartForConditionalGeneration", {**LAYERS, **HEADS, **WIDTHS}, ids),
    "ViT": ("ViTForImageClassification", PICTURES, pictures),
    "Dinov2": ("Dinov2ForImageClassification", PICTURES, pictures),
    "Swin": (
        "SwinForImageClassification",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2]}
        | {"window_size": 4},
        pictures,
    ),
    "Wav2Vec2": ("Wav2Vec2ForCTC", SPEECH, sound),
}


def made(kind: str, options: dict[str, Any]) -> Any:
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**options)
    torch.manual_seed(0)
    return model_class(config).train()


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_knows_the_peak_of_a_step(name: str) -> None:
    kind, options, make = MODELS[name]
    model, batch = made(kind, options), make()

    def loss_fn(b: Batch) -> Tensor:
        loss: Tensor = model(**b).loss
        return loss

    with MemoryBudget(2**40, track=[model, *batch.values()]) as budget:
        report = ElasticMBS(model, **quiet()).plan(loss_fn, batch)
        assert report.reason is None
        loss_fn(batch).backward()
        real = peak_of(budget, lambda: loss_fn(batch).backward())
        elements = sum(part.numel() for part in batch.values())
        planned = there(there(report.model).predict(elements, first=False))
        assert abs(planned / real - 1) <= 0.03
