"""trl's DPO, reward and KTO trainers with the runtime in them train as the stock ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import trl
from torch import Tensor

from elastic_mbs import Policy
from elastic_mbs.errors import UnsupportedError, UsageError
from elastic_mbs.integrations.transformers import elastic_trainer
from elastic_mbs.integrations.trl import private
from elastic_mbs.testing.faults import RandomFaults
from tests.helpers.steps import grads, off_by
from tests.helpers.strikes import every_operation
from tests.integrations.preference_runs import build, double_head, noted, run
from tests.integrations.trainer_runs import MARKS, apart

pytestmark = [*MARKS, pytest.mark.usefixtures("double_head")]
__all__ = ["double_head"]
EXACT = 1e-10
DPO, REWARD, KTO = trl.DPOTrainer, trl.RewardTrainer, trl.KTOTrainer


def always(name: str) -> RandomFaults:
    return RandomFaults(0, name, always=True)


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        (DPO, {}),
        (DPO, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}),
        (DPO, {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}),
        (DPO, {"precompute_ref_log_probs": True}),
        (DPO, {"use_weighting": True, "ld_alpha": 0.5, "beta": 0.5}),
        (REWARD, {"center_rewards_coefficient": 0.1}),
        (KTO, {"beta": 0.5, "desirable_weight": 1.5}),
        (KTO, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}),
        (KTO, {"precompute_ref_log_probs": True, "beta": 0.5}),
        (KTO, {"loss_type": "apo_zero_unpaired"}),
        (DPO, {"adapter": True, "beta": 0.5}),
        (KTO, {"adapter": True, "precompute_ref_log_probs": True, "beta": 0.5}),
        (KTO, {"adapter": True, "beta": 0.5}),
    ],
)
def test_weights_and_every_metric_are_those_of_the_stock_trainer(kind: Any, args: Any) -> None:
    stock = run(kind, **args)
    ours = run(elastic_trainer(kind), always("pairs"), **args)
    assert ours.elastic.stats.ooms > 1
    assert apart(ours, stock) <= EXACT
    names = [[name for name, _ in noted(found)] for found in (ours, stock)]
    assert names[0] == names[1]
    assert [value for _, value in noted(ours)] == pytest.approx(
        [value for _, value in noted(stock)],
        rel=1e-6,  # the mean of a metric is taken in float32
        abs=1e-9,
    )


@pytest.fixture(scope="module")
def trainers() -> Iterator[tuple[Any, Any]]:
    """A stock DPOTrainer and one with the runtime, on the same weights, that have not trained."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)
        yield build(DPO, beta=0.5), build(elastic_trainer(DPO), beta=0.5)


def batch_of(trainer: Any) -> Any:
    return next(iter(trainer.get_train_dataloader()))


def gradient(trainer: Any, batch: Any) -> list[Tensor | None]:
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = 1
    trainer.training_step(trainer.model, dict(batch))
    return grads(trainer.model)


