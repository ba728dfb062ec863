"""The router's loss of models of experts is that of the whole batch, however it is cut."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from math import nan
from typing import Any

import pytest
import torch
import transformers
import trl
from torch import Tensor
from transformers import MixtralConfig, Qwen2MoeConfig, Trainer

from elastic_mbs.errors import UnsupportedError
from elastic_mbs.events import CallDone, CallFailed, Event, OutOfMemory
from elastic_mbs.integrations.trainer import router
from elastic_mbs.integrations.transformers import elastic_trainer
from elastic_mbs.testing.faults import RandomFaults
from tests.helpers.steps import grads, off_by
from tests.helpers.strikes import every_operation
from tests.integrations import preference_runs, test_trl, test_trl_rollouts
from tests.integrations.preference_runs import double_head
from tests.integrations.trainer_runs import MARKS, TINY, apart, made, rows, trained, trainer

pytestmark = [*MARKS, pytest.mark.usefixtures("double_head", "double_router")]
__all__ = ["double_head"]
EXACT = 1e-10
ITEMS = 18  # labels of the batch
EXPERTS = {
    **TINY,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}


# of trainers of trl
STEPS = {
    "router_aux_loss_coef": 0.5,
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 4,
    "max_steps": 1,
}


def mixtral(**config: Any) -> Any:
    plain = EXPERTS | {"num_local_experts": 4} | config
    return experts(lambda: transformers.MixtralForCausalLM(MixtralConfig(**plain)))


def qwen(**config: Any) -> Any:
    sizes = {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    plain = EXPERTS | sizes | config
    return experts(lambda: transformers.Qwen2MoeForCausalLM(Qwen2MoeConfig(**plain)))


def experts(build: Callable[[], Any]) -> Any:
    model = made(build)
    model.set_experts_implementation("eager")  # the other has no float64
    return model


@pytest.fixture
def double_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers adds the router's sums up in float32, whatever the model's type."""
    for model in (mixtral(), qwen()):
        module = sys.modules[type(model).__module__]
        monkeypatch.setattr(module, "torch", preference_runs.InDouble())


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """Rows with padding; one has no label, and tokens all the same."""
    found = rows("some tokens", 8)
    ids, labels = (torch.stack([row[name] for row in found]) for name in ("input_ids", "labels"))
    mask = torch.ones_like(ids)
    for i in range(8):
        mask[i, 10 - i % 4 :] = 0
    labels = labels.masked_fill(mask == 0, -100)
    assert int(labels[:, 1:].ne(-100).sum()) == ITEMS
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def step(found: Any, batch: Any, steps: int = 1) -> None:
    found.model.zero_grad()
    found.current_gradient_accumulation_steps = steps
    items = steps * ITEMS
    found.training_step(found.model, dict(batch), items)


def gradient(found: Any, batch: Any, steps: int = 1) -> list[Tensor | None]:
    step(found, batch, steps)
    return grads(found.model)


@pytest.mark.parametrize(("model", "steps"), [(mixtral, 1), (qwen, 2)])
def test_the_gradient_is_that_of_the_stock_trainer_wherever_memory_runs_out(
    model: Callable[[], Any], steps: int, batch: Any
) -> None:
    data = rows("tokens", 8)
    wanted = gradient(trainer(Trainer, model(), data), batch, steps)
    ours = trainer(elastic_trainer(Trainer), model(), data, elastic={})
    for strike in every_operation(stride=997):
        with strike:
            step(ours, batch, steps)
        assert off_by(ours.model, wanted) <= EXACT, strike.hits


def test_a_batch_that_turns_out_to_be_cut_leaves_what_was_accumulated_before_it(batch: Any) -> None:
    data, other = rows("tokens", 8), {name: value.flip(0) for name, value in batch.items()}
    stock = trainer(Trainer, mixtral(), data)
    step(stock, batch, 2)
    stock.training_step(stock.model, dict(other), 2 * ITEMS)
    wanted = grads(stock.model)
    cut = 0
    for strike in every_operation(stride=397):
        ours = trainer(elastic_trainer(Trainer), mixtral(), data, elastic={"verify": False})
        step(ours, batch, 2)
        with strike:
            ours.training_step(ours.model, dict(other), 2 * ITEMS)
        assert off_by(ours.model, wanted) <= EXACT, strike.hits
        cut += len(ours.elastic.last_result.partition) > 1
    assert cut


