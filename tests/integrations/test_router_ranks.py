"""The router's loss of models of experts on two ranks is the stock trainer's, however cut."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import transformers

from elastic_mbs.integrations.transformers import elastic_trainer
from stress.ranks.job import run_ranks, values
from tests.helpers.ddp import caught
from tests.integrations import preference_runs, test_trl, test_trl_ranks, test_trl_rollouts
from tests.integrations.rank_runs import (
    FSDP2,
    shard_on_cpus,
    trainers_at_hand,
    whole,
    worst,
)
from tests.integrations.test_router import mixtral, qwen
from tests.integrations.test_trl_ranks import EXACT, LAST, Broken, Failing, first
from tests.integrations.trainer_runs import rows, trainer

pytestmark = [pytest.mark.no_oom_injection, pytest.mark.usefixtures("trainers_at_hand")]
__all__ = ["trainers_at_hand"]

Logs = list[float]
SMALL: dict[str, Any] = {"per_device_train_batch_size": 4, "ddp_find_unused_parameters": True}


def in_double(model: Any) -> Any:
    """Return a model whose router's sums are in float64."""
    vars(sys.modules[type(model).__module__])["torch"] = preference_runs.InDouble()
    return model


def small(*, ours: bool, **args: Any) -> Any:
    """Return a Trainer of experts; some rows of its data have no label."""
    kind = elastic_trainer(transformers.Trainer) if ours else transformers.Trainer
    options = SMALL | args | ({"elastic": {}} if ours else {})
    return trainer(kind, in_double(mixtral()), rows("some tokens", 20), **options)


def both(
    rank: int, world: int, folder: str, errors: tuple[int, int], args: Any
) -> tuple[float, list[Logs], int]:
    """Return how far weights are apart, the losses of both runs, and the failures survived."""
    test_trl_ranks.in_double(rank, world, folder)
    shard_on_cpus()
    failing, runs, losses = Failing(errors[rank], generates=False), [], []
    for ours in (True, False):
        each = small(ours=ours, **args)
        if ours:
            first(each).register_forward_hook(failing)
        each.train()
        evaluated = each.evaluate(rows("some tokens", 12))["eval_loss"]
        noted = [entry["loss"] for entry in each.state.log_history if "loss" in entry]
        runs.append(each)
        losses.append([*noted, evaluated])
    assert not failing.training + failing.evaluation
    return worst(*(whole(each.model) for each in runs)), losses, runs[0].elastic.stats.ooms


@pytest.mark.parametrize(
    ("errors", "args"),
    [
        ((2, 1), {"gradient_accumulation_steps": 2}),
        ((2, 1), {"average_tokens_across_devices": False}),
        ((0, 2), FSDP2),
    ],
)
def test_a_trainer_of_experts_trains_and_logs_as_the_stock_one(
    errors: tuple[int, int], args: dict[str, Any], tmp_path: Any
) -> None:
    found = values(run_ranks(both, str(tmp_path), errors, args))
    assert [ooms for *_, ooms in found] == [*errors]
    assert max(weights for weights, *_ in found) < EXACT
    for _, (ours, stock), _ in found:
        assert ours == pytest.approx(stock, rel=1e-5)  # the trainer adds losses up in float32


def of_trl(rank: int, world: int, folder: str, name: str, errors: Any, args: Any) -> Any:
    """Run a trainer of trl on a model of experts; see `test_trl_ranks.both`."""
    # trl asks for the router's loss where it is wanted, and not of the reference
    for runs in (preference_runs, test_trl, test_trl_rollouts):
        vars(runs)["llama"] = lambda: in_double(qwen(output_router_logits=False))
    in_double(mixtral())  # trl takes the function from there
    return test_trl_ranks.both(rank, world, folder, name, errors, args)


@pytest.mark.parametrize(
    ("name", "errors", "args"),
    [
        ("SFTTrainer", (2, 1), {"gradient_accumulation_steps": 2, "samples": 16}),
        ("DPOTrainer", (2, 1), LAST | FSDP2),
        ("GRPOTrainer", (1, 2), {"loss_type": "bnpo"}),
    ],
)
def test_a_trainer_of_trl_trains_and_logs_as_the_stock_one(
    name: str, errors: Any, args: dict[str, Any], tmp_path: Any
) -> None:
    args = args | {"router_aux_loss_coef": 0.5}
    found = values(run_ranks(of_trl, str(tmp_path), name, errors, args))
    assert [ooms for *_, ooms in found] == [*errors]
    assert max(weights for weights, *_ in found) < EXACT
    for _, (ours, stock), _ in found:
        steps = [[each for each in logs if each[0] != "step_time"] for logs in (ours, stock)]
        assert "aux_loss" in dict(steps[0])
        assert [name for name, _ in steps[0]] == [name for name, _ in steps[1]]
        assert [value for _, value in steps[0]] == pytest.approx(
            [value for _, value in steps[1]], rel=1e-6, abs=1e-9, nan_ok=True
        )


def ended(rank: int, world: int, folder: str) -> list[str]:
    """Return the errors of steps and evaluations, of which the last rank cannot make the first."""
    test_trl_ranks.in_double(rank, world, folder)
    found = []
    for training in (True, False):
        each = small(ours=True)
        each.eval_dataset = rows("some tokens", 12)
        act = each.train if training else each.evaluate
        if rank == world - 1:
            hook = first(each).register_forward_hook(Broken(training=training, gradients=False))
        found.append(caught(act))
        if rank == world - 1:
            hook.remove()
        found.append(caught(act))
    return found


def test_all_ranks_hear_of_one_that_cannot_find_its_experts_and_may_go_on(tmp_path: Any) -> None:
    others, failed = values(run_ranks(ended, str(tmp_path)))
    for heard, own in zip(others[::2], failed[::2], strict=True):
        assert own.startswith("MicroBatchFloorError"), own
        assert heard.startswith("PeerError: another rank could not finish this batch"), heard
        assert "rank 1: MicroBatchFloorError" in heard
    assert others[1::2] == failed[1::2] == ["no error"] * 2
