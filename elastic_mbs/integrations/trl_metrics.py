"""The metrics that `trl.SFTTrainer` notes in every forward: entropy, accuracy, tokens.

A batch has one entry of each, however it was split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Note:
    """The metrics of one piece: values by mode ("train" or "eval") and name, and tokens.

    The values weigh by `count`, the piece's loss terms.
    """

    def __init__(self, values: dict[str, dict[str, float]], tokens: float, count: float) -> None:
        self.values, self.tokens, self.count = values, tokens, count


class BatchMetrics:
    """The metrics of a trainer at a batch's start, and the notes of its pieces.

    It does nothing for a trainer that keeps none.
    """

    def __init__(self, trainer: Any) -> None:
        self.kept = any(
            base.__name__ == "SFTTrainer" and base.__module__.startswith("trl.")
            for base in type(trainer).__mro__
        )
        self._state = vars(trainer)
        self._metrics = self._state["_metrics"] if self.kept else {}
        self._before = {
            mode: {name: list(values) for name, values in named.items()}
            for mode, named in self._metrics.items()
        }
        self._tokens = self._state.get("_total_train_tokens", 0)

    def restore(self) -> None:
        """Put the metrics back to the batch's start."""
        for mode, named in self._metrics.items():
            named.clear()
            named.update({name: list(values) for name, values in self._before[mode].items()})
            self._state["_total_train_tokens"] = self._tokens

    def note(self, count: Any) -> Note:
        """Return what the attempt has added."""
        new = {
            mode: {
                name: values[-1]
                for name, values in named.items()
                if name != "num_tokens" and values != self._before[mode].get(name)
            }
            for mode, named in self._metrics.items()
        }
        return Note(
            new,
            self._state.get("_total_train_tokens", 0) - self._tokens,
            float(count) if self.kept else 0.0,
        )

    def join(self, notes: Sequence[Note]) -> None:
        """Add the means of the pieces' values as one entry each."""
        self.restore()
        for mode, named in self._metrics.items():
            noted = [note for note in notes if note.values[mode] and note.count]
            for name in noted[0].values[mode] if noted else ():
                named[name].append(
                    sum(note.values[mode][name] * note.count for note in noted)
                    / sum(note.count for note in noted)
                )
            if noted:
                self._state["_total_train_tokens"] = self._tokens + sum(
                    note.tokens for note in notes
                )
                named["num_tokens"] = [self._state["_total_train_tokens"]]
