"""The names in which trl's trainers keep state, and the facts about their losses and metrics.

Read in trl 1.16. tests/integrations/trl/test_private.py holds them against the installed version.
"""

from __future__ import annotations

from typing import Any

SUPPORTED = ("SFTTrainer", "DPOTrainer", "RewardTrainer")
PAIRED = ("DPOTrainer", "RewardTrainer")

# Losses of DPO by what they are a mean over.
BY_PAIR = frozenset(
    {
        "sigmoid",
        "hinge",
        "ipo",
        "exo_pair",
        "nca_pair",
        "robust",
        "bco_pair",
        "sppo_hard",
        "apo_zero",
        "apo_down",
        "discopop",
        "sigmoid_norm",
    }
)
BY_TOKEN = "sft"  # a mean over the tokens of the chosen completions
SORTING = frozenset({"aot", "aot_unpaired"})  # they compare the pairs of a batch

# Metrics that are no mean over pairs (of SFT: over labels), by what they are.
TOKENS, CHOSEN, REJECTED = "tokens", "chosen", "rejected"
METRICS: dict[str, dict[str, str]] = {
    "DPOTrainer": {
        "entropy": TOKENS,
        "logits/chosen": CHOSEN,
        "mean_token_accuracy": CHOSEN,
        "logits/rejected": REJECTED,
    },
    "RewardTrainer": {"min_reward": "min", "max_reward": "max"},
}


def kind_of(cls: type) -> str | None:
    """Return which of the supported trainers a class is or extends; None for any other."""
    return next(
        (
            base.__name__
            for base in cls.__mro__
            if base.__name__ in SUPPORTED and base.__module__.partition(".")[0] == "trl"
        ),
        None,
    )


def metrics_of(trainer: Any) -> dict[str, dict[str, list[float]]]:
    """Return the lists of metrics, by mode ("train" or "eval") and name."""
    found: dict[str, dict[str, list[float]]] = vars(trainer)["_metrics"]
    return found


def tokens_of(trainer: Any) -> float:
    """Return the number of tokens trained on so far."""
    found: float = vars(trainer).get("_total_train_tokens", 0)
    return found


def set_tokens(trainer: Any, tokens: float) -> None:
    """Set the number of tokens trained on so far."""
    vars(trainer)["_total_train_tokens"] = tokens


def losses_of(trainer: Any) -> list[tuple[str, float]]:
    """Return the losses of a DPOTrainer, with their weights."""
    return list(zip(trainer.loss_types, trainer.loss_weights, strict=True))


def set_losses(trainer: Any, losses: list[tuple[str, float]]) -> None:
    """Set the losses of a DPOTrainer, with their weights."""
    trainer.loss_types = [name for name, _ in losses]
    trainer.loss_weights = [weight for _, weight in losses]


def weighs_pairs(trainer: Any) -> bool:
    """Return whether a DPOTrainer weighs each pair by its likelihood (WPO)."""
    return bool(trainer.use_weighting)


def has_pictures(trainer: Any) -> bool:
    """Return whether the batches of a trainer have pictures."""
    return bool(getattr(trainer, "_is_vision_dataset", False))
