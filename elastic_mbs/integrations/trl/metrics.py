"""The metrics that trl's trainers note in every forward: entropy, accuracy, rewards, tokens.

A batch has one entry of each, however it was split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isnan
from typing import Any

from elastic_mbs.integrations.exchange import Exchange
from elastic_mbs.integrations.trl import private

_NONE: Mapping[str, float] = {}
_JOIN = {"min": min, "max": max}


class Note:
    """The metrics of one piece: values by mode ("train" or "eval") and name, and tokens.

    The values weigh by `weights`, the piece's loss terms by kind. `counted` is False if the piece
    is of a rank whose samples are repeated ones, which trl leaves out of most metrics.
    """

    def __init__(
        self,
        values: dict[str, dict[str, float]],
        tokens: float,
        weights: Mapping[str, float],
        *,
        counted: bool = True,
    ) -> None:
        self.values, self.tokens, self.weights = values, tokens, weights
        self.counted = counted


def _of_all_ranks(notes: Sequence[Note], exchange: Exchange) -> list[Note]:
    mine = [(note.values, note.tokens, note.weights) for note in notes]
    return [
        Note(values, tokens, weights, counted=rank < exchange.counted)
        for rank, theirs in enumerate(exchange.all(mine))
        for values, tokens, weights in theirs
    ]


class BatchMetrics:
    """The metrics of a trainer at a batch's start, and the notes of its pieces.

    It does nothing for a trainer that keeps none.
    """

    def __init__(self, trainer: Any) -> None:
        self.kept = private.kind_of(type(trainer)) is not None
        self._trainer = trainer
        self._kinds = private.metrics_by_kind(trainer)
        self._counts = private.counts_tokens(trainer)
        self._metrics = private.metrics_of(trainer) if self.kept else {}
        self._before = {
            mode: {name: list(values) for name, values in named.items()}
            for mode, named in self._metrics.items()
        }
        self._tokens = private.tokens_of(trainer) if self.kept else 0

    def restore(self) -> None:
        """Put the metrics back to the batch's start."""
        for mode, named in self._metrics.items():
            named.clear()
            named.update({name: list(values) for name, values in self._before[mode].items()})
            private.set_tokens(self._trainer, self._tokens)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Put the metrics back to the batch's start where a block ends by an error."""
        try:
            yield
        except BaseException:
            self.restore()
            raise

    def note(self, weights: Mapping[str, float]) -> Note:
        """Return what the attempt has added."""
        new = {
            mode: {
                name: float(values[-1])  # a subclass may note a tensor
                for name, values in named.items()
                if name != "num_tokens" and values != self._before[mode].get(name)
            }
            for mode, named in self._metrics.items()
        }
        tokens = private.tokens_of(self._trainer) - self._tokens if self.kept else 0
        return Note(new, tokens, weights)

    def join(
        self, notes: Sequence[Note], exchange: Exchange, known: Mapping[str, float] = _NONE
    ) -> None:
        """Add one entry of each metric: the mean over the pieces, or their least or largest.

        Args:
            notes: of the pieces of this rank.
            exchange: the other ranks, which all come here.
            known: the values of metrics that are none of these.
        """
        self.restore()
        if self.kept:
            notes = _of_all_ranks(notes, exchange)
        for mode, named in self._metrics.items():
            noted = [note for note in notes if note.values[mode]]
            for name in dict.fromkeys(name for note in noted for name in note.values[mode]):
                there = [note for note in noted if self._has(note, name, mode)]
                value = known.get(name)
                if there:
                    named[name].append(self._joined(name, mode, there) if value is None else value)
            if private.has_margins(self._trainer) and noted:
                self._add_margins(mode, named)
            if noted and self._counts:
                tokens = self._tokens + sum(note.tokens for note in notes if note.counted)
                private.set_tokens(self._trainer, tokens)
                named["num_tokens"] = [tokens]

    def _has(self, note: Note, name: str, mode: str) -> bool:
        counted = note.counted or name.startswith(private.everywhere(self._trainer))
        return counted and name in note.values[mode]

    def _joined(self, name: str, mode: str, notes: Sequence[Note]) -> float:
        kind = self._kinds.get(name, "")
        values = [note.values[mode][name] for note in notes]
        if kind in _JOIN:  # a piece without a value has none: trl leaves those out, too
            return _JOIN[kind]([each for each in values if not isnan(each)] or values)
        weights = [note.weights[kind] for note in notes]
        total = sum(weights)
        summed = sum(value * each for value, each in zip(values, weights, strict=True) if each)
        return summed / total if total else 0.0

    def _add_margins(self, mode: str, named: dict[str, list[float]]) -> None:
        """Add the difference of two metrics: those of pieces are no part of it."""
        name, *parts = private.MARGINS
        named.pop(name, None)
        named.update({name: list(self._before[mode].get(name, []))})
        one, other = (named.get(part, []) for part in parts)
        if all(len(named.get(part, [])) > len(self._before[mode].get(part, [])) for part in parts):
            named[name].append(one[-1] - other[-1])
        elif not named[name]:
            del named[name]
