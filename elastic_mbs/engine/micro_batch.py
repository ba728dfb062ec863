"""One attempt at one piece of the batch, as the step function or the user's loop sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

from elastic_mbs.engine.call import Call
from elastic_mbs.engine.state import Attempt


class Owner(Protocol):
    """The call that a micro-batch belongs to."""

    @property
    def totals(self) -> Any:
        """The whole batch's counts."""

    def begin(self, attempt: Attempt) -> None:
        """Start the attempt."""

    def end(self, attempt: Attempt, error: BaseException | None) -> bool:
        """End the attempt; return whether the error is swallowed."""

    def backward(self, attempt: Attempt, value: Any) -> None:
        """Run backward on the loss in `value`."""

    def keep(self, attempt: Attempt, outputs: Any) -> None:
        """Keep the piece's outputs."""

    def check_inside(self, attempt: Attempt, what: str) -> None:
        """Raise if the attempt is over."""


class MicroBatch:
    """One attempt at one piece of the batch: a context manager around its forward and backward.

    Attributes:
        data: the piece, in the batch's own container type.
        start: its first sample in the batch, or in `StepResult.order` where samples are sorted.
        stop: one past its last.
    """

    __slots__ = ("_attempt", "_owner", "start", "stop")

    def __init__(self, owner: Owner, attempt: Attempt) -> None:
        self._owner = owner
        self._attempt = attempt
        self.start, self.stop = attempt.piece.start, attempt.piece.stop

    @property
    def data(self) -> Any:
        """The piece, in the batch's own container type; None once the attempt is over."""
        return self._attempt.data

    def __len__(self) -> int:
        """Samples in the piece."""
        return self.stop - self.start

    @property
    def total(self) -> Any:
        """The whole batch's counts, for a loss that normalises by itself (with `reduction="sum"`): a number, or a dict where losses have names."""
        return self._owner.totals

    def __enter__(self) -> Self:
        """Starts the attempt."""
        self._owner.begin(self._attempt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Ends the attempt: commits it, or swallows an out-of-memory error so that the loop can replay the piece."""
        return self._owner.end(self._attempt, error)

    def backward(self, value: Any) -> None:
        """Accumulates the gradient of this piece's loss, weighted by its share of the batch.

        Args:
            value: the loss as a scalar mean over the piece's counts (`reduction="sum"`: a sum); or
                `(loss, outputs)`, an object with `.loss`, a dict with "loss", or a dict of losses
                where `count` is a dict.

        Raises:
            LossError: there is no scalar loss with a graph in it.
        """
        self._owner.backward(self._attempt, value)

    def keep(self, outputs: Any) -> None:
        """Keeps the piece's outputs for the result, once; without it, `backward` keeps those that come with the loss."""
        self._owner.check_inside(self._attempt, "micro.keep(outputs)")
        self._owner.keep(self._attempt, outputs)

    def on_commit(self, fn: Callable[[], object]) -> None:
        """Runs `fn` once the whole batch is accumulated, in the batch's order, if this attempt is the one that counts.

        It waits for the batch because until then a piece can still be replayed. What `fn` refers to
        stays in memory until then, too.
        """
        self._owner.check_inside(self._attempt, "micro.on_commit(fn)")
        self._attempt.callbacks += (fn,)


def loop(call: Call, finish: Callable[[Call], object]) -> Iterator[MicroBatch]:
    """The loop that the user writes out; `finish` is called when the batch is done, by the end of the loop or by a `break` after the last piece."""
    try:
        yield from map(partial(MicroBatch, call), call)
    except GeneratorExit:  # left early: the next call, or the end of the `with` block, says so
        # an interrupt between the lines of the engine itself: nobody could say so inside a piece
        if call.inside:
            call.abort(call.left_early())
        raise
    except BaseException as error:
        call.abort(error)  # an interrupt between the lines of the engine itself
        raise
    finally:
        if call.state.result is not None:
            finish(call)
