"""transformers' Trainer with the runtime in it trains as the stock one, whatever memory does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer

from elastic_mbs import MemoryBudget, MicroBatchFloorError, Policy
from elastic_mbs.integrations.transformers import ElasticTrainerMixin, elastic_trainer
from elastic_mbs.testing import InjectOOM
from elastic_mbs.testing.faults import RandomFaults
from stress.reference.state import error_of
from tests.helpers.strikes import every_operation
from tests.integrations.trainer_runs import (
    EXACT,
    KINDS,
    MARKS,
    ROUNDED,
    STEPS,
    apart,
    bert,
    flat,
    gpt2,
    rows,
    token_loss,
    trained,
    trainer,
)

pytestmark = MARKS


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


@pytest.mark.parametrize("budget", [None, 20])
def test_padded_texts_may_be_sorted_and_have_a_budget_of_tokens(budget: int | None) -> None:
    texts = [
        {
            "input_ids": row["input_ids"] * (torch.arange(10) < 2 + i % 8),
            "attention_mask": (torch.arange(10) < 2 + i % 8).long(),
            "labels": row["input_ids"].where(torch.arange(10) < 2 + i % 8, -100),
        }
        for i, row in enumerate(rows("tokens"))
    ]
    seen: list[tuple[int, ...]] = []

    class Noting(Trainer):
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Tensor:
            seen.append(tuple(inputs["input_ids"].shape))
            loss: Tensor = super().training_step(model, inputs, *args)
            return loss

    stock = trained(Trainer, gpt2(), texts)
    ours = trained(
        elastic_trainer(Noting),
        gpt2(),
        texts,
        RandomFaults(0, "length", always=True),
        elastic={
            "pieces": "by_length",
            "length": "attention_mask",
            "policy": Policy(max_tokens=budget, grow=False),
        },
    )
    assert ours.elastic.stats.ooms > 0
    assert apart(ours, stock) <= EXACT
    assert any(width < 10 for _, width in seen)
    assert budget is None or max(rows * width for rows, width in seen) <= budget


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
    for inject in every_operation(stride=97, least=100):
        monkeypatch.setattr(Struck, "inject", inject)
        assert (
            apart(trained(Struck, build(), rows(labels, 4), elastic={"micro_batch_size": 2}), stock)
            <= EXACT
        )


def test_accumulation_is_exact_for_classifiers_where_stock_is_wrong() -> None:
    """Stock 5.23 does not divide the loss of a model with `**kwargs` by the batches."""
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


# ---------------------------------------------------------------------- step, checkpoints, logs


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


def test_a_batch_that_cannot_be_finished_is_a_typed_error() -> None:
    ours = trainer(Struck, gpt2(), rows("tokens"), elastic={"verify": False})
    Struck.inject = InjectOOM(always_from=30)
    try:
        with pytest.raises(MicroBatchFloorError):
            ours.train()
    finally:
        Struck.inject = InjectOOM()
    assert all(each.grad is None for each in ours.model.parameters())
