"""Tiny vision-language models of transformers, and batches of texts with 0 to 2 pictures each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

IMAGE, START, END = 30, 31, 32
TEXT = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
}
PICTURES = (1, 2, 0, 1, 1, 2)  # of each sample
Sample = dict[str, Any]


@dataclass(frozen=True)
class Vision:
    """A model, and its samples.

    Attributes:
        build: returns the model.
        pictures: returns the pictures of a sample, as keyed tensors to be joined, and the tokens of
            each.
        counts: of pictures in each sample.
        padded: pictures are padded to a row for each sample, and have a mask.
    """

    build: Callable[[], Any]
    pictures: Callable[[int, torch.Generator], tuple[dict[str, Tensor], list[int]]]
    counts: tuple[int, ...] = PICTURES
    padded: bool = False
    types: str | None = "mm_token_type_ids"
    numbers: str | None = None

    def samples(self) -> list[Sample]:
        """Return samples of different lengths."""
        draw = torch.Generator().manual_seed(1)
        made = []
        for number, count in enumerate(self.counts):
            pixels, tokens = self.pictures(count, draw)
            ids = [3 + number]
            for each in tokens:
                ids += [START, *[IMAGE] * each, END]
            ids += torch.randint(3, 29, (2 + 3 * number % 5,), generator=draw).tolist()
            made.append({"ids": torch.tensor(ids), "pictures": pixels})
        return made

    def collate(self, samples: list[Sample]) -> dict[str, Any]:
        """Return a batch, as the model's processor makes it."""
        width = max(len(each["ids"]) for each in samples)
        ids = torch.zeros(len(samples), width, dtype=torch.long)
        for row, each in zip(ids, samples, strict=True):
            row[: len(each["ids"])] = each["ids"]
        mask = (ids != 0).long()
        labels = torch.where((ids > 2) & (ids < 30), ids, -100)
        batch: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        if self.types is not None:
            batch[self.types] = (ids == IMAGE).int()
        if self.numbers is not None:
            batch[self.numbers] = torch.tensor(
                [len(each["pictures"]["pixel_values"]) for each in samples]
            )
        for name in samples[0]["pictures"]:
            parts = [each["pictures"][name] for each in samples]
            if parts[0].is_floating_point():
                parts = [part.double() for part in parts]
            if self.padded:
                batch[name] = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
            elif sum(map(len, parts)):
                batch[name] = torch.cat(parts)
        return batch