@pytest.mark.parametrize("loss", [*sorted(private.BY_PAIR), private.BY_TOKEN, "both"])
def test_the_gradient_of_every_loss_is_exact(
    trainers: tuple[Any, Any], loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = [("hinge", 0.3), ("sft", 0.7)] if loss == "both" else [(loss, 1.0)]
    stock, ours = trainers
    batch = batch_of(stock)
    for trainer in trainers:
        monkeypatch.setattr(trainer, "loss_types", [name for name, _ in losses])
        monkeypatch.setattr(trainer, "loss_weights", [weight for _, weight in losses])
        monkeypatch.setattr(trainer, "label_smoothing", 0.1)
    wanted = gradient(stock, batch)
    with always(loss):
        gradient(ours, batch)
    assert off_by(ours.model, wanted) <= EXACT
    assert private.losses_of(ours) == losses  # put back


def test_pairs_without_a_chosen_token_weigh_nothing_in_a_loss_over_tokens(
    trainers: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, ours = trainers
    batch = batch_of(stock)
    batch["completion_mask"][[1, 2, 5]] = 0
    for trainer in trainers:
        monkeypatch.setattr(trainer, "loss_types", ["sigmoid", "sft"])
        monkeypatch.setattr(trainer, "loss_weights", [1.0, 1.0])
    wanted = gradient(stock, batch)
    for size in (1, 3):
        monkeypatch.setattr(ours.elastic._knowledge.controller, "_start", size)
        monkeypatch.setattr(ours.elastic._knowledge.controller, "_tracks", {})
        gradient(ours, batch)
        assert len(ours.elastic.last_result.partition) > 2
        assert off_by(ours.model, wanted) <= EXACT


def test_memory_may_run_out_at_any_operation_and_pairs_stay_pairs(
    trainers: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, ours = trainers
    batch = batch_of(stock)
    wanted = gradient(stock, batch)
    seen, plain = list[Tensor](), ours.compute_loss

    def compute_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(inputs["input_ids"])
        return plain(model, inputs, *args, **kwargs)

    monkeypatch.setattr(ours, "compute_loss", compute_loss)
    chosen, rejected = batch["input_ids"].chunk(2)
    together = {tuple(one.tolist()): other for one, other in zip(chosen, rejected, strict=True)}
    before = copy.deepcopy(private.metrics_of(ours))
    for strike in every_operation(stride=401):
        seen.clear()
        with strike:
            gradient(ours, batch)
        assert off_by(ours.model, wanted) <= EXACT, strike.hits
        for rows in seen:
            for one, other in zip(*rows.chunk(2), strict=True):
                assert torch.equal(together[tuple(one.tolist())], other)
        now = private.metrics_of(ours)["train"]["rewards/margins"]
        assert len(now) == len(before["train"]["rewards/margins"]) + 1  # one entry a batch
        private.metrics_of(ours)["train"].clear()
        before = copy.deepcopy(private.metrics_of(ours))


def test_by_length_needs_no_length_and_trims_both_texts_of_a_pair() -> None:
    stock = run(DPO)
    ours = run(
        elastic_trainer(DPO), always("length"), elastic={"pieces": "by_length"}, num_train_epochs=1
    )
    assert ours.elastic.last_result.order is not None
    assert apart(ours, stock) <= EXACT


def test_scores_of_a_reward_model_come_in_the_order_of_the_stock_trainer() -> None:
    def scores(found: Any) -> Tensor:
        return torch.as_tensor(found.predict(found.eval_dataset).predictions)

    ours = build(elastic_trainer(REWARD))
    wanted = scores(build(REWARD))
    with always("predict"):
        found = scores(ours)
    assert found.shape == wanted.shape
    assert torch.allclose(found, wanted, rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    ("args", "elastic", "error", "says"),
    [
        ({"loss_type": ["aot"]}, {}, UnsupportedError, "'aot' sorts the pairs of a batch"),
        (
            {"loss_type": ["sigmoid", "sft"], "use_weighting": True},
            {},
            UnsupportedError,
            "leave one of them out",
        ),
        ({}, {"count": None}, UsageError, "a DPOTrainer tells by itself"),
        ({}, {"policy": Policy(max_tokens=9)}, UsageError, "max_micro_batch_size="),
    ],
)
def test_what_no_cut_leaves_exact_is_refused_before_training(
    args: Any, elastic: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        build(elastic_trainer(DPO), elastic=elastic, **args)


def test_a_loss_that_a_later_trl_brings_is_refused_by_name(
    trainers: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ours = trainers
    monkeypatch.setattr(ours, "loss_types", ["brand_new"])
    with pytest.raises(UnsupportedError, match="'brand_new' is not known"):
        ours.train()


def test_a_field_that_belongs_to_neither_texts_nor_pairs_is_named(
    trainers: tuple[Any, Any],
) -> None:
    stock, ours = trainers
    batch = batch_of(stock) | {"other": torch.ones(3)}
    with pytest.raises(UnsupportedError, match="'other' in a batch of 8 pairs"):
        ours.training_step(ours.model, batch)


def test_texts_are_compared_with_the_estimate_of_their_whole_batch() -> None:
    stock, ours = build(KTO, beta=0.5), build(elastic_trainer(KTO), beta=0.5)
    batch = batch_of(stock)
    wanted = gradient(stock, batch)
    estimate = private.metrics_of(stock)["train"]["kl"][-1]
    assert estimate > 1e-3
    for strike in every_operation(stride=401):
        private.metrics_of(ours)["train"].clear()
        with strike:
            gradient(ours, batch)
        assert off_by(ours.model, wanted) <= EXACT, strike.hits
        assert private.metrics_of(ours)["train"]["kl"] == [pytest.approx(estimate, rel=1e-12)]
        assert "_compute_kl_logps" not in vars(ours)


def test_the_estimate_is_made_as_in_training_after_an_evaluation() -> None:
    ours = build(elastic_trainer(KTO), beta=0.5, elastic={"verify": False})
    batch, modes = batch_of(ours), list[bool]()
    ours.model.eval()
    ours.model.register_forward_pre_hook(lambda model, args: modes.append(model.training))
    gradient(ours, batch)
    assert modes
    assert all(modes)


@pytest.mark.parametrize("kept", [True, False])
def test_the_reference_may_be_the_model_without_its_adapter_or_with_it_as_it_began(
    kept: bool,
) -> None:
    stock, ours = (
        build(kind, adapter=True, beta=0.5, gradient_checkpointing=True)
        for kind in (KTO, elastic_trainer(KTO))
    )
    for found in (stock, ours):
        if not kept:
            found.model.delete_adapter("ref")
        with torch.no_grad():  # no longer the reference: else there is no divergence
            for name, parameter in found.model.named_parameters():
                parameter.mul_(1.5 if "lora_A.default" in name else 1.0)
    batch = batch_of(stock)
    wanted = gradient(stock, batch)
    assert private.metrics_of(stock)["train"]["kl"][-1] > 1e-6
    for strike in every_operation(stride=801):
        with strike:
            gradient(ours, batch)
        assert off_by(ours.model, wanted) <= EXACT, strike.hits


def test_sizes_by_length_are_refused_for_texts_with_a_mismatched_completion() -> None:
    with pytest.raises(UsageError, match="pieces= does not go with a KTOTrainer"):
        build(elastic_trainer(KTO), elastic={"pieces": "by_length"})


def test_a_loss_of_kto_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = build(elastic_trainer(KTO))
    monkeypatch.setattr(ours, "loss_type", "brand_new")
    with pytest.raises(UnsupportedError, match="'brand_new' is not known"):
        ours.train()
