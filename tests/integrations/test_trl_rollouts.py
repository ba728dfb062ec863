"""trl's GRPOTrainer and RLOOTrainer with the runtime in them train as the stock ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import trl
from torch import Tensor

from elastic_mbs import Policy
from elastic_mbs.errors import MicroBatchFloorError, UnsupportedError, UsageError
from elastic_mbs.integrations.transformers import elastic_trainer
from elastic_mbs.integrations.trl import private
from elastic_mbs.testing.faults import RandomFaults
from tests.helpers.steps import grads, off_by, quiet
from tests.helpers.strikes import every_operation
from tests.integrations.preference_runs import PLAIN, double_head, noted, tokenizer
from tests.integrations.trainer_runs import MARKS, apart, llama

pytestmark = [*MARKS, pytest.mark.usefixtures("double_head")]
__all__ = ["double_head"]
EXACT = 1e-10
GRPO, RLOO = trl.GRPOTrainer, trl.RLOOTrainer


def reward(completions: list[str], **others: Any) -> list[float]:
    return [float(sum(len(word) for word in set(text.split()))) for text in completions]


def build(kind: Any, *, elastic: Any = None, **args: Any) -> Any:
    ours = not kind.__module__.startswith("trl")
    prompts = datasets.Dataset.from_list([{"prompt": f"w{i} w{2 * i}"} for i in range(8)])
    plain = PLAIN | {"num_generations": 4, "max_completion_length": 6, "beta": 0.0, "seed": 5}
    model = llama()
    if (args or {}).get("beta"):  # the reference is loaded from where the model was
        model.save_pretrained("reference")
        model.config._name_or_path = str(Path("reference").resolve())
    return kind(
        model=model,
        args=(trl.GRPOConfig if issubclass(kind, GRPO) else trl.RLOOConfig)(**plain | args),
        train_dataset=prompts,
        eval_dataset=prompts.select(range(2)),
        reward_funcs=reward,
        processing_class=tokenizer(),
        **({"elastic": quiet() | (elastic or {})} if ours else {}),
    )


class Struck:
    """Faults while log-probabilities or a loss are computed, and none while texts are generated."""

    inside = False

    def __init__(self, plain: Any, faults: Any) -> None:
        self.plain, self.faults = plain, faults

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if Struck.inside:
            return self.plain(*args, **kwargs)
        Struck.inside = True
        try:
            with self.faults:
                return self.plain(*args, **kwargs)
        finally:
            Struck.inside = False


def run(kind: Any, faults: Any = None, **args: Any) -> Any:
    found = build(kind, **args)
    if faults is not None:
        for name in ("compute_loss", private.LOG_PROBABILITIES):
            setattr(found, name, Struck(getattr(found, name), faults))
    found.train()
    found.evaluate()
    return found


LOSSES: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {}),
    ("grpo", {"importance_sampling_level": "sequence"}),
    ("sapo", {}),
    ("bnpo", {}),
    ("dr_grpo", {}),
    ("dapo", {}),
    ("cispo", {}),
    ("vespo", {}),
    ("luspo", {"importance_sampling_level": "sequence"}),
]


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        *((GRPO, {"loss_type": loss, "num_iterations": 2} | more) for loss, more in LOSSES),
        (GRPO, {"beta": 0.1, "num_iterations": 2}),
        (
            GRPO,
            {
                "loss_type": "dapo",
                "gradient_accumulation_steps": 2,
                "per_device_train_batch_size": 4,
            },
        ),
        (GRPO, {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "loss_type": "bnpo"}),
        (RLOO, {"num_iterations": 2}),
        (RLOO, {"gradient_accumulation_steps": 2, "beta": 0.1}),
    ],
)
def test_weights_and_every_metric_are_those_of_the_stock_trainer(kind: Any, args: Any) -> None:
    args = {"learning_rate": 1.0, "max_grad_norm": 5.0, **args}
    stock = run(kind, **args)
    ours = run(elastic_trainer(kind), RandomFaults(0, str(args), always=True), **args)
    assert ours.elastic.stats.ooms > 1
    guarded = kind is RLOO or {"num_iterations", "steps_per_generation", "beta"} & set(args)
    assert any("_log_prob" in name for name in ours.elastic.size_models) == bool(guarded)
    assert apart(ours, stock) <= EXACT
    found, wanted = (
        [each for each in noted(trainer) if each[0] != "step_time"] for trainer in (ours, stock)
    )
    assert [name for name, _ in found] == [name for name, _ in wanted]
    assert [value for _, value in found] == pytest.approx(
        [value for _, value in wanted], rel=1e-6, abs=1e-9, nan_ok=True
    )


def with_batch(**args: Any) -> tuple[Any, Any, Any]:
    """Return a stock trainer and ours with the same weights, and completions of the stock one."""
    stock, ours = build(GRPO, **args), build(elastic_trainer(GRPO), **args)
    batches, plain = list[Any](), stock.compute_loss

    def compute_loss(model: Any, inputs: Any, **more: Any) -> Any:
        batches.append(inputs)
        return plain(model, inputs, **more)

    stock.compute_loss = compute_loss
    stock.current_gradient_accumulation_steps = ours.current_gradient_accumulation_steps = 1
    stock.training_step(stock.model, next(iter(stock.get_train_dataloader())), None)
    return stock, ours, batches[0]


def test_memory_may_run_out_at_any_operation_of_a_loss() -> None:
    stock, ours, batch = with_batch(loss_type="dapo")
    wanted, rows = grads(stock.model), len(batch["completion_ids"])
    for strike in every_operation(stride=401):
        ours.model.zero_grad()
        private.metrics_of(ours)["train"].clear()
        with strike:
            ours.compute_loss(ours.model, batch)
        assert off_by(ours.model, wanted) <= EXACT, strike.hits
        assert sum(stop - start for start, stop in ours.elastic.last_result.partition) == rows
        assert len(private.metrics_of(ours)["train"]["entropy"]) == 1


def test_a_batch_that_does_not_fit_leaves_what_the_trainer_keeps() -> None:
    _, ours, _ = with_batch()
    ours.train_dataset = None
    inputs = next(iter(build(GRPO).get_train_dataloader()))
    plain = ours._compute_loss

    def never(model: Any, inputs: Any) -> Tensor:
        plain(model, inputs)
        raise torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 GiB.")

    ours._compute_loss = never
    with pytest.raises(MicroBatchFloorError):
        ours.training_step(ours.model, inputs, None)
    assert "entropy" not in private.metrics_of(ours)["train"]
    assert "backward" not in vars(ours.accelerator)
    step, kept = ours._step, ours._buffered_inputs
    assert step == 0
    ours._compute_loss = plain
    ours.training_step(ours.model, inputs, None)  # the same batch, generated anew
    assert ours._step == 1
    assert ours._buffered_inputs is not kept


@pytest.mark.parametrize("loss", ["bnpo", "dapo"])
def test_a_batch_without_a_token_that_counts_adds_nothing(loss: str) -> None:
    _, ours, batch = with_batch(loss_type=loss)
    batch |= {"completion_mask": torch.zeros_like(batch["completion_mask"])}
    with RandomFaults(0, loss, always=True):
        found = ours.compute_loss(ours.model, batch)
        with torch.no_grad():
            evaluated = ours.compute_loss(ours.model, batch)
    assert ours.elastic.stats.ooms > 1
    assert float(found) == float(evaluated) == 0
    assert not any(each.any() for each in grads(ours.model) if each is not None)


@pytest.mark.parametrize(
    ("args", "elastic", "error", "says"),
    [
        ({"top_entropy_quantile": 0.5}, {}, UnsupportedError, "top_entropy_quantile below 1"),
        ({"entropy_coef": 0.1}, {}, UnsupportedError, "entropy_coef adds a mean"),
        ({}, {"count": None}, UsageError, "a GRPOTrainer tells by itself"),
        ({}, {"policy": Policy(max_tokens=9)}, UsageError, "max_micro_batch_size="),
        ({}, {"pieces": "by_length", "length": "completion_mask"}, UsageError, "pieces="),
    ],
)
def test_what_compares_completions_is_refused_before_training(
    args: Any, elastic: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        build(elastic_trainer(GRPO), elastic=elastic, **args)


def test_a_loss_and_a_field_that_are_not_known_are_named() -> None:
    _, ours, batch = with_batch()
    with pytest.raises(UnsupportedError, match="'num_images' in a batch of 8 completions"):
        ours.compute_loss(ours.model, batch | {"num_images": [1] * 8})
    ours.loss_type = "brand_new"
    with pytest.raises(UnsupportedError, match="'brand_new' is not known"):
        ours.train()
