"""The pieces of one call that are in the gradients, and the result that they make up."""

from __future__ import annotations

from collections.abc import Iterable

from elastic_mbs.history import History
from elastic_mbs.micro_batch import MicroBatch
from elastic_mbs.result import StepResult


class Committed:
    """What has committed so far."""

    def __init__(self) -> None:
        self._pieces: list[MicroBatch] = []

    def add(self, micro: MicroBatch) -> None:
        """Keeps an attempt that has succeeded, for what the result needs of it: its range, its loss and its outputs. Its graph is let go of."""
        self._pieces.append(micro)
        micro._drop_graph()

    def clear(self) -> None:
        """Forgets everything: the batch is replayed from its start, or over."""
        for piece in self._pieces:
            piece._let_go()
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
        for piece in self._in_order():
            for callback in piece._callbacks or ():
                callback()

    def result(self, size: int, history: History, skipped: Iterable[tuple[int, int]]) -> StepResult:
        """The result of the whole call, which ended at micro-batch `size` and left `skipped` out because nothing in them counts."""
        done = self._in_order()
        stored = [piece._stored for piece in done]
        return StepResult(
            partition=tuple([(piece.start, piece.stop) for piece in done]),
            micro_batch_size=size,
            ooms=history.failures,
            replayed_samples=history.replayed_samples,
            skipped=tuple(sorted(skipped)),
            _losses=tuple([piece._loss for piece in done if piece._loss is not None]),
            _outputs=stored if any(stored) else [],
        )

    def _in_order(self) -> list[MicroBatch]:
        return sorted(self._pieces, key=lambda piece: piece.start)
