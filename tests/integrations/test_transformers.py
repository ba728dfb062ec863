"""transformers' Trainer with the runtime in it, under out-of-memory errors, trains as the stock one without limits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import datasets
import pytest
import tokenizers
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig, GPT2Config, LlamaConfig, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from elastic_mbs import MemoryBudget, MicroBatchFloorError
from elastic_mbs.integrations.transformers import ElasticTrainerMixin, elastic_trainer
from elastic_mbs.testing import InjectOOM
from elastic_mbs.testing.faults import RandomFaults
from stress.reference.state import error_of
from tests.helpers.steps import quiet
from tests.helpers.strikes import every_operation

pytestmark = [
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


@pytest.fixture(autouse=True)
def in_double(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The losses of transformers begin with `logits.float()`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    transformers.logging.set_verbosity_error()


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
    """`labels`: "tokens", of which each row has another number; "some tokens", of which some rows have none; "class"."""
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
    """How far two trainers are from each other: trained weights, and every loss that they have logged."""
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


@pytest.mark.parametrize(
    ("kind", "steps"), [(kind, steps) for kind in KINDS for steps in STEPS[kind]]
)
def test_training_is_that_of_the_stock_trainer(kind: str, steps: int) -> None:
    build, labels, args = KINDS[kind]
    args = args | {"gradient_accumulation_steps": steps, "per_device_train_batch_size": 8 // steps}
    stock = trained(Trainer, build(), rows(labels), **args)
    ours = trained(
        elastic_trainer(Trainer),
        build(),
        rows(labels),
        RandomFaults(0, kind, always=True),
        elastic={},
        **args,
    )
    assert ours.elastic.stats.ooms > 0
    assert apart(ours, stock) <= (ROUNDED if kind == "smoothed" else EXACT)


class Struck(ElasticTrainerMixin, Trainer):
    inject = InjectOOM()

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        with self.inject:
            return super().training_step(*args, **kwargs)


@pytest.mark.parametrize("kind", ["causal", "classes"])
def test_memory_may_run_out_at_any_operation_of_a_step(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, labels, _ = KINDS[kind]
    stock = trained(Trainer, build(), rows(labels, 4))
    for inject in every_operation(stride=7, least=100):
        monkeypatch.setattr(Struck, "inject", inject)
        assert (
            apart(trained(Struck, build(), rows(labels, 4), elastic={"micro_batch_size": 2}), stock)
            <= EXACT
        )


def test_gradients_under_accumulation_are_exact_for_classifiers_where_stock_5_23_is_wrong() -> None:
    """Stock 5.23 takes `**kwargs` of a model for the use of `num_items_in_batch`, and does not divide the loss by the accumulated batches."""
    model, data = bert("SequenceClassification"), rows("class")
    batch = {name: torch.stack([row[name] for row in data]) for name in data[0]}
    model.train()
    model(**batch).loss.backward()
    before = [each.detach().clone() for each in model.parameters()]
    exact = [
        torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()
    ]
    for steps in (2, 4):
        args = {
            "per_device_train_batch_size": 16 // steps,
            "gradient_accumulation_steps": steps,
            "max_grad_norm": 0.0,
            "learning_rate": 1.0,
        }
        made = {
            kind: trained(
                kind,
                bert("SequenceClassification"),
                data,
                lr_scheduler_type="constant",
                **args,
                **more,
            )
            for kind, more in (
                (Trainer, {}),
                (elastic_trainer(Trainer), {"elastic": {"micro_batch_size": 1}}),
            )
        }
        stock, ours = (
            [a - b.detach() for a, b in zip(before, each.model.parameters(), strict=True)]
            for each in made.values()
        )
        assert error_of(flat(ours), flat(exact)) <= EXACT
        assert error_of(flat(each / steps for each in stock), flat(exact)) <= EXACT, (
            "transformers divides now: take out this line, and the paragraph on it in "
            "docs/trainers.md"
        )


@pytest.mark.parametrize("kind", ["classes", "tokens", "masked", "llama"])
def test_a_loss_that_ignores_the_number_of_items_is_weighed_by_its_labels(kind: str) -> None:
    build, labels, _ = KINDS[kind]
    args: dict[str, Any] = {"compute_loss_func": token_loss} if kind == "llama" else {}
    whole = trained(Trainer, build(), rows(labels), **args)
    args |= {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2}
    assert (
        apart(
            trained(
                elastic_trainer(Trainer),
                build(),
                rows(labels),
                elastic={"micro_batch_size": 1},
                **args,
            ),
            whole,
        )
        <= EXACT
    )


def test_bf16_and_dropout_train_and_stay_finite_under_errors() -> None:
    ours = trained(
        elastic_trainer(Trainer),
        gpt2(resid_pdrop=0.1).float(),
        rows("tokens"),
        RandomFaults(0, "bf16", always=True),
        elastic={},
        bf16=True,
    )
    assert ours.elastic.stats.ooms > 0
    assert all(each.isfinite().all() for each in ours.model.parameters())


def test_a_compiled_model_trains_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # dynamo traces `float`
    stock = trained(Trainer, gpt2(), rows("tokens"))
    ours = trained(
        elastic_trainer(Trainer),
        gpt2(),
        rows("tokens"),
        elastic={"micro_batch_size": 4},
        torch_compile_backend="aot_eager",
    )
    assert ours.elastic.stats.pieces == 4
    assert apart(ours, stock) <= ROUNDED


# ---------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("kind", ["causal", "causal, rows without labels", "masked", "classes"])
@pytest.mark.parametrize("host", [None, 1])
def test_evaluation_alone_gives_the_loss_and_the_logits_of_the_stock_trainer(
    kind: str, host: int | None
) -> None:
    build, labels, _ = KINDS[kind]
    args = {"per_device_eval_batch_size": 8, "eval_accumulation_steps": host}
    stock, ours = (
        trainer(Trainer, build(), None, **args),
        trainer(elastic_trainer(Trainer), build(), None, elastic={}, **args),
    )
    wanted = stock.predict(rows(labels))
    with RandomFaults(0, kind, always=True) as faults:
        found = ours.predict(rows(labels))
    assert faults.hits
    assert abs(found.metrics["test_loss"] - wanted.metrics["test_loss"]) <= EXACT
    assert (
        error_of([torch.as_tensor(found.predictions)], [torch.as_tensor(wanted.predictions)])
        <= EXACT
    )
    assert (found.label_ids == wanted.label_ids).all()


class Padding(Trainer):
    """Logits as wide as the longest row of what it gets, and a number that comes once."""

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        width = int(inputs["labels"].ne(-100).sum(1).max())
        return loss, (logits[:, :width], loss.reshape(1)), labels


def test_outputs_that_pieces_pad_by_themselves_are_joined_as_the_trainer_joins_batches() -> None:
    found = trainer(
        elastic_trainer(Padding),
        gpt2(),
        None,
        elastic={"micro_batch_size": 3},
        per_device_eval_batch_size=8,
    ).predict(rows("tokens"))
    logits, losses = found.predictions
    assert logits.shape == (16, 10, 40)
    assert (logits == -100).any()
    assert losses.ndim == 1


# ---------------------------------------------------------------------- trl


def sft(kind: Any, faults: Any = None, **args: Any) -> Any:
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
        for i in range(16)
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
    more = {} if kind is SFTTrainer else {"elastic": quiet()}
    data = datasets.Dataset.from_list(texts)
    found = kind(
        model=llama(),
        args=SFTConfig(**plain | args),
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer,
        **more,
    )
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


# ---------------------------------------------------------------------- the step, checkpoints, logs, memory


def test_the_optimizers_step_is_guarded_where_that_is_asked_for() -> None:
    stock = trained(Trainer, gpt2(), rows("tokens"), optim="adamw_torch")
    ours = trainer(
        elastic_trainer(Trainer),
        gpt2(),
        rows("tokens"),
        elastic={"optimizer_step": True},
        optim="adamw_torch",
    )
    step, struck = ours.elastic.optimizer_step, list[InjectOOM]()

    def injected(optimizer: Any, closure: Any = None) -> None:
        struck.append(InjectOOM(at=[5]))
        with struck[-1]:
            step(optimizer, closure)

    ours.elastic.optimizer_step = injected
    ours.train()
    assert [len(each.hits) for each in struck] == [1, 1]
    assert apart(ours, stock) <= EXACT


def test_a_resumed_training_goes_on_with_sizes_and_curve(tmp_path: Path) -> None:
    args = {
        "save_strategy": "steps",
        "save_steps": 2,
        "elastic": {"micro_batch_size": 3},
        "optim": "adamw_torch",
        "num_train_epochs": 2,
    }
    whole = trained(
        elastic_trainer(Trainer), gpt2(), rows("tokens"), output_dir=str(tmp_path), **args
    )
    resumed = trainer(
        elastic_trainer(Trainer),
        gpt2(),
        rows("tokens"),
        output_dir=str(tmp_path),
        **args | {"elastic": {}},
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert apart(resumed, whole) <= EXACT
    assert resumed.state.log_history[-2]["elastic/micro_batch_size"] == 3
    (tmp_path / "checkpoint-2" / "elastic_mbs.json").write_text(json.dumps({"version": 7}))
    with pytest.raises(
        Exception, match=r"checkpoint-2/elastic_mbs\.json: .* Remove the file to resume without it"
    ):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_budget_splits_the_batch_and_every_log_of_training_says_so() -> None:
    data = rows("tokens", 64)
    stock = trained(Trainer, gpt2(), data, per_device_train_batch_size=32)
    with MemoryBudget("1GiB") as budget:
        ours = trainer(
            elastic_trainer(Trainer), gpt2(), data, per_device_train_batch_size=32, elastic={}
        )
        budget.limit = budget.live + 500_000
        ours.train()
    assert apart(ours, stock) <= EXACT
    logs = [log for log in ours.state.log_history if "loss" in log]
    assert [log["elastic/pieces"] > 1 for log in logs] == [True, True]
    assert logs[-1]["elastic/ooms"] == budget.ooms == ours.elastic.stats.ooms
    assert logs[-1]["elastic/replayed_samples"] >= 32
    assert "elastic/ooms" not in ours.state.log_history[-1]  # the summary


def test_a_batch_that_cannot_be_finished_is_a_typed_error_and_ends_the_runtime() -> None:
    ours = trainer(Struck, gpt2(), rows("tokens"), elastic={"verify": False})
    Struck.inject = InjectOOM(always_from=30)
    try:
        with pytest.raises(MicroBatchFloorError):
            ours.train()
    finally:
        Struck.inject = InjectOOM()
    assert all(each.grad is None for each in ours.model.parameters())
