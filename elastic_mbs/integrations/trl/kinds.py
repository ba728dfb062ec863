"""The kind of a trainer: how its batches are read, and what of it is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from elastic_mbs.errors import UnsupportedError, UsageError
from elastic_mbs.integrations.rows import Rows
from elastic_mbs.integrations.trl import private
from elastic_mbs.integrations.trl.pairs import Pairs, PreferencePairs, check_preferences
from elastic_mbs.integrations.trl.rollouts import Completions, check_completions
from elastic_mbs.integrations.trl.unpaired import Unpaired, check_unpaired

_ROWS: dict[str, Callable[[Any], Rows]] = {
    "DPOTrainer": PreferencePairs,
    "RewardTrainer": Pairs,
    "KTOTrainer": Unpaired,
    "GRPOTrainer": Completions,
    "RLOOTrainer": Completions,
}
_CHECKS: dict[str, Callable[[Any], None]] = {
    "DPOTrainer": check_preferences,
    "KTOTrainer": check_unpaired,
    "GRPOTrainer": check_completions,
    "RLOOTrainer": check_completions,
}
_NAMES = dict.fromkeys(private.PAIRED, "pairs") | {"KTOTrainer": "texts"}


def rows_of(trainer: Any) -> Rows:
    """Return the way to read the batches of a trainer."""
    return _ROWS.get(private.kind_of(type(trainer)) or "", Rows)(trainer)


def check_kind(trainer: Any, options: Mapping[str, Any]) -> None:
    """Refuse losses, batches and options of a trainer of trl that cannot be cut.

    Raises:
        UnsupportedError: a loss compares the samples of a batch, or batches have pictures.
        UsageError: an option of the runtime does not go with the trainer.
    """
    kind = private.kind_of(type(trainer))
    if kind is None or kind not in _ROWS:
        return
    if "count" in options:
        raise UsageError(f"elastic={{'count': …}}: a {kind} tells by itself; leave it out")
    policy, unit = options.get("policy"), _NAMES.get(kind, "completions")
    by_length = "pieces" in options and kind not in private.PAIRED
    if by_length or (policy is not None and policy.max_tokens is not None):
        raise UsageError(
            f"{'pieces=' if by_length else 'max_tokens='} does not go with a {kind}, whose samples "
            f"have more than one text, or values beyond its end: say max_micro_batch_size=, in "
            f"{unit}"
        )
    if private.has_pictures(trainer):
        raise UnsupportedError(
            f"a {kind} on data with pictures is not supported: use it as it is, with a smaller "
            "per_device_train_batch_size"
        )
    if kind in _CHECKS:
        _CHECKS[kind](trainer)
