"""One attempt at one piece of the batch, as the step function or the user's loop sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch.autograd.graph import Node

from elastic_mbs.batch.schedule import Range
from elastic_mbs.engine.result import StoredOutput
from elastic_mbs.rollback.random_streams import StreamState

Totals = float | int | Mapping[str, float | int]


class Engine(Protocol):
    """What an attempt needs from the call that it belongs to."""

    @property
    def totals(self) -> Totals:
        """The batch's counts."""

    def enter(self, micro: MicroBatch) -> None:
        """The attempt begins."""

    def leave(self, micro: MicroBatch, error: BaseException | None) -> bool:
        """The attempt ends; returns whether `error` was out-of-memory and will be recovered from."""

    def backward(self, micro: MicroBatch, value: Any) -> None:
        """Weighs the loss and runs backward."""

    def store(self, micro: MicroBatch, outputs: Any) -> None:
        """Keeps the outputs for the result."""


class MicroBatch:
    """One attempt at one piece of the batch.

    Attributes:
        data: the piece, in the batch's own container type.
        start: its first sample in the batch.
        stop: one past its last.
    """

    # What an attempt begins with. One is made for every piece, so these are set only when they change.
    _phase = "load"
    _weighed: torch.Tensor | None = None
    _leaves: tuple[torch.Tensor, ...] | None = None
    _custom: frozenset[str] = frozenset()
    _losses: tuple[torch.Tensor, ...] = ()
    _loss: torch.Tensor | None = None
    _stored: StoredOutput | None = None
    _callbacks: list[Callable[[], object]] | None = None

    def __init__(self, engine: Engine, piece: Range, streams: StreamState | None, data: Any = None) -> None:
        self.data = data
        self.start, self.stop = piece.start, piece.stop
        self._engine = engine
        self._piece = piece
        self._streams = streams

    def __len__(self) -> int:
        """Samples in the piece."""
        return self.stop - self.start

    @property
    def total(self) -> Any:
        """The whole batch's counts, for a loss that normalises by itself (with `reduction="sum"`): a number, or a dict where losses have names."""
        return self._engine.totals

    def __enter__(self) -> Self:
        """Starts the attempt."""
        self._engine.enter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        """Ends the attempt: commits it, or swallows an out-of-memory error so that the loop can replay the piece."""
        return self._engine.leave(self, error)

    def backward(self, value: Any) -> None:
        """Accumulates the gradient of this piece's loss, weighted by its share of the batch.

        Args:
            value: the loss as a scalar mean over the piece's counts (`reduction="sum"`: a sum); or `(loss, outputs)`, an object with `.loss`, a dict
                with "loss", or a dict of losses where `count` is a dict.

        Raises:
            LossError: there is no scalar loss with a graph in it.
        """
        self._engine.backward(self, value)

    def keep(self, outputs: Any) -> None:
        """Keeps the piece's outputs for the result; `backward` does so by itself with what came beside the loss."""
        self._engine.store(self, outputs)

    def on_commit(self, fn: Callable[[], object]) -> None:
        """Runs `fn` once the whole batch is accumulated, in the batch's order, if this attempt is the one that counts.

        It waits for the batch because until then a piece can still be replayed. What `fn` refers to stays in memory until then, too.
        """
        if self._callbacks is None:
            self._callbacks = []
        self._callbacks.append(fn)

    @property
    def _root(self) -> Node | None:
        """Where the attempt's graph begins. Asked for when it is needed: to wrap a node for Python is not free."""
        return None if self._weighed is None else self._weighed.grad_fn

    def _drop_graph(self) -> None:
        """Drops what keeps the attempt's tensors alive, but for its loss and outputs."""
        self.data = self._weighed = self._leaves = None
        self._losses = ()

    def _let_go(self) -> None:
        """Drops everything: whoever still holds this attempt holds nothing of it."""
        self._drop_graph()
        self._loss = self._stored = self._callbacks = None
