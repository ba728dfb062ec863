"""Half precision in the Trainer, whose scaler needs a GPU, under out-of-memory errors."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from elastic_mbs.testing import InjectOOM

# `tools/gpu_check` runs this file also where there is no Trainer.
state = pytest.importorskip("accelerate.state")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.gpu, pytest.mark.no_oom_injection]

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def made(kind: Any, folder: Path, **arguments: Any) -> Any:
    state.AcceleratorState._reset_state(reset_partial_state=True)
    transformers.set_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, attn_implementation="eager")
    )
    tokens = torch.randint(0, 64, (48, 12))
    data = [
        {"input_ids": row, "labels": row.masked_fill(torch.rand(12) < 0.3, -100)} for row in tokens
    ]
    shown = {
        "max_steps": 6,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    training = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=8, optim="adamw_torch", **shown, **arguments
    )
    return kind(model, training, train_dataset=data)


def strike(trainer: Any) -> None:
    """Has one operation of each batch run out of memory."""
    step, batches = trainer.training_step, count(1)

    def struck(*args: Any) -> Tensor:
        with InjectOOM(at=[60 + 5 * next(batches)]):
            loss: Tensor = step(*args)
        return loss

    trainer.training_step = struck


@pytest.mark.parametrize(
    "arguments",
    [{"fp16": True}, {"fp16": True, "gradient_accumulation_steps": 2}, {"bf16": True}],
    ids=str,
)
def test_half_precision_scales_and_trains_as_stock(
    arguments: dict[str, Any], tmp_path: Path
) -> None:
    from elastic_mbs.integrations.transformers import elastic_trainer

    stock = made(transformers.Trainer, tmp_path, **arguments)
    stock.train()
    ours = made(elastic_trainer(transformers.Trainer), tmp_path, **arguments)
    strike(ours)
    ours.train()
    assert ours.elastic.stats.ooms >= 3  # the others came while the trainer's loss was checked
    losses = [
        torch.tensor([each["loss"] for each in trainer.state.log_history if "loss" in each])
        for trainer in (ours, stock)
    ]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=0)
    # as far as two steps move them
    torch.testing.assert_close(
        list(ours.model.parameters()), list(stock.model.parameters()), rtol=0, atol=1e-4
    )
    if arguments.get("fp16"):
        assert ours.accelerator.scaler.get_scale() == stock.accelerator.scaler.get_scale()