def grids(patch: int) -> Callable[[int, torch.Generator], tuple[dict[str, Tensor], list[int]]]:
    """Return a maker of patches, four of which are one token, in pictures of different sizes."""

    def pictures(count: int, draw: torch.Generator) -> tuple[dict[str, Tensor], list[int]]:
        sizes = [(2, 2 + 2 * (place % 2)) for place in range(count)]
        thw = torch.tensor([(1, *size) for size in sizes]).reshape(-1, 3).long()
        rows = int(thw.prod(1).sum())
        tokens = [height * width // 4 for height, width in sizes]
        pixels = torch.randn(rows, patch, generator=draw)
        return {"pixel_values": pixels, "image_grid_thw": thw}, tokens

    return pictures


def squares(
    tokens: int, *, size: int = 8, sizes: bool = False, tiles: int = 0, mask: bool = False
) -> Callable[[int, torch.Generator], tuple[dict[str, Tensor], list[int]]]:
    """Return a maker of pictures of one size, each of `tokens` tokens."""

    def pictures(count: int, draw: torch.Generator) -> tuple[dict[str, Tensor], list[int]]:
        shape = (count, tiles, 3, size, size) if tiles else (count, 3, size, size)
        found = {"pixel_values": torch.randn(shape, generator=draw)}
        if sizes:
            found["image_sizes"] = torch.full((count, 2), size)
        if mask:
            found["pixel_attention_mask"] = torch.ones(count, size, size, dtype=torch.bool)
        return found, [tokens] * count

    return pictures


def tiled(count: int, draw: torch.Generator) -> tuple[dict[str, Tensor], list[int]]:
    """Return pictures of LLaVA-OneVision, which cuts into tiles where there is only one."""
    found, _ = squares(5, sizes=True, tiles=2)(count, draw)
    return found, [10 if count == 1 else 5] * count


def _qwen2_vl() -> Any:
    config = transformers.Qwen2VLConfig(
        text_config={
            **TEXT,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 1, 2],
            },
        },
        vision_config={
            "depth": 1,
            "embed_dim": 16,
            "hidden_size": 16,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 2,
            "temporal_patch_size": 2,
        },
        image_token_id=IMAGE,
        video_token_id=33,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def _qwen2_5_vl() -> Any:
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            **TEXT,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 1, 2],
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "out_hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "patch_size": 2,
            "temporal_patch_size": 2,
            "window_size": 8,
            "fullatt_block_indexes": [0],
        },
        image_token_id=IMAGE,
        video_token_id=33,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def _qwen3_vl() -> Any:
    config = transformers.Qwen3VLConfig(
        text_config={
            **TEXT,
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 1, 2],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "out_hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "patch_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=IMAGE,
        video_token_id=33,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def _llava_onevision() -> Any:
    config = transformers.LlavaOnevisionConfig(
        text_config=transformers.Qwen2Config(**TEXT),
        vision_config=transformers.SiglipVisionConfig(**SIGLIP, image_size=8),
        image_token_id=IMAGE,
        video_token_id=33,
        image_grid_pinpoints=[[8, 8]],
        vision_feature_layer=-1,
    )
    return transformers.LlavaOnevisionForConditionalGeneration(config)


def _gemma3() -> Any:
    config = transformers.Gemma3Config(
        text_config={**TEXT, "head_dim": 8, "sliding_window": 64},
        vision_config={**SIGLIP, "image_size": 8, "vision_use_head": False},
        mm_tokens_per_image=4,
        image_token_id=IMAGE,
        boi_token_id=START,
        eoi_token_id=END,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def _paligemma() -> Any:
    config = transformers.PaliGemmaConfig(
        text_config={"model_type": "gemma", **TEXT, "head_dim": 8},
        vision_config={
            "model_type": "siglip_vision_model",
            **SIGLIP,
            "image_size": 8,
            "vision_use_head": False,
        },
        image_token_id=IMAGE,
        projection_dim=16,
        hidden_size=16,
    )
    return transformers.PaliGemmaForConditionalGeneration(config)


def _idefics3() -> Any:
    config = transformers.Idefics3Config(
        text_config={"model_type": "llama", **TEXT},
        vision_config={**SIGLIP, "image_size": 8},
        image_token_id=IMAGE,
        scale_factor=2,
    )
    return transformers.Idefics3ForConditionalGeneration(config)


def _idefics2() -> Any:
    config = transformers.Idefics2Config(
        text_config={"model_type": "mistral", **TEXT},
        vision_config={**SIGLIP, "image_size": 8},
        perceiver_config={
            "resampler_n_latents": 2,
            "resampler_depth": 1,
            "resampler_n_heads": 2,
            "resampler_head_dim": 8,
            "num_key_value_heads": 1,
        },
        image_token_id=IMAGE,
    )
    return transformers.Idefics2ForConditionalGeneration(config)


def _llava() -> Any:
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT),
        vision_config=transformers.SiglipVisionConfig(
            **SIGLIP, image_size=8, vision_use_head=False
        ),
        image_token_id=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return transformers.LlavaForConditionalGeneration(config)


PATCH = 3 * 2 * 2 * 2
MODELS = {
    "Qwen2-VL": Vision(_qwen2_vl, grids(PATCH)),
    "Qwen2.5-VL": Vision(_qwen2_5_vl, grids(PATCH)),
    "Qwen3-VL": Vision(_qwen3_vl, grids(PATCH)),
    "LLaVA-OneVision": Vision(
        _llava_onevision,
        tiled,
        types=None,
        numbers="batch_num_images",
    ),
    "LLaVA": Vision(_llava, squares(4), types=None),
    "Gemma3": Vision(_gemma3, squares(4), types="token_type_ids"),
    "PaliGemma": Vision(_paligemma, squares(4), types="token_type_ids"),
    "Idefics3": Vision(_idefics3, squares(1, mask=True), types=None, padded=True),
    "Idefics2": Vision(_idefics2, squares(2, mask=True), types=None, padded=True),
}


def made(name: str) -> Any:
    """Return a model of random weights in float64."""
    torch.manual_seed(0)
    model = MODELS[name].build().double()
    for each in model.modules():
        for key, value in vars(each).items():
            if key in ("dropout", "attention_dropout") and isinstance(value, float):
                setattr(each, key, 0.0)
    return model
