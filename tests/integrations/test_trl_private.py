"""The private names of trl that elastic_mbs uses are there, with the meaning that it knows."""

import inspect
import re
from typing import Any

import pytest
import trl

from elastic_mbs.integrations.trainer.ranks import QUESTIONS
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
        private.ROUTER_LOSS,
        "num_tokens",  # a total
    },
    "RewardTrainer": {"mean_reward", "accuracy", "margin", "num_tokens"},
    "KTOTrainer": {"kl", "rewards/margins", private.ROUTER_LOSS, "num_tokens"},
}

# What goes through `gather`, and the metrics that it is for.
GATHERED = {
    "DPOTrainer": (
        {
            "chosen_rewards",
            "rejected_rewards",
            "reward_accuracies",
            "margins",
            "chosen_logps",
            "rejected_logps",
        },
        {
            "rewards/chosen",
            "rewards/rejected",
            "rewards/accuracies",
            "rewards/margins",
            "logps/chosen",
            "logps/rejected",
        },
    ),
    "RewardTrainer": ({"outputs.logits"}, {"min_reward", "mean_reward", "max_reward"}),
}


@pytest.mark.parametrize("name", private.SUPPORTED)
def test_metrics_lie_where_they_are_looked_for(name: str) -> None:
    source = inspect.getsource(getattr(trl, name))
    assert 'self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}' in source, SEE
    if name in private.GENERATING:
        return  # they count tokens as they generate
    assert "self._total_train_tokens +=" in source, SEE
    assert 'self._metrics[mode]["num_tokens"] = [self._total_train_tokens]' in source, SEE


def loss_of(name: str) -> str:
    """Return the source of a trainer's loss."""
    trainer = getattr(trl, name)
    parts = [getattr(trainer, each, None) for each in ("compute_loss", "_compute_loss")]
    return "".join(inspect.getsource(each) for each in parts if each is not None)


@pytest.mark.parametrize("name", private.SUPPORTED)
def test_a_loss_asks_other_ranks_in_no_way_but_those_that_are_answered(name: str) -> None:
    source = loss_of(name)
    asked = set(re.findall(r"(?<!torch\.)\b([\w.]*(?:gather|reduce|broadcast)\w*)\(", source))
    assert set() < asked <= {f"self.accelerator.{each}" for each in QUESTIONS}, SEE
    assert not re.search(r"\bdist\.|distributed\.|wait_for_everyone|main_process", source), SEE


@pytest.mark.parametrize("name", private.SUPPORTED)
def test_metrics_of_all_ranks_are_known_from_those_of_ranks_with_new_samples(name: str) -> None:
    """Those of all come by `gather` and `reduce`, the others by `gather_for_metrics`."""
    source, beginnings = loss_of(name), private.EVERYWHERE.get(name, ())
    every = set(re.findall(r"accelerator\.(?:gather|reduce)\(\s*([\w.]+)", source))
    if name in private.GENERATING:
        assert set(re.findall(r"gather_for_metrics\((\w+)", source)) == {"aux_loss"}, SEE
        assert beginnings == ("",)
        return
    noted = re.findall(r'self\._metrics\[mode\]\["([^"]+)"\]', source)
    names = {each for each in noted if each.startswith(beginnings)}
    assert (every, names) == GATHERED.get(name, (set(), set())), SEE


@pytest.mark.parametrize("name", MEANS_OVER_PAIRS)
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


