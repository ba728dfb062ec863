"""Trainers of transformers on tiny models, and how far two of them are from each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig, GPT2Config, LlamaConfig, TrainingArguments

from stress.reference.state import error_of
from tests.helpers.steps import quiet

MARKS = [
    pytest.mark.usefixtures("in_double"),
    pytest.mark.no_oom_injection,
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning"),
    # peft asks for it
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # dynamo looks at it
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
]

EXACT = 1e-12
ROUNDED = 1e-6  # where transformers computes a part in float32 whatever the model's type
TINY = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
}
BERT = {
    **TINY,
    "num_hidden_layers": 1,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": 3,
}
Data = list[dict[str, Tensor]]


def made(build: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return build().double()


def gpt2(**config: Any) -> Any:
    plain = {
        "vocab_size": 40,
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 16,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
    return made(lambda: transformers.GPT2LMHeadModel(GPT2Config(**plain | config)))


def llama() -> Any:
    model = made(
        lambda: transformers.LlamaForCausalLM(
            LlamaConfig(**TINY, num_hidden_layers=1, num_key_value_heads=1)
        )
    )
    for parent in list(model.modules()):  # its own norm is in float32
        for name, child in parent.named_children():
            if type(child).__name__ == "LlamaRMSNorm":
                setattr(parent, name, nn.RMSNorm(16, 1e-6, dtype=torch.float64))
    return model


def uncounted() -> Any:
    """Of such a model the trainer takes the mean of each batch, and divides by their number."""
    model = llama()
    model.accepts_loss_kwargs = False
    return model


class Plain(nn.Module):
    """A model that is none of transformers'."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embed(input_ids).cumsum(1))
        return {
            "loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
            "logits": logits,
        }


def bert(kind: str) -> Any:
    return made(lambda: getattr(transformers, f"BertFor{kind}")(BertConfig(**BERT)))


def rows(labels: str, n: int = 16) -> Data:
    """`labels`: "tokens" (numbers differ), "some tokens" (some rows have none), or "class"."""
    draw = torch.Generator().manual_seed(1)
    found = []
    for i in range(n):
        ids = torch.randint(40, (10,), generator=draw)
        kept = ids.clone() % (3 if labels == "three tokens" else 40)
        kept[: 10 if labels == "some tokens" and i % 3 == 0 else 7 * i % 9] = -100
        found.append({"input_ids": ids, "labels": ids[0] % 3 if labels == "class" else kept})
    return found


def trainer(
    kind: Any,
    model: Any,
    data: Any,
    *,
    callbacks: Any = None,
    compute_loss_func: Any = None,
    data_collator: Any = None,
    elastic: Any = None,
    **args: Any,
) -> Any:
    plain = {
        "output_dir": ".",
        "use_cpu": True,
        "per_device_train_batch_size": 8,
        "num_train_epochs": 1,
        "learning_rate": 0.1,
    }
    plain |= {
        "optim": "sgd",
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    more = {} if elastic is None else {"elastic": quiet() | elastic}
    return kind(
        model=model,
        args=TrainingArguments(**plain | args),
        train_dataset=data,
        compute_loss_func=compute_loss_func,
        data_collator=data_collator,
        **more,
    )


def trained(kind: Any, model: Any, data: Any, faults: Any = None, **args: Any) -> Any:
    found = trainer(kind, model, data, **args)
    with faults or nullcontext():
        found.train()
    return found


def flat(tensors: Iterable[Tensor]) -> list[Tensor | None]:
    """As one vector: a key's bias has no gradient but rounding, and would be compared with that."""
    return [torch.cat([each.detach().flatten() for each in tensors])]


def apart(one: Any, other: Any) -> float:
    """How far two trainers are apart in their weights and in every loss that was logged."""
    losses = [
        flat(
            torch.tensor(log["loss"], dtype=torch.float64)
            for log in found.state.log_history
            if "loss" in log
        )
        for found in (one, other)
    ]
    # a loss is added up in float32
    return max(
        error_of(flat(one.model.parameters()), flat(other.model.parameters())),
        error_of(*losses) / 1e6,
    )


def token_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Any:
    """A mean over the tokens of what it gets, whatever it is told."""
    return functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def summed_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Any:
    return (
        functional.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
        )
        / num_items_in_batch
    )


KINDS: dict[str, tuple[Callable[[], Any], str, dict[str, Any]]] = {
    "causal": (gpt2, "tokens", {}),
    "causal, rows without labels": (gpt2, "some tokens", {}),
    "uncounted": (uncounted, "tokens", {}),
    "llama": (llama, "tokens", {}),
    "plain module": (lambda: made(Plain), "tokens", {}),
    "masked": (lambda: bert("MaskedLM"), "tokens", {}),
    "tokens": (lambda: bert("TokenClassification"), "three tokens", {}),
    "classes": (lambda: bert("SequenceClassification"), "class", {}),
    "clipped": (gpt2, "tokens", {"max_grad_norm": 0.01}),
    "loss function": (gpt2, "tokens", {"compute_loss_func": summed_loss}),
    "smoothed": (gpt2, "tokens", {"label_smoothing_factor": 0.1}),
    "checkpointing": (gpt2, "tokens", {"gradient_checkpointing": True}),
    "reentrant": (
        gpt2,
        "tokens",
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ),
    "LoRA": (
        lambda: get_peft_model(
            gpt2(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        ).double(),
        "tokens",
        {},
    ),
}
STEPS = dict.fromkeys(KINDS, (1, 4)) | {
    "classes": (1,),
    "plain module": (1,),
    "tokens": (1,),
    "masked": (1,),
    "checkpointing": (1,),
    "llama": (1,),
}
