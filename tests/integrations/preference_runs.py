"""trl's trainers of pairs on a tiny model, in float64."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import datasets
import pytest
import tokenizers
import torch
import transformers
import trl
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig
from trl.kernels import chunked_logprob

from elastic_mbs.integrations.transformers import ElasticTrainerMixin
from tests.helpers.steps import quiet
from tests.integrations.trainer_runs import TINY, llama, made

PLAIN = {
    "output_dir": ".",
    "use_cpu": True,
    "bf16": False,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "num_train_epochs": 1,
    "report_to": [],
    "optim": "sgd",
    "learning_rate": 0.1,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "gradient_checkpointing": False,
}


class InDouble:
    """torch, but for float32: trl's fused head accumulates in that type, whatever the model's."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def double_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_logprob, "torch", InDouble())


def tokenizer() -> Any:
    words = {f"w{i}": i for i in range(38)} | {"<pad>": 38, "<eos>": 39}
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    split.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=split, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )


def text(seed: int, words: int) -> str:
    return " " + " ".join(f"w{(seed * (k + 3)) % 38}" for k in range(words))


def pairs(n: int = 16) -> Any:
    return datasets.Dataset.from_list(
        [
            {
                "prompt": f"w{i} w2",
                "chosen": text(5 * i + 1, 1 + 3 * i % 8),
                "rejected": text(7 * i + 2, 1 + 5 * i % 7),
            }
            for i in range(n)
        ]
    )


def texts(n: int = 16) -> Any:
    """Return texts that are wanted or not; of the first four all are wanted."""
    return datasets.Dataset.from_list(
        [
            {
                "prompt": f"w{i} w2",
                "completion": text(5 * i + 1, 1 + 3 * i % 8),
                "label": i < 4 or i % 3 > 0,
            }
            for i in range(n)
        ]
    )


CONFIGS = {
    trl.DPOTrainer: trl.DPOConfig,
    trl.RewardTrainer: trl.RewardConfig,
    trl.KTOTrainer: trl.KTOConfig,
}


def judge() -> Any:
    """Return a small model with one score per text."""
    config = LlamaConfig(
        **TINY, num_hidden_layers=1, num_key_value_heads=1, num_labels=1, pad_token_id=38
    )
    model = made(lambda: transformers.LlamaForSequenceClassification(config))
    for parent in list(model.modules()):  # its own norm is in float32
        for name, child in parent.named_children():
            if type(child).__name__ == "LlamaRMSNorm":
                norm = torch.nn.RMSNorm(16, 1e-6, dtype=torch.float64)
                setattr(parent, name, norm)
    return model


def moved(model: Any) -> Any:
    """Return a reference that is not the model: else the first step has no margin at all."""
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.mul_(1 + 0.05 * (i % 3))
    return model


def adapted() -> Any:
    """Return a model with a trained adapter, of which trl makes the reference."""
    torch.manual_seed(3)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(llama(), config).double()


def build(
    kind: Any, *, elastic: Any = None, adapter: bool = False, samples: int = 16, **args: Any
) -> Any:
    """Return a DPOTrainer, a RewardTrainer, a KTOTrainer, or one with the runtime in it."""
    ours = issubclass(kind, ElasticTrainerMixin)
    more: dict[str, Any] = {"elastic": quiet() | (elastic or {})} if ours else {}
    stock = next(base for base in CONFIGS if issubclass(kind, base))
    if stock is not trl.RewardTrainer and not adapter:
        more["ref_model"] = moved(llama())
    data = texts if stock is trl.KTOTrainer else pairs
    return kind(
        model=adapted() if adapter else judge() if stock is trl.RewardTrainer else llama(),
        args=CONFIGS[stock](**PLAIN | args),
        train_dataset=data(samples),
        eval_dataset=data(min(samples, 12)),
        processing_class=tokenizer(),
        **more,
    )


def run(kind: Any, faults: Any = None, **args: Any) -> Any:
    """Build a trainer, train and evaluate, the first two while faults strike."""
    with faults or nullcontext():
        found = build(kind, **args)
        found.train()
        found.evaluate()
    return found


def noted(found: Any) -> list[tuple[str, float]]:
    """Return every metric that was logged, but for times and the runtime's own."""
    return [
        (name, value)
        for log in found.state.log_history
        for name, value in sorted(log.items())
        if not name.startswith(("elastic/", "train_", "total_flos"))
        and not name.endswith(("_runtime", "_per_second"))
    ]
