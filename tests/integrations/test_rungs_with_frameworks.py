"""The rungs of escalation beside torch.compile, autocast, LoRA and the trainers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import datasets
import pytest
import tokenizers
import torch
import transformers
from lightning.pytorch import LightningModule
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from elastic_mbs import Escalated, Event, MemoryBudget, MicroBatchFloorError
from elastic_mbs.integrations.lightning import ElasticCallback
from elastic_mbs.integrations.transformers import elastic_trainer
from stress.reference.state import error_of
from tests.helpers.steps import elastic, grads, quiet
from tests.integrations import lightning_runs
from tests.integrations.trainer_runs import MARKS, ROUNDED

pytestmark = [*MARKS, *lightning_runs.WARNINGS]

WORDS, LENGTH = 4000, 256
EXACT, TRAINED = 1e-12, 1e-10


def llama(**more: Any) -> Any:
    config = {
        "vocab_size": WORDS,
        "hidden_size": 32,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
        "use_cache": False,
    }
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config | more)).double()


def lora(**more: Any) -> Any:
    config = LoraConfig(r=2, target_modules="all-linear", **more)
    return get_peft_model(llama(), config).double().train()


def ids(samples: int = 1) -> Tensor:
    return torch.randint(0, WORDS, (samples, LENGTH), generator=torch.Generator().manual_seed(1))


def loss_of(model: Any, piece: Tensor) -> Tensor:
    torch.manual_seed(2)  # dropout
    found: Tensor = model(input_ids=piece, labels=piece).loss
    return found


def gradient_bytes(model: Any) -> int:
    return sum(each.nbytes for each in model.parameters() if each.requires_grad)


def within(
    model: Any, loss_fn: Callable[[Tensor], Tensor], share: float, escalate: Any = "auto"
) -> tuple[list[Any], list[Any], list[str]]:
    """Return plain gradients, those in a share of the activations, and the rungs taken."""
    events, held = list[Event](), gradient_bytes(model)
    with MemoryBudget("20GiB", [model]) as budget:
        before = budget.live
        loss_fn(ids()).backward()
        need = budget.peak - before - held
        plain = grads(model)
        model.zero_grad()
        budget.limit = budget.live + held + int(need * share)
        mbs = elastic(model, escalate=escalate, on_event=events.append, sensor=None)
        mbs.backward(loss_fn, ids())
        found = grads(model)
        mbs.close()
    return plain, found, [event.by for event in events if isinstance(event, Escalated)]


MODELS: dict[str, tuple[Callable[[], Any], Any, float]] = {
    "tied": (lambda: llama(tie_word_embeddings=True), "auto", 0.25),
    "tied, in tiles": (lambda: llama(tie_word_embeddings=True), ("logits", "tile"), 0.25),
    "LoRA": (lora, "auto", 0.25),
    "LoRA, in tiles": (lora, ("logits", "tile"), 0.25),
    "LoRA with dropout": (lambda: lora(lora_dropout=0.1), "auto", 0.3),
}


@pytest.mark.parametrize("name", MODELS)
def test_one_sample_trains_in_a_part_of_its_activations(name: str) -> None:
    make, escalate, share = MODELS[name]
    model = make()
    plain, found, rungs = within(model, lambda piece: loss_of(model, piece), share, escalate)
    assert {"logits", "checkpoint" if escalate == "auto" else "tile"} <= set(rungs)
    assert error_of(found, plain) <= EXACT


def test_a_step_through_a_compiled_copy_of_the_model() -> None:
    model = llama()
    compiled: Any = torch.compile(model, backend="eager")
    plain, found, rungs = within(model, lambda piece: loss_of(compiled, piece), 0.3)
    assert "logits" in rungs
    assert error_of(found, plain) <= EXACT


def test_a_compiled_model_is_refused_by_name() -> None:
    model = llama()
    for layer in model.model.layers:
        layer.compile(backend="eager")
    with pytest.raises(MicroBatchFloorError) as refused:
        within(model, lambda piece: loss_of(model, piece), 0.25)
    assert "not even with offload." in str(refused.value)
    assert "the model without torch.compile" in str(refused.value)
    free = llama()  # as the error says
    plain, found, _ = within(free, lambda piece: loss_of(free, piece), 0.25)
    assert error_of(found, plain) <= EXACT


def test_under_autocast_gradients_are_as_near_as_those_of_a_plain_step() -> None:
    exact = llama()
    loss_of(exact, ids()).backward()
    model = llama().to(torch.float32)  # `float` is `double` here

    def loss_fn(piece: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, piece)

    plain, found, rungs = within(model, loss_fn, 0.3)
    assert "logits" in rungs
    wanted = grads(exact)
    assert all(each.dtype is torch.float32 for each in found)
    assert error_of(found, wanted) <= 2 * error_of(plain, wanted)


# ---------------------------------------------------------------------- trainers

ARGUMENTS = {
    "output_dir": ".",
    "use_cpu": True,
    "per_device_train_batch_size": 1,
    "num_train_epochs": 1,
    "learning_rate": 0.1,
    "max_grad_norm": 0.0,
    "optim": "sgd",
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}
Train = Callable[[Any, Any], object]  # of a model, and the options of a runtime or None


def by_trainer(model: Any, options: Any) -> None:
    kind, more = (elastic_trainer(Trainer), {"elastic": options}) if options else (Trainer, {})
    rows = [{"input_ids": each, "labels": each} for each in ids(2)]
    kind(model=model, args=TrainingArguments(**ARGUMENTS), train_dataset=rows, **more).train()


def by_sft(model: Any, options: Any) -> None:
    words = {f"w{i}": i for i in range(WORDS - 2)} | {"<pad>": WORDS - 2, "<eos>": WORDS - 1}
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=split, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )
    kind, more = SFTTrainer, {}
    if options:
        kind, more = elastic_trainer(SFTTrainer), {"elastic": options}
    args = {**ARGUMENTS, "bf16": False, "max_length": LENGTH, "gradient_checkpointing": False}
    kind(
        model=model,
        args=SFTConfig(**args),
        train_dataset=datasets.Dataset.from_list([{"input_ids": row.tolist()} for row in ids(2)]),
        processing_class=tokenizer,
        **more,
    ).train()


class Module(LightningModule):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def by_lightning(model: Any, options: Any) -> None:
    callbacks = [ElasticCallback(**options)] if options else []
    made = lightning_runs.trainer(callbacks, max_epochs=1)
    made.fit(Module(model), DataLoader(ids(2), batch_size=1))  # type: ignore[arg-type]


def trained(train: Train, share: float, **config: Any) -> tuple[float, list[str]]:
    """Return how far apart the weights are, plain and in a share of the activations; the rungs."""
    stock, ours, events = llama(**config), llama(**config), list[Event]()
    held = gradient_bytes(stock)
    with MemoryBudget("20GiB", [stock]) as budget:
        before = budget.live
        train(stock, None)
        need = budget.peak - before - held
    with MemoryBudget("20GiB", [ours]) as budget:
        budget.limit = budget.live + held + int(need * share)
        train(ours, quiet(escalate="auto", on_event=events.append, sensor=None))
    taken = [event.by for event in events if isinstance(event, Escalated)]
    return error_of(list(ours.parameters()), list(stock.parameters())), taken


@pytest.mark.parametrize("train", [by_trainer, by_lightning])
def test_a_trainer_trains_one_sample_in_a_quarter_of_its_activations(train: Train) -> None:
    error, rungs = trained(train, 0.25)
    assert error <= TRAINED
    assert "logits" in rungs


def test_sft_whose_own_loss_makes_its_logits_takes_the_other_rungs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()  # its fused head is written for float32
    monkeypatch.setattr("trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE", 8)
    error, rungs = trained(by_sft, 0.3, num_hidden_layers=4)
    assert error <= ROUNDED
    assert "checkpoint" in rungs