def test_a_batch_that_begins_again_is_one_call_with_all_its_errors(batch: Any) -> None:
    data, cut = rows("tokens", 8), 0
    for strike in every_operation(stride=397):
        events: list[Event] = []
        options = {"verify": False, "on_event": events.append}
        ours = trainer(elastic_trainer(Trainer), mixtral(), data, elastic=options)
        with strike:
            step(ours, batch)
        failed = sum(isinstance(event, OutOfMemory) for event in events)
        done = [event for event in events if isinstance(event, CallDone) and event.mode == "train"]
        assert not any(isinstance(event, CallFailed) for event in events)
        assert [event.ooms for event in done] == [failed]
        assert ours.elastic.last_result.ooms == ours.elastic.stats.ooms == failed
        cut += bool(failed) and done[0].pieces > 1
    assert cut


def test_it_would_not_be_if_each_piece_had_a_loss_of_its_own(batch: Any) -> None:
    data = rows("tokens", 8)
    wanted = gradient(trainer(Trainer, mixtral(), data), batch)
    options = {"micro_batch_size": 2}
    ours = trainer(elastic_trainer(Trainer), mixtral(), data, elastic=options)
    gradient(ours, batch)
    assert off_by(ours.model, wanted) <= EXACT
    unchecked = options | {"verify": False}
    own = trainer(elastic_trainer(Trainer), mixtral(), data, elastic=unchecked)
    own.model.config.output_router_logits, plain = False, own.compute_loss

    def compute_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(model, {**inputs, "output_router_logits": True}, *args, **kwargs)

    own.compute_loss = compute_loss
    gradient(own, batch)
    assert off_by(own.model, wanted) > 1e-3


def test_a_batch_that_is_not_cut_runs_once_and_one_that_is_runs_once_more_without_gradients(
    batch: Any,
) -> None:
    ours = trainer(elastic_trainer(Trainer), mixtral(), rows("tokens", 8), elastic={})
    seen = list[tuple[int, bool]]()

    def note(module: Any, args: Any, kwargs: Any) -> None:
        seen.append((len(kwargs["input_ids"]), torch.is_grad_enabled()))

    ours.model.register_forward_pre_hook(note, with_kwargs=True)
    gradient(ours, batch)
    seen.clear()
    gradient(ours, batch)
    assert seen == [(8, True)]
    with RandomFaults(0, "router", always=True):
        gradient(ours, batch)
    gradient(ours, batch)
    seen.clear()
    gradient(ours, batch)
    sizes = ours.elastic.last_result.partition
    assert len(sizes) > 1
    assert [grad for _, grad in seen] == [False] * (len(seen) - len(sizes)) + [True] * len(sizes)
    assert sum(rows for rows, grad in seen if not grad) == 8


def test_losses_of_an_evaluation_are_those_of_the_stock_trainer(batch: Any) -> None:
    data = [{name: value[i] for name, value in batch.items()} for i in range(8)]
    stock = trainer(Trainer, mixtral(), data).evaluate(data)
    ours = trainer(elastic_trainer(Trainer), mixtral(), data, elastic={})
    for _ in range(2):  # a cut that was not expected, and one that was
        with RandomFaults(0, "evaluate", always=True):
            found = ours.evaluate(data)
        assert found["eval_loss"] == pytest.approx(stock["eval_loss"], rel=1e-9)


def test_without_padding_it_counts_the_tokens_of_the_one_row() -> None:
    args = {"data_collator": transformers.DataCollatorWithFlattening()}
    data = [
        {name: value.tolist()[: 4 + i % 5] for name, value in row.items()}
        for i, row in enumerate(rows("tokens"))
    ]
    stock = trained(Trainer, mixtral(), data, **args)
    faults = RandomFaults(0, "packed", always=True)
    ours = trained(elastic_trainer(Trainer), mixtral(), data, faults, **args, elastic={})
    assert ours.elastic.stats.ooms > 1
    assert apart(ours, stock) <= EXACT


