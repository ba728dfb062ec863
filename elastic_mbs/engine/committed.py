"""The pieces of one call that are in the gradients, and the result that they make up."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from elastic_mbs.batch.containers import Path
from elastic_mbs.engine.history import History
from elastic_mbs.engine.micro_batch import MicroBatch
from elastic_mbs.engine.result import StepResult


class Committed:
    """What has committed so far."""

    def __init__(self) -> None:
        self._pieces: list[MicroBatch] = []

    def add(self, micro: MicroBatch) -> None:
        """Keeps an attempt that has succeeded, for what the result needs of it: its range, its loss and its outputs. Its graph is let go of."""
        self._pieces.append(micro)
        micro._drop_graph()

    def clear(self) -> None:
        """Forgets everything: the batch is replayed from its start, or over. Whoever still holds an attempt holds nothing of it."""
        for piece in self._pieces:
            piece._loss = piece._stored = piece._callbacks = None
        self._pieces.clear()

    def __len__(self) -> int:
        """How many pieces."""
        return len(self._pieces)

    @property
    def samples(self) -> int:
        """How many samples."""
        return sum(piece.stop - piece.start for piece in self._pieces)

    def run_callbacks(self) -> None:
        """Runs what `on_commit` was given, in the batch's order."""
        waiting = [piece for piece in self._pieces if piece._callbacks]
        for piece in sorted(waiting, key=_START):
            for callback in piece._callbacks or ():
                callback()

    def result(self, size: int, history: History, skipped: Iterable[tuple[int, int]], apart: set[Path]) -> StepResult:
        """The result of the call, which ended at micro-batch `size` and left `skipped` out: nothing in them counts. `apart` is that of `join`."""
        partition, losses, stored = [], [], []
        for piece in sorted(self._pieces, key=_START):
            partition.append((piece.start, piece.stop))
            stored.append(piece._stored)
            if piece._loss is not None:
                losses.append(piece._loss)
        return StepResult(
            partition=tuple(partition),
            micro_batch_size=size,
            ooms=history.failures,
            replayed_samples=history.replayed_samples,
            skipped=tuple(sorted(skipped)),
            _losses=tuple(losses),
            _outputs=stored if any(stored) else [],
            _per_piece=apart,
        )


_START = attrgetter("start")
