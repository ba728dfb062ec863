"""A snapshot of the state that a step changes besides gradients.

It holds random streams, buffers, modes and learning rates.

It is taken all or nothing, at the start of a call and at the start of each piece, and put back by
`restore` and `restore_piece`. Calls, `verify` and the two passes of a loss over embeddings use it.
Source: docs/internals/autograd.md#state-of-a-failed-attempt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastic_mbs.engine.shared.rates import Rates
from elastic_mbs.engine.shared.resources import Resources
from elastic_mbs.engine.shared.running import optimizers
from elastic_mbs.engine.shared.trained_model import Modes
from elastic_mbs.errors import ReplayUnsafeError, StepInsideError
from elastic_mbs.rollback.random_streams import StreamState


class Snapshot:
    """Random streams, buffers and modes as they were at a call's start and at its piece's start.

    Made for every call, so it is cheap: an instance holds only the fields that differ from the
    defaults.

    Attributes:
        start: random streams at the call's start; None until the whole snapshot was taken.
        piece: random streams at the running piece's start; None until they were read. It is `start`
            itself where they were not read again.
    """

    start: StreamState | None = None
    piece: StreamState | None = None
    _modes = Modes()  # of the modules, when the call's first attempt began
    _attempt_modes = Modes()  # of the modules, when the running attempt began
    _rates = Rates()  # when the call's first attempt began
    _later_rates: Rates | None = None  # when the call's first piece had ended, and from then on
    _grad_enabled: bool = True  # when the running attempt began

    def __init__(self, resources: Resources, key: object) -> None:
        """Drop the snapshot of the call before.

        Args:
            resources: the model, its streams, and memory for copies of its buffers.
            key: the loss function, by which it is known which buffers change.
        """
        self._resources = resources
        self._key = key
        resources.buffers.end_call()

    # ------------------------------------------------------------------ taking it

    def take(self) -> None:
        """Take the snapshot of the call's start."""
        resources = self._resources
        streams = resources.streams.read(hosts=True)
        model = resources.model
        resources.buffers.begin_call(model.modules, self._key, [*model.companions, *model.nearby])
        self.start = self.piece = streams

    def take_piece(self, *, read_streams: bool) -> None:
        """Take the snapshot of the start of an attempt that is not the call's first.

        Args:
            read_streams: False where they are as the call began: no piece has committed, or
                probably so, for a step that was never seen to draw. A failure compares them then.
        """
        self.piece = None
        self._resources.buffers.begin_piece()
        self.piece = self._resources.streams.read() if read_streams else self.start

    def end_piece(self) -> None:
        """Drop the snapshot of a piece that has committed: a failure must not go back to it."""
        self.piece = None

    def take_modes(self) -> None:
        """Take the modules' modes and the gradient mode as an attempt begins; at first the rates.

        The rates stay as the first piece leaves them, so later attempts need no look at them.
        """
        self._grad_enabled = torch.is_grad_enabled()
        self._attempt_modes = self._resources.model.training()
        if not self._modes.modules:
            self._modes, self._rates = self._attempt_modes, self._rates_now()

    def _rates_now(self) -> Rates:
        return Rates.of(filter(self._resources.trains, optimizers()))

    # ------------------------------------------------------------------ putting it back

    def restore_modes(self) -> None:
        """Put the modules' modes, the gradient mode and the rates back to the attempt's start."""
        torch.set_grad_enabled(self._grad_enabled)
        self._resources.model.restore(self._attempt_modes)
        (self._later_rates or self._rates).put_back()

    def restore_piece(self) -> None:
        """Put streams and buffers back to the start of the running piece.

        Raises:
            ReplayUnsafeError: the value of a buffer was not kept.
        """
        if self.piece is None:
            # Nothing of the piece has run, and the copies can be from the piece before.
            return
        self._restore(self.piece, to_call_start=False)

    def restore(self) -> None:
        """Put streams, buffers, modes and rates back to the start of the call.

        Raises:
            ReplayUnsafeError: the value of a buffer was not kept.
        """
        self.unwind_modes()
        self._restore(self.start, to_call_start=True)
        self.piece = self.start

    def _restore(self, streams: StreamState | None, *, to_call_start: bool) -> None:
        resources = self._resources
        if streams is not None:
            resources.streams.restore(streams)
        lost = resources.retry(
            "restore the buffers", lambda: resources.buffers.restore(to_call_start=to_call_start)
        )
        if lost is not None:
            raise ReplayUnsafeError(
                f"{lost} changed for the first time in this batch, so its earlier "
                "value was not kept; from the next batch on it is. Load the last checkpoint, or "
                "set it, before going on. A layer that is set up by the first batch that it sees "
                "needs one before: run the model once under torch.no_grad()"
            )

    def unwind_modes(self) -> None:
        """Put the modules' modes and the rates back to the start of the call's first attempt."""
        self._resources.model.restore(self._modes)
        self._later_rates = None
        self._rates.put_back()

    def unwind(self) -> str | None:
        """Put streams and buffers back to the start of a call that ends by an error.

        Returns:
            A note about buffers that could not be restored, or None.
        """
        if self.start is None:
            return None
        self._resources.streams.restore(self.start)
        lost = self._resources.buffers.restore(to_call_start=True)
        if lost is None:
            return None
        return f"{lost} changed for the first time in this batch and could not be restored."

    def close(self) -> None:
        """Drop the copies of the buffers."""
        self._resources.buffers.end_call()

    # ------------------------------------------------------------------ what has changed since

    def note_rates(self) -> None:
        """Note the rates as the call's first piece has left them: later ones must not move them."""
        self._later_rates = self._rates_now()

    def check_rates(self) -> None:
        """Refuse a learning rate that has moved since the call's first piece ended.

        Raises:
            StepInsideError: a rate has moved.
        """
        change = None if self._later_rates is None else self._later_rates.change()
        if change is not None:
            raise StepInsideError(
                f"a learning rate went from {change} inside the step function, which runs once "
                "for each piece: change it once, before or after the batch"
            )

    @property
    def training(self) -> Sequence[bool]:
        """The training mode of each module at the start of the call's first attempt."""
        return self._modes.training

    @property
    def watches_buffers(self) -> bool:
        """True if a piece can show that another buffer changes."""
        return self._resources.buffers.watched

    def buffers_show_the_split(self) -> bool:
        """Return whether the forward changes a buffer in a way that depends on the split.

        To be asked after a clean piece, from which it is learned.
        """
        return self._resources.retry(
            "compare the buffers with their copies", self._resources.buffers.end_clean_piece
        )

    def drew_since_start(self) -> bool:
        """Return whether the step has drawn since the call began, and learn which host streams."""
        start = self.start
        if start is None:
            return False
        streams = self._resources.streams
        return self._resources.retry("read the random streams", lambda: streams.learn(start))

    def drew_on_host(self) -> bool:
        """Return whether the step has drawn from Python's, numpy's or a user's own host stream."""
        return self.start is not None and self._resources.streams.hosts_moved(self.start)

    def piece_is_lost(self, *, first: bool) -> bool:
        """Return whether the streams at the piece's start are unknown, because they were not read.

        Args:
            first: no piece of this call has committed, so the piece's start is the call's.
        """
        start = self.start
        if start is None or self.piece is None:
            return False
        streams = self._resources.streams
        if self.piece is start:
            return not first and self._resources.retry(
                "read the random streams", lambda: streams.moved(start)
            )
        return self.piece.hosts is None and streams.hosts_moved(start)
