"""CTC heads of transformers: the mean over samples without a line, the sum refused with its way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments, Wav2Vec2Config, Wav2Vec2ForCTC

from elastic_mbs import ElasticMBS, UnsupportedError
from elastic_mbs.integrations.transformers import elastic_trainer
from tests.helpers.steps import quiet

pytestmark = pytest.mark.no_oom_injection

SIZES: dict[str, Any] = {
    "vocab_size": 12,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "conv_dim": (8, 8),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "feat_extract_norm": "layer",
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "pad_token_id": 0,
    "mask_time_prob": 0.0,
}
STILL = ("layerdrop", "hidden_dropout", "attention_dropout", "feat_proj_dropout", "final_dropout")
LENGTHS = ((400, 5), (300, 3), (250, 2), (420, 8), (200, 1), (350, 4), (260, 2), (410, 6))


def built(reduction: str) -> Any:
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        **SIZES,
        **dict.fromkeys((*STILL, "activation_dropout"), 0.0),
        ctc_loss_reduction=reduction,
        ctc_zero_infinity=True,
    )
    return Wav2Vec2ForCTC(config).double()


def collate(rows: Any) -> dict[str, Tensor]:
    waves, labels = [row[0] for row in rows], [row[1] for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_values": pad(waves, batch_first=True),
        "attention_mask": pad([torch.ones(len(wave)).long() for wave in waves], batch_first=True),
        "labels": pad(labels, batch_first=True, padding_value=-100),
    }


def data() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(n).double(), torch.randint(1, 12, (k,))) for n, k in LENGTHS]


def trainer(cls: Any, folder: Any, reduction: str, steps: int, **more: Any) -> Any:
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=8 // steps,
        gradient_accumulation_steps=steps,
        max_steps=2,
        learning_rate=1e-2,
        optim="sgd",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    model = built(reduction)
    return cls(model=model, args=args, train_dataset=data(), data_collator=collate, **more)


@pytest.mark.parametrize("steps", [1, 2])
def test_the_mean_of_ctc_is_exact_without_a_line(steps: int, tmp_path: Any) -> None:
    stock = trainer(Trainer, tmp_path, "mean", 1)
    stock.train()
    ours = trainer(
        elastic_trainer(Trainer),
        tmp_path,
        "mean",
        steps,
        elastic=quiet() | {"micro_batch_size": 3},
    )
    ours.train()
    assert ours.elastic.stats.pieces > 4
    for name, wanted in stock.model.state_dict().items():
        found = ours.model.state_dict()[name]
        assert (found - wanted).abs().max() <= 1e-12, name


def test_the_sum_of_ctc_is_refused_and_a_loop_has_it_exactly(tmp_path: Any) -> None:
    with pytest.raises(UnsupportedError, match=r'ctc_loss_reduction = "mean".*reduction="sum"'):
        trainer(elastic_trainer(Trainer), tmp_path, "sum", 1, elastic=quiet())
    batch, model, twin = collate(data()), built("sum"), built("sum")
    ElasticMBS(model, micro_batch_size=3, reduction="sum").backward(
        lambda b: model(**b).loss, batch
    )
    twin(**batch).loss.backward()
    for found, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        if wanted.grad is not None:
            off = (found.grad - wanted.grad).abs().max()
            assert off <= 1e-12 * wanted.grad.abs().max().clamp(min=1)
