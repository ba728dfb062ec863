"""The names in which trl's trainers keep state, and the facts about their losses and metrics.

Read in trl 1.16. tests/integrations/test_trl_private.py holds them against the installed version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from elastic_mbs.errors import UnsupportedError

SUPPORTED = (
    "SFTTrainer",
    "DPOTrainer",
    "RewardTrainer",
    "KTOTrainer",
    "GRPOTrainer",
    "RLOOTrainer",
)
PAIRED = ("DPOTrainer", "RewardTrainer")
GENERATING = ("GRPOTrainer", "RLOOTrainer")

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

UNPAIRED = frozenset({"kto", "apo_zero_unpaired"})  # losses of KTO
_KL = "_compute_kl_logps"  # its method for the log-probabilities of mismatched completions

# The method of a trainer that generates which returns log-probabilities, entropies and a router's
# loss. Where no gradient is wanted it is asked for the first alone.
LOG_PROBABILITIES = "_get_per_token_logps_and_entropies"

# Losses of GRPO by what they are: a mean over completions or over tokens, or a sum over the batch
# divided by a number that does not depend on the piece.
TOKENS, SAMPLES, SUM = "tokens", "", "sum"
AGGREGATIONS = {
    "grpo": SAMPLES,
    "sapo": SAMPLES,
    "dr_grpo": SAMPLES,
    "luspo": SAMPLES,
    "bnpo": TOKENS,
    "dapo": SUM,
    "cispo": SUM,
    "vespo": SUM,
}

# Metrics that are no mean over pairs or completions (of SFT: over labels), by what they are.
CHOSEN, REJECTED = "chosen", "rejected"  # tokens
WANTED, UNWANTED = "wanted", "unwanted"  # texts
METRICS: dict[str, dict[str, str]] = {
    "DPOTrainer": {
        "entropy": TOKENS,
        "logits/chosen": CHOSEN,
        "mean_token_accuracy": CHOSEN,
        "logits/rejected": REJECTED,
    },
    "KTOTrainer": {
        "entropy": TOKENS,
        "logits/chosen": CHOSEN,
        "logits/rejected": REJECTED,
        "rewards/chosen": WANTED,
        "logps/chosen": WANTED,
        "rewards/rejected": UNWANTED,
        "logps/rejected": UNWANTED,
    },
    "RewardTrainer": {"min_reward": "min", "max_reward": "max"},
    "GRPOTrainer": {
        "entropy": TOKENS,
        "kl": TOKENS,
        "clip_ratio/low_min": "min",
        "clip_ratio/high_max": "max",
    },
    "RLOOTrainer": {
        "entropy": TOKENS,
        "clip_ratio/low_min": "min",
        "clip_ratio/high_max": "max",
    },
}
# Metrics, by how their names begin, of all ranks in the last batch of the data, too. The others
# (`gather_for_metrics`) leave out ranks whose samples have been there before.
EVERYWHERE: dict[str, tuple[str, ...]] = {
    "DPOTrainer": ("rewards/", "logps/"),
    "RewardTrainer": ("min_reward", "mean_reward", "max_reward"),
    "GRPOTrainer": ("",),
    "RLOOTrainer": ("",),
}
ROUTER_LOSS = "aux_loss"  # the metric of the router's loss, which is none of its pieces
# A metric of KTO that is the difference of two others.
MARGINS = ("rewards/margins", "rewards/chosen", "rewards/rejected")
# Metrics of GRPO that are a mean over completions where a ratio is one per completion, and over
# tokens where it is one per token.
BY_RATIO = (
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "cispo_clip_ratio",
)


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


def metrics_by_kind(trainer: Any) -> dict[str, str]:
    """Return what metrics of a trainer are, by their names; the others are means over samples."""
    kind = kind_of(type(trainer))
    found = METRICS.get(kind or "", {})
    if kind == "GRPOTrainer" and trainer.importance_sampling_level == "token":
        return found | dict.fromkeys(BY_RATIO, TOKENS)
    return found


def everywhere(trainer: Any) -> tuple[str, ...]:
    """Return how the names of metrics begin that count all ranks at the end of the data, too."""
    return EVERYWHERE.get(kind_of(type(trainer)) or "", ())


def counts_tokens(trainer: Any) -> bool:
    """Return whether a trainer counts tokens inside its forward."""
    return kind_of(type(trainer)) not in (None, *GENERATING)


def aggregation_of(trainer: Any) -> str:
    """Return what the loss of a trainer that generates is: `SAMPLES`, `TOKENS` or `SUM`.

    Raises:
        UnsupportedError: a loss that is not known.
    """
    if kind_of(type(trainer)) == "RLOOTrainer":
        return SAMPLES
    loss = trainer.loss_type
    if loss not in AGGREGATIONS:
        raise UnsupportedError(
            f"loss_type={loss!r} is not known, so it cannot be told what it is a mean over: use "
            "GRPOTrainer as it is, with a smaller per_device_train_batch_size"
        )
    return AGGREGATIONS[loss]


def comparing(trainer: Any) -> list[str]:
    """Return the options of a trainer that generates whose terms compare the completions."""
    found = []
    if getattr(trainer, "top_entropy_quantile", 1.0) < 1:
        found.append("top_entropy_quantile below 1 compares the tokens of a batch")
    if getattr(trainer, "_entropy_bonus_enabled", False):
        found.append("entropy_coef adds a mean over the tokens of a batch, of its own weight")
    return found


def divides_by_steps(trainer: Any) -> bool:
    """Return whether `compute_loss` divides by the batches that are accumulated."""
    return bool(trainer.loss_is_scaled_for_ga)


def has_router_loss(trainer: Any) -> bool:
    """Return whether a trainer adds the loss of a router."""
    return bool(getattr(trainer, "aux_loss_enabled", False))


def has_margins(trainer: Any) -> bool:
    """Return whether a trainer notes the difference of two metrics as a third (`MARGINS`)."""
    return kind_of(type(trainer)) == "KTOTrainer"


def unpaired_loss(trainer: Any) -> str:
    """Return the loss of a KTOTrainer."""
    return str(trainer.loss_type)


def estimates_kl(trainer: Any) -> bool:
    """Return whether the loss of a KTOTrainer needs an estimate of the KL divergence."""
    return bool(trainer.calculate_KL)


def kl_log_probabilities(trainer: Any, model: Any, batch: Any) -> Any:
    """Return the log-probabilities that a model gives mismatched completions."""
    return getattr(trainer, _KL)(model, batch)


def reference_of(trainer: Any) -> Any:
    """Return the module with which a trainer compares its model, or None."""
    return getattr(trainer, "ref_model", None)


def reference_log_probabilities(trainer: Any, batch: Any) -> Any:
    """Return the log-probabilities that the reference gives mismatched completions."""
    if trainer.precompute_ref_logps:
        return batch["ref_KL_logps"]
    reference = reference_of(trainer)
    if reference is not None:
        return kl_log_probabilities(trainer, reference, batch)
    from trl.trainer.utils import use_adapter  # only a trainer of trl comes here

    # the model with the adapter as it began, where trl keeps that one, or without any
    model = trainer.accelerator.unwrap_model(trainer.model)
    with use_adapter(model, "ref" if "ref" in model.peft_config else None):
        return kl_log_probabilities(trainer, trainer.model, batch)


@contextmanager
def replaced_kl(trainer: Any, log_probabilities: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Replace the log-probabilities of mismatched completions in the trainer's loss."""
    own = {_KL: vars(trainer)[_KL]} if _KL in vars(trainer) else {}
    vars(trainer)[_KL] = log_probabilities
    try:
        yield
    finally:
        del vars(trainer)[_KL]
        vars(trainer).update(own)
