"""trl's trainers on two ranks train and count their metrics as the stock ones in DDP."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import transformers
import trl
from torch import Tensor, nn
from trl.kernels import chunked_logprob

from elastic_mbs.integrations.transformers import elastic_trainer
from stress.ranks.job import run_ranks, values
from tests.helpers.ddp import caught
from tests.integrations import preference_runs, test_trl, test_trl_rollouts
from tests.integrations.preference_runs import noted
from tests.integrations.rank_runs import as_torchrun, trainers_at_hand, worst

pytestmark = [pytest.mark.no_oom_injection, pytest.mark.usefixtures("trainers_at_hand")]
__all__ = ["trainers_at_hand"]

EXACT = 1e-10
# the last batch of the data has one sample, and is filled up with those of the first
LAST = {"samples": 9}
BUILD: dict[str, Any] = {
    "SFTTrainer": test_trl.build,
    "GRPOTrainer": test_trl_rollouts.build,
    "RLOOTrainer": test_trl_rollouts.build,
}


class Failing:
    """A hook that runs out of memory in training: not in the comparison before it."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(self, *args: Any) -> None:
        if torch.is_grad_enabled() and self.left:
            self.left -= 1
            raise torch.OutOfMemoryError("injected: out of memory in forward")


def in_double(rank: int, world: int, folder: str) -> None:
    """Prepare a rank for a comparison in float64."""
    as_torchrun(rank, world)
    os.chdir(folder)
    torch.set_default_dtype(torch.float64)
    Tensor.float = Tensor.double  # type: ignore[method-assign]  # losses begin with logits.float()
    chunked_logprob.torch = preference_runs.InDouble()
    transformers.logging.set_verbosity_error()


def small(name: str, *, ours: bool, **args: Any) -> Any:
    """Return a trainer of trl with batches of four, stock or with the runtime in it."""
    kind, build = getattr(trl, name), BUILD.get(name, preference_runs.build)
    plain = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "ddp_find_unused_parameters": True,
        "gradient_checkpointing": False,
    }
    return build(elastic_trainer(kind) if ours else kind, **plain | args)


def both(rank: int, world: int, folder: str, name: str, errors: Any, args: Any) -> Any:
    """Return how far weights are apart, the metrics of both runs, and the failures survived."""
    in_double(rank, world, folder)
    runs = [small(name, ours=ours, **args) for ours in (True, False)]
    next(runs[0].model.children()).register_forward_hook(Failing(errors[rank]))
    for trainer in runs:
        trainer.train()
        trainer.evaluate()
    weights = [[p.detach() for p in each.model.parameters()] for each in runs]
    return worst(*weights), [noted(each) for each in runs], runs[0].elastic.stats.ooms


@pytest.mark.parametrize(
    ("name", "errors", "args"),
    [
        ("SFTTrainer", (0, 2), LAST),
        ("SFTTrainer", (2, 1), {"samples": 16, "gradient_accumulation_steps": 2}),
        ("SFTTrainer", (0, 2), {"packing": True, "max_length": 8, "samples": 24}),
        ("DPOTrainer", (0, 2), LAST),
        ("DPOTrainer", (2, 1), {"loss_type": ["sigmoid", "sft"], "gradient_accumulation_steps": 2}),
        ("RewardTrainer", (2, 1), LAST),
        ("KTOTrainer", (2, 1), LAST | {"beta": 0.5}),
        ("GRPOTrainer", (1, 2), {"loss_type": "bnpo", "num_iterations": 2}),
        ("GRPOTrainer", (1, 2), {"loss_type": "dapo", "gradient_accumulation_steps": 2}),
        ("RLOOTrainer", (1, 2), {"gradient_accumulation_steps": 2}),
    ],
)
def test_a_trainer_of_trl_on_two_ranks_trains_and_logs_as_the_stock_one(
    name: str, errors: Any, args: dict[str, Any], tmp_path: Any
) -> None:
    found = values(run_ranks(both, str(tmp_path), name, errors, args))
    assert [ooms for *_, ooms in found] == [*errors]
    assert max(weights for weights, *_ in found) < EXACT
    for _, (ours, stock), _ in found:
        steps = [[each for each in logs if each[0] != "step_time"] for logs in (ours, stock)]
        assert [name for name, _ in steps[0]] == [name for name, _ in steps[1]]
        assert [value for _, value in steps[0]] == pytest.approx(
            [value for _, value in steps[1]],
            rel=1e-6,  # losses are added up in float32
            abs=1e-9,
            nan_ok=True,
        )


class Broken:
    """A hook that never has enough memory in a mode of the model."""

    def __init__(self, *, training: bool, gradients: bool) -> None:
        self.mode = training, gradients

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if (module.training, torch.is_grad_enabled()) == self.mode:
            raise torch.OutOfMemoryError("injected: out of memory in forward")


def ended(rank: int, world: int, folder: str) -> list[str]:
    """Return the errors of a training that ends on the last rank, an evaluation, and a third."""
    in_double(rank, world, folder)
    found = []
    trainer = small("SFTTrainer", ours=True, **LAST)
    preferring = small("KTOTrainer", ours=True, **LAST)
    for each, act, training, gradients in (
        (trainer, "train", True, True),
        (trainer, "evaluate", False, False),
        (preferring, "train", True, False),  # in the estimate of its KL divergence
    ):
        if rank == world - 1:
            hook = next(each.model.children()).register_forward_hook(
                Broken(training=training, gradients=gradients)
            )
        found.append(caught(getattr(each, act)))
        if rank == world - 1:
            hook.remove()
        found.append(caught(getattr(each, act)))
    return found


def test_all_ranks_hear_of_an_error_and_may_go_on(tmp_path: Any) -> None:
    others, failed = values(run_ranks(ended, str(tmp_path)))
    for heard, own in zip(others[::2], failed[::2], strict=True):
        assert own.startswith("MicroBatchFloorError"), own
        assert heard.startswith("PeerError: another rank could not finish this batch"), heard
        assert "rank 1: MicroBatchFloorError" in heard
    assert others[1::2] == failed[1::2] == ["no error"] * 3
