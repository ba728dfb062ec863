"""Losses over pixels and over recordings, in a Trainer."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from transformers import SegformerConfig, Trainer, Wav2Vec2Config

from elastic_mbs.errors import UsageError
from elastic_mbs.integrations.transformers import elastic_trainer
from elastic_mbs.testing.faults import RandomFaults
from tests.integrations.trainer_runs import EXACT, MARKS, ROUNDED, apart, made, trained

pytestmark = MARKS
NEVER = dict.fromkeys(
    (
        *("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"),
        *("final_dropout", "layerdrop", "mask_time_prob"),
    ),
    0.0,
)


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


def wav2vec2(reduction: str) -> Any:
    config = Wav2Vec2Config(
        vocab_size=12,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        conv_dim=(8, 8),
        conv_stride=(5, 4),
        conv_kernel=(10, 4),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        feat_extract_norm="layer",
        ctc_loss_reduction=reduction,
        apply_spec_augment=False,
        **NEVER,
    )
    return made(lambda: transformers.Wav2Vec2ForCTC(config))


def pictures() -> list[dict[str, Any]]:
    """Pictures with more and more pixels that are left out."""
    drawn = torch.Generator().manual_seed(0)
    out = torch.rand(16, 32, 32, generator=drawn) < torch.linspace(0.1, 0.7, 16)[:, None, None]
    labels = torch.randint(0, 5, (16, 32, 32), generator=drawn).masked_fill(out, 255)
    pixels = torch.randn(16, 3, 32, 32, generator=drawn).double()
    return [{"pixel_values": x, "labels": y} for x, y in zip(pixels, labels, strict=True)]


def recordings() -> list[dict[str, Any]]:
    """Recordings with texts of 3 to 6 letters."""
    drawn = torch.Generator().manual_seed(0)
    letters = torch.randint(1, 12, (16, 8), generator=drawn)
    letters[torch.arange(8) >= 3 + torch.arange(16)[:, None] % 4] = -100
    sound = torch.randn(16, 600, generator=drawn).double()
    return [{"input_values": x, "labels": y} for x, y in zip(sound, letters, strict=True)]


def test_segformer_in_one_piece_trains_as_the_stock_trainer() -> None:
    stock = trained(Trainer, segformer(), pictures())
    ours = trained(elastic_trainer(Trainer), segformer(), pictures(), elastic={})
    assert len(ours.elastic.last_result.partition) == 1
    assert apart(ours, stock) <= EXACT


def test_ctc_by_the_mean_over_recordings_is_exact_with_the_count_that_the_check_asks_for() -> None:
    stock = trained(Trainer, wav2vec2("mean"), recordings())
    run = partial(trained, elastic_trainer(Trainer))
    with pytest.raises(UsageError, match="None for samples"):
        run(wav2vec2("mean"), recordings(), elastic={})
    faults = RandomFaults(0, "ctc", always=True)
    ours = run(wav2vec2("mean"), recordings(), faults, elastic={"count": None})
    assert ours.elastic.stats.ooms > 1
    assert apart(ours, stock) <= ROUNDED


def test_ctc_by_the_sum_is_refused_with_the_way_out_and_trains_where_the_batch_fits() -> None:
    run = partial(trained, elastic_trainer(Trainer))
    with pytest.raises(UsageError, match="ctc_loss_reduction='mean'"):
        run(wav2vec2("sum"), recordings(), elastic={})
    stock = trained(Trainer, wav2vec2("sum"), recordings())
    ours = run(wav2vec2("sum"), recordings(), elastic={"verify": False})
    assert len(ours.elastic.last_result.partition) == 1
    assert apart(ours, stock) <= EXACT
