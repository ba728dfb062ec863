"""A loss over the pixels of pictures, in a Trainer."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import SegformerConfig, Trainer

from elastic_mbs.integrations.transformers import elastic_trainer
from tests.integrations.trainer_runs import EXACT, MARKS, apart, made, trained

pytestmark = MARKS


def segformer() -> Any:
    """A model with BatchNorm in its decoder, whose loss leaves pixels of 255 out."""
    config = SegformerConfig(
        num_labels=5,
        depths=[1] * 4,
        hidden_sizes=[8] * 4,
        decoder_hidden_size=8,
        num_attention_heads=[1] * 4,
        mlp_ratios=[2] * 4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
    )
    return made(lambda: transformers.SegformerForSemanticSegmentation(config))


def pictures() -> list[dict[str, Any]]:
    """Pictures with more and more pixels that are left out."""
    drawn = torch.Generator().manual_seed(0)
    out = torch.rand(16, 32, 32, generator=drawn) < torch.linspace(0.1, 0.7, 16)[:, None, None]
    labels = torch.randint(0, 5, (16, 32, 32), generator=drawn).masked_fill(out, 255)
    pixels = torch.randn(16, 3, 32, 32, generator=drawn).double()
    return [{"pixel_values": x, "labels": y} for x, y in zip(pixels, labels, strict=True)]


def test_segformer_in_one_piece_trains_as_the_stock_trainer() -> None:
    stock = trained(Trainer, segformer(), pictures())
    ours = trained(elastic_trainer(Trainer), segformer(), pictures(), elastic={})
    assert len(ours.elastic.last_result.partition) == 1
    assert apart(ours, stock) <= EXACT