def test_the_loss_of_kto_asks_for_the_log_probabilities_that_are_replaced() -> None:
    source = inspect.getsource(trl.KTOTrainer._compute_loss)
    model, *reference = re.findall(r"(\w+) = self\._compute_kl_logps\(([\w.]+), batch\)", source)
    assert model == ("KL_logps", "model"), SEE  # first of all
    assert {name for name, _ in reference} == {"ref_KL_logps"}, SEE
    assert 'adapter_name="ref" if "ref" in ref_model_unwrapped.peft_config else None' in source, SEE
    assert "kl = (KL_logps - ref_KL_logps).mean().detach()" in source, SEE
    assert "gather_for_metrics(kl).mean().clamp(min=0)" in source, SEE
    assert "loss = losses.nanmean()" in source, SEE
    assert set(re.findall(r'self\.loss_type == "([^"]+)"', source)) == private.UNPAIRED, SEE
    kept = set(re.findall(r"self\.(\w+)(?:\[[^]]*\])* (?:\+?=) ", source))
    assert kept == {"_metrics", "_total_train_tokens"}, SEE
    _, one, other = private.MARGINS
    assert f'self._metrics[mode]["{one}"][-1] - self._metrics[mode]["{other}"][-1]' in source, SEE


GENERATED_MEANS = {
    "GRPOTrainer": {
        private.ROUTER_LOSS,
        "policy_loss",  # beside an entropy bonus, which is refused
        "entropy_coef",
        "vespo/phi_seq_mean",  # one for each completion
    },
    "RLOOTrainer": {
        private.ROUTER_LOSS,
        "clip_ratio/low_mean",
        "clip_ratio/high_mean",
        "clip_ratio/region_mean",
    },
}


@pytest.mark.parametrize("name", private.GENERATING)
def test_each_metric_of_a_loss_over_completions_is_known(name: str) -> None:
    source = inspect.getsource(getattr(trl, name)._compute_loss)
    noted = set(re.findall(r'self\._metrics\[mode\]\["([^"]+)"\]', source))
    by_ratio = set(private.BY_RATIO) if name == "GRPOTrainer" else set()
    assert noted == GENERATED_MEANS[name] | set(private.METRICS[name]) | by_ratio, SEE


@pytest.mark.parametrize("name", private.GENERATING)
def test_a_loss_over_completions_keeps_nothing_but_metrics(name: str) -> None:
    trainer = getattr(trl, name)
    kept = set(
        re.findall(r"self\.(\w+)(?:\[[^]]*\])* (?:\+?=) ", inspect.getsource(trainer._compute_loss))
    )
    adaptive = {"_entropy_window_stats", "entropy_coef", "_last_world_entropy"}  # is refused
    assert kept - adaptive == set(), SEE
    # what a step keeps is written around the loss, once a batch
    step = inspect.getsource(trainer.training_step)
    assert "output = super().training_step(model, inputs, num_items_in_batch)" in step, SEE
    assert "self._step += 1" in step, SEE
    assert "self._buffered_inputs[self._step %" in inspect.getsource(trainer._prepare_inputs), SEE
    assert list(inspect.signature(trainer.compute_loss).parameters)[1:3] == ["model", "inputs"], SEE


def test_each_loss_of_grpo_is_known_for_what_it_is_a_mean_over() -> None:
    source = inspect.getsource(trl.GRPOTrainer._compute_loss)
    losses = set(re.findall(r'loss_type == "([^"]+)"', source))
    losses |= {
        name
        for names in re.findall(r"loss_type in \[([^]]+)\]", source)
        for name in re.findall(r'"([^"]+)"', names)
    }
    assert losses == set(private.AGGREGATIONS), SEE
    assert trl.GRPOTrainer.loss_is_scaled_for_ga is True, SEE
    assert trl.RLOOTrainer.loss_is_scaled_for_ga is False, SEE


@pytest.mark.parametrize("name", private.GENERATING)
def test_log_probabilities_come_from_where_they_are_asked_for(name: str) -> None:
    trainer = getattr(trl, name)
    parameters = list(inspect.signature(getattr(trainer, private.LOG_PROBABILITIES)).parameters)
    assert parameters[1:6] == [
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
    ], SEE
    source = inspect.getsource(trainer)
    outside = re.findall(r"(\w+), (\w+), (\w+) = self\._get_per_token_logps_and_entropies", source)
    assert {
        rest for first, *rest in map(tuple, outside) if first != "per_token_logps" for rest in rest
    } == {"_"}, SEE


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
