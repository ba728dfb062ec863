"""trl's SFTTrainer with the runtime in it trains and counts its metrics as the stock one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import datasets
import pytest
import tokenizers
import transformers
from trl import SFTConfig, SFTTrainer

from elastic_mbs.integrations.transformers import elastic_trainer
from elastic_mbs.testing.faults import RandomFaults
from tests.helpers.steps import quiet
from tests.integrations.trainer_runs import MARKS, ROUNDED, apart, llama

pytestmark = MARKS


def build(kind: Any, *, elastic: Any = None, samples: int = 16, **args: Any) -> Any:
    words = {f"w{i}": i for i in range(38)} | {"<pad>": 38, "<eos>": 39}
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    split.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=split, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )
    texts = [
        {
            "prompt": "w1 w2",
            "completion": " " + " ".join(f"w{(5 * i + k) % 38}" for k in range(1 + 3 * i % 8)),
        }
        for i in range(samples)
    ]
    plain = {
        "output_dir": ".",
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 8,
        "num_train_epochs": 1,
        "report_to": [],
    }
    plain |= {
        "optim": "sgd",
        "learning_rate": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    more = {} if kind is SFTTrainer else {"elastic": quiet() | (elastic or {})}
    data = datasets.Dataset.from_list(texts)
    return kind(
        model=llama(),
        args=SFTConfig(**plain | args),
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer,
        **more,
    )


def sft(kind: Any, faults: Any = None, **args: Any) -> Any:
    found = build(kind, **args)
    with faults or nullcontext():
        found.train()
        found.evaluate()
    return found


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
        {"packing_strategy": "wrapped"},
    ],
)
def test_sft_trains_and_counts_its_metrics_as_without_errors(
    args: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # its fused head is written for float32
    args = {
        "gradient_checkpointing": False,
        **args,
        **({"packing": True, "max_length": 8} if "packing_strategy" in args else {}),
    }
    stock, ours = (
        sft(SFTTrainer, **args),
        sft(elastic_trainer(SFTTrainer), RandomFaults(0, "sft", always=True), **args),
    )
    assert ours.elastic.stats.ooms > 1
    assert apart(ours, stock) <= ROUNDED
    names = (
        "entropy",
        "mean_token_accuracy",
        "num_tokens",
        "eval_loss",
        "eval_entropy",
        "eval_mean_token_accuracy",
        "eval_num_tokens",
    )
    noted = [
        [(name, log[name]) for log in found.state.log_history for name in names if name in log]
        for found in (ours, stock)
    ]
    assert len(noted[0]) == len(noted[1]) > 7
    assert [name for name, _ in noted[0]] == [name for name, _ in noted[1]]
    assert [value for _, value in noted[0]] == pytest.approx(
        [value for _, value in noted[1]], rel=1e-5
    )
