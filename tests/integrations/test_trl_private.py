"""The private names of trl that elastic_mbs uses are there, with the meaning that it knows."""

import inspect
import re
from typing import Any

import pytest
import trl

from elastic_mbs.integrations.trl import private
from tests.integrations.preference_runs import build
from tests.integrations.trainer_runs import MARKS

pytestmark = MARKS
SEE = "see elastic_mbs/integrations/trl/private.py"
MEANS_OVER_PAIRS = {
    "DPOTrainer": {
        "rewards/chosen",
        "rewards/rejected",
        "rewards/accuracies",
        "rewards/margins",
        "logps/chosen",
        "logps/rejected",
        "aux_loss",  # of a router, which is refused
        "num_tokens",  # a total
    },
    "RewardTrainer": {"mean_reward", "accuracy", "margin", "num_tokens"},
}


@pytest.mark.parametrize("name", private.SUPPORTED)
def test_metrics_lie_where_they_are_looked_for(name: str) -> None:
    source = inspect.getsource(getattr(trl, name))
    assert 'self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}' in source, SEE
    assert "self._total_train_tokens +=" in source, SEE
    assert 'self._metrics[mode]["num_tokens"] = [self._total_train_tokens]' in source, SEE


@pytest.mark.parametrize("name", private.PAIRED)
def test_each_metric_is_known_for_what_it_is_a_mean_over(name: str) -> None:
    source = inspect.getsource(getattr(trl, name))
    noted = set(re.findall(r'self\._metrics\[mode\]\["([^"]+)"\]', source))
    assert noted == MEANS_OVER_PAIRS[name] | set(private.METRICS[name]), SEE


def test_each_loss_of_dpo_is_known_for_what_it_is_a_mean_over() -> None:
    source = inspect.getsource(trl.DPOTrainer)
    losses = set(re.findall(r'loss_type == "([^"]+)"', source))
    assert losses == private.BY_PAIR | private.SORTING | {private.BY_TOKEN}, SEE
    assert "loss += per_sequence_loss.mean() * loss_weight" in source, SEE
    assert "zip(self.loss_types, self.loss_weights, strict=True)" in source, SEE
    # no loss keeps anything for the next batch, but metrics
    kept = set(
        re.findall(
            r"self\.(\w+)(?:\[[^]]*\])* (?:\+?=) ", source[source.index("def _compute_loss") :]
        )
    )
    assert kept == {"_metrics", "_total_train_tokens"}, SEE


def test_no_step_of_a_reward_trainer_keeps_anything_but_metrics() -> None:
    source = inspect.getsource(trl.RewardTrainer.compute_loss)
    kept = set(re.findall(r"self\.(\w+)(?:\[[^]]*\])* (?:\+?=) ", source))
    assert kept == {"_metrics", "_total_train_tokens"}, SEE


def test_the_names_of_a_trainer_are_those_that_are_read_and_set(in_double: Any) -> None:
    dpo = build(trl.DPOTrainer, loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5])
    assert private.kind_of(type(dpo)) == "DPOTrainer"
    assert private.losses_of(dpo) == [("sigmoid", 1.0), ("sft", 0.5)]
    private.set_losses(dpo, [("hinge", 2.0)])
    assert (dpo.loss_types, dpo.loss_weights) == (["hinge"], [2.0])
    assert private.weighs_pairs(dpo) is False
    assert private.has_pictures(dpo) is False
    assert "_is_vision_dataset" in vars(dpo), SEE
    assert private.tokens_of(dpo) == 0
    private.set_tokens(dpo, 7)
    assert vars(dpo)["_total_train_tokens"] == 7
    assert set(private.metrics_of(dpo)) == {"train", "eval"}