@pytest.mark.parametrize("kind", [trl.DPOTrainer, trl.KTOTrainer])
def test_trainers_of_trl_train_as_the_stock_ones(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # trl asks for it where it is wanted, and not of the reference
    monkeypatch.setattr(preference_runs, "llama", lambda: qwen(output_router_logits=False))
    stock = preference_runs.run(kind, **STEPS)
    faults = RandomFaults(0, kind.__name__, always=True)
    ours = preference_runs.run(elastic_trainer(kind), faults, **STEPS)
    assert ours.elastic.stats.ooms > 1
    assert apart(ours, stock) <= EXACT
    noted = [preference_runs.noted(found) for found in (ours, stock)]
    names = [[name for name, _ in each] for each in noted]
    assert "aux_loss" in names[0]
    assert names[0] == names[1]
    values = [[value for _, value in each] for each in noted]
    assert values[0] == pytest.approx(values[1], rel=1e-6, abs=1e-9)


def test_sft_trains_and_notes_it_as_the_stock_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_trl, "llama", lambda: qwen(output_router_logits=False))
    stock = test_trl.sft(trl.SFTTrainer, **STEPS)
    faults = RandomFaults(0, "sft", always=True)
    ours = test_trl.sft(elastic_trainer(trl.SFTTrainer), faults, **STEPS)
    assert ours.elastic.stats.ooms > 1
    assert apart(ours, stock) <= EXACT
    noted = [dict(preference_runs.noted(found)) for found in (ours, stock)]
    assert noted[0]["aux_loss"] == pytest.approx(noted[1]["aux_loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        *((trl.GRPOTrainer, {"loss_type": loss}) for loss in ("dapo", "grpo", "bnpo")),
        (trl.GRPOTrainer, {"loss_type": "bnpo", "mask_truncated_completions": True}),
        (trl.GRPOTrainer, {"num_iterations": 2}),
        (trl.RLOOTrainer, {}),
    ],
)
def test_completions_are_trained_as_by_the_stock_trainer(
    kind: Any, args: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_trl_rollouts, "llama", lambda: qwen(output_router_logits=False))
    args = STEPS | {"max_steps": 2, "learning_rate": 1.0} | args
    stock = test_trl_rollouts.run(kind, **args)
    faults = RandomFaults(0, str(args), always=True)
    ours = test_trl_rollouts.run(elastic_trainer(kind), faults, **args)
    assert ours.elastic.stats.ooms > 1
    assert apart(ours, stock) <= EXACT
    noted = [
        [each for each in preference_runs.noted(found) if each[0] != "step_time"]
        for found in (ours, stock)
    ]
    names = [[name for name, _ in each] for each in noted]
    assert {"aux_loss", "eval_aux_loss"} <= {*names[0]}
    assert names[0] == names[1]
    values = [[nan if value is None else value for _, value in each] for each in noted]
    assert values[0] == pytest.approx(values[1], rel=1e-6, abs=1e-9, nan_ok=True)


def squared(
    gate_logits: Any, num_experts: Any = None, top_k: int = 2, attention_mask: Any = None
) -> Any:
    return sum(each.square().mean() for each in gate_logits)


def other(router_probs: Any, expert_indices: Any) -> Any:
    return router_probs.sum()


@pytest.mark.parametrize(
    ("function", "says"),
    [(other, "is not the one of Mixtral and its like"), (squared, "where the one of Mixtral")],
)
def test_another_loss_of_a_router_is_refused(
    function: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[type(mixtral()).__module__]
    monkeypatch.setattr(module, router.FUNCTION, function)
    kind, data, options = elastic_trainer(Trainer), rows("tokens"), {"micro_batch_size": 2}
    with pytest.raises(UnsupportedError, match=f"{says}.*output_router_logits=False"):
        trained(kind, mixtral(), data, elastic=options)
    trained(kind, mixtral(output_router_logits=False), data, elastic=options)


def test_the_function_is_replaced_where_trl_has_not_imported_it_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = importlib.import_module("transformers.models.mixtral")
    module = sys.modules["transformers.models.mixtral.modeling_mixtral"]
    monkeypatch.setattr(package, "modeling_mixtral", module)  # importing it again sets another
    monkeypatch.delitem(sys.modules, module.__name__)
    assert module.__name__ in [each.__name__ for each in router._modules(qwen())]


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "olmoe"])
def test_each_model_of_experts_has_the_function_that_is_replaced(name: str) -> None:
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    assert [*inspect.signature(vars(module)[router.FUNCTION]).parameters] == router.PARAMETERS
