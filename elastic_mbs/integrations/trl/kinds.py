"""The kind of a trainer: how its batches are read, and what of it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_mbs.integrations.trainer_rows import Rows
from elastic_mbs.integrations.trl import private
from elastic_mbs.integrations.trl.pairs import Pairs, PreferencePairs, check_pairs
from elastic_mbs.integrations.trl.rollouts import Completions, check_completions


def rows_of(trainer: Any) -> Rows:
    """Return the way to read the batches of a trainer."""
    kind = private.kind_of(type(trainer))
    if kind == "DPOTrainer":
        return PreferencePairs(trainer)
    if kind in private.GENERATING:
        return Completions(trainer)
    return Pairs() if kind in private.PAIRED else Rows()


def check_kind(trainer: Any, options: Mapping[str, Any]) -> None:
    """Refuse losses, batches and options of a trainer of trl that cannot be cut.

    Raises:
        UnsupportedError: a loss compares the samples of a batch, or batches have pictures.
        UsageError: an option of the runtime says what follows from the trainer.
    """
    check_pairs(trainer, options)
    check_completions(trainer, options)
