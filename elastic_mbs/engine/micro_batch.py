"""An attempt at a piece of the batch, as the step function or the user's loop sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

from elastic_mbs.engine.attempt import Attempt
from elastic_mbs.engine.call import Call


class Owner(Protocol):
    """The call that a micro-batch belongs to."""

    @property
    def totals(self) -> Any:
        """The counts of the batch."""
        ...

    def begin(self, attempt: Attempt) -> None:
        """Start an attempt."""
        ...

    def backward(self, attempt: Attempt, value: Any) -> None:
        """Run backward of the loss of an attempt."""
        ...

    def keep(self, attempt: Attempt, outputs: Any) -> None:
        """Keep the outputs of an attempt."""
        ...

    def check_inside(self, attempt: Attempt, what: str) -> None:
        """Refuse a value given to an attempt that does not run."""
        ...

    def end(self, attempt: Attempt, error: BaseException | None) -> bool:
        """End an attempt; return whether the error is swallowed."""
        ...


class MicroBatch:
    """An attempt at a piece of the batch: a context manager around its forward and backward.

    Attributes:
        start: its first sample in the batch, or in `StepResult.order` where samples are sorted.
        stop: one past its last.
    """

    __slots__ = ("_attempt", "_owner", "start", "stop")

    def __init__(self, owner: Owner, attempt: Attempt) -> None:
        self._owner = owner
        self._attempt = attempt
        self.start = attempt.piece.start
        self.stop = attempt.piece.stop

    @property
    def data(self) -> Any:
        """The piece, in the batch's own container type; None once the attempt is over."""
        return self._attempt.data

    def __len__(self) -> int:
        """Return the number of samples in the piece."""
        return self.stop - self.start

    @property
    def total(self) -> Any:
        """The whole batch's counts: a number, or a dict where losses have names.

        For a loss that normalises by itself (with `reduction="sum"`).
        """
        return self._owner.totals

    def __enter__(self) -> Self:
        """Start the attempt."""
        self._owner.begin(self._attempt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Commit the attempt, or swallow an out-of-memory error: the loop replays the piece."""
        return self._owner.end(self._attempt, error)

    def backward(self, value: Any) -> None:
        """Accumulate the gradient of this piece's loss, weighted by its share of the batch.

        Args:
            value: the loss as a scalar mean over the piece's counts (`reduction="sum"`: a sum); or
                `(loss, outputs)`, an object with `.loss`, a dict with "loss", or a dict of losses
                where `count` is a dict. A mean over no count at all is 0 or NaN.

        Raises:
            LossError: there is no scalar loss with a graph in it.
        """
        self._owner.backward(self._attempt, value)

    def keep(self, outputs: Any) -> None:
        """Keep the piece's outputs for the result, once.

        Without it, `backward` keeps the outputs that come with the loss.
        """
        self._owner.check_inside(self._attempt, "micro.keep(outputs)")
        self._owner.keep(self._attempt, outputs)

    def on_commit(self, fn: Callable[[], object]) -> None:
        """Run `fn` once the whole batch is accumulated, if this attempt is the one that counts.

        Until then a piece can still be replayed. The functions run in the batch's order. They keep
        everything that they refer to in memory until then.
        """
        self._owner.check_inside(self._attempt, "micro.on_commit(fn)")
        self._attempt.on_commit(fn)


def loop(call: Call, finish: Callable[[Call], object]) -> Iterator[MicroBatch]:
    """Yield the micro-batches of the loop that the user writes out.

    Args:
        call: the call over the batch.
        finish: is called when the batch is done, by the end of the loop or by a `break` after the
            last piece.
    """
    try:
        yield from map(partial(MicroBatch, call), call)
    except GeneratorExit:  # left early: the next call, or the end of the `with` block, says so
        # An interrupt between the lines of the engine itself: nobody could say so inside a piece.
        if call.inside:
            call.abort(call.left_early())
        raise
    except BaseException as error:
        call.abort(error)  # an interrupt between the lines of the engine itself
        raise
    finally:
        if call.result is not None:
            finish(call)
