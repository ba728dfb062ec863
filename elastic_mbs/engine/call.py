"""The state machine of one call: pieces → forward → backward → commit, or recover → replay.

A `Call` is the work on one batch: an iterator over attempts, each begun, run backward and ended by
its `MicroBatch`. All ways in run exactly this loop. Recovery runs in `__next__`, outside of any
`except` block: an exception that is still handled keeps the tensors of its frames alive. This
module alone moves `phase`; `Phase` draws the moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Self

import torch

from elastic_mbs.batch.schedule import Range
from elastic_mbs.engine.attempt import Attempt, Failure, Phase, check_nothing_lost
from elastic_mbs.engine.outcome.result import StepResult, check_not_overwritten
from elastic_mbs.engine.parts import Batch, CallParts, parts_of
from elastic_mbs.engine.passes import Passes
from elastic_mbs.engine.recovery import unwinding
from elastic_mbs.engine.recovery.failure import failure_of
from elastic_mbs.engine.recovery.floor import Floor
from elastic_mbs.engine.recovery.recover import check_cap, recover
from elastic_mbs.engine.recovery.replay import Mode
from elastic_mbs.engine.shared import running
from elastic_mbs.engine.shared.knowledge import Knowledge
from elastic_mbs.engine.shared.resources import Resources
from elastic_mbs.errors import (
    ElasticMBSError,
    IncompleteBatchError,
    LossError,
    MicroBatchFloorError,
    UsageError,
)
from elastic_mbs.memory import oom

# Names of their own, because an attribute of an enumeration takes ten times as long on Python 3.11.
_WAITING, _FORWARD, _BACKWARD, _COMMIT, _FAILED, _DONE = Phase

PassesOf = Callable[[CallParts], Passes]


class Call:
    """The work on one batch, from its split to its result.

    Attributes:
        parts: the parts of the call, each the only writer of its fields.
        passes: the passes that it makes over the batch.
        phase: where the call is.
        attempt: the attempt that runs.
        failure: the facts of the latest attempt, until it is recovered from.
        result: the result of the whole call, once there is one.
    """

    phase: Phase = _WAITING
    attempt: Attempt | None = None
    failure: Failure | None = None
    result: StepResult | None = None

    def __init__(
        self, resources: Resources, knowledge: Knowledge, batch: Batch, passes: PassesOf
    ) -> None:
        """Begin a call.

        Args:
            resources: the model, its devices and sensors.
            knowledge: the sizes and the facts that earlier calls have left.
            batch: the samples.
            passes: makes the passes of the call, given its parts.
        """
        self.resources = resources
        self._floors: dict[bool, Floor] = {}  # of passes with and without backward
        try:
            self.parts = parts_of(resources, knowledge, batch)
            self.passes = passes(self.parts)
            self._pass = self.passes.first
            if self.parts.decision.wants_reading and not batch.training:
                resources.monitor.request_reading(rested=True)  # training asks in its backward
            running.enter_call(self)
        except BaseException:
            running.leave_call(self)
            resources.forget_model()
            knowledge.controller.abandon(batch.key)
            raise

    @property
    def totals(self) -> Any:
        """The counts of the batch: a number, or a dict where losses have names."""
        return self.parts.batch.counts.total

    @property
    def finished(self) -> bool:
        """True if the gradient is whole or the call has ended early."""
        return self.phase is _DONE

    @property
    def inside(self) -> bool:
        """True while an attempt or a sink runs; False between two attempts."""
        return self.phase in (_FORWARD, _BACKWARD, _COMMIT) or self.resources.log.emitting

    def _move(self, phase: Phase) -> None:
        """Go on to a phase, unless the step or a sink has closed the runtime."""
        if self.phase is _DONE:
            raise unwinding.closed_inside()
        self.phase = phase

    # ------------------------------------------------------------------ the loop, step by step

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End the call where an interrupt has struck between the lines of the engine itself."""
        if error is not None:
            self.abort(error)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Run `fn` on every piece, and backward of its loss, or keep its outputs."""
        self.passes.begin()
        for attempt in self:
            self.begin(attempt)
            try:
                # No variable holds the value here: it would outlive a failed attempt.
                self._take(attempt, fn(attempt.data, *args, **(kwargs or {})))
            except BaseException as error:
                if not self.end(attempt, error):
                    raise
            else:
                self.end(attempt, None)

    def _take(self, attempt: Attempt, value: Any) -> None:
        """Run backward of the loss of an attempt, or keep its outputs."""
        value = self.passes.translate(attempt, value)
        if self._pass.training:
            self.backward(attempt, value)
        else:
            self.keep(attempt, value)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Attempt:
        """Return the next attempt, after recovering from the one before where that has failed."""
        if self.phase is _DONE:
            raise StopIteration if self.result is not None else unwinding.ended_early()
        try:
            attempt = self._next_attempt()
        except BaseException as error:
            typed = self._abort_by(error)
            if not typed:
                raise
        else:
            if attempt is None:
                raise StopIteration
            return attempt
        # Outside of the handler, because the raw error keeps its frames' tensors alive; and popped,
        # because a variable of this frame would be a cycle that keeps the batch alive.
        raise typed.pop()

    def _next_attempt(self) -> Attempt | None:
        while self.phase is not _DONE:
            if self.phase is _FAILED:
                self._recover()
            elif self.attempt is not None:
                raise self.left_early("a micro-batch was not entered with `with micro:`")
            piece = self.parts.progress.next()
            assert piece is not None  # the last one has ended the pass
            if (attempt := self._prepare(piece)) is not None:
                return attempt
        return None

    def _prepare(self, piece: Range) -> Attempt | None:
        """Return an attempt with its snapshot and its data, or None where there was no memory."""
        parts = self.parts
        snapshot = parts.snapshot
        parts.report.watch.attempt()
        try:
            parts.peers.before_piece()
            if snapshot.start is None:
                snapshot.take()
            else:
                moves = parts.profile.draws or not parts.gradients.settled
                snapshot.take_piece(read_streams=moves and bool(parts.progress.committed))
            data = parts.loader.load(piece, parts.progress.schedule, cloned=parts.edits.copies)
        except Exception as error:
            if not self._failed(Attempt(piece), error):
                raise
            return None
        self.attempt = Attempt(piece, data)
        return self.attempt

    def begin(self, attempt: Attempt) -> None:
        """Start an attempt: put its hooks in place."""
        if attempt is not self.attempt or self.phase is not _WAITING:
            raise IncompleteBatchError(
                "this micro-batch is over: each is entered once, in the loop that yields it"
            )
        try:
            self.parts.hooks.begin(attempt)
            self.parts.snapshot.take_modes()
            self.phase = _FORWARD
            return
        except BaseException as error:
            typed = self._abort_by(error)
            if not typed:
                raise
        raise typed.pop()

    def backward(self, attempt: Attempt, value: Any) -> None:
        """Weigh the loss of an attempt and run backward."""
        if attempt is not self.attempt or self.phase is not _FORWARD or not self._pass.training:
            if self.phase is _DONE:
                raise unwinding.closed_inside()
            raise LossError(
                "micro.backward(loss) is called once, inside its own `with micro:` block"
            )
        # The loss can have a graph all the same, and `loss.backward()` would use it.
        if not torch.is_grad_enabled():
            with torch.inference_mode(False), torch.enable_grad():
                self.backward(attempt, value)
            return
        parts = self.parts
        gradients = parts.gradients
        if not gradients.unchanged():
            gradients.check(first=parts.progress.untouched)
        last = not parts.progress.schedule
        parts.peers.before_backward(gradients, last=last)
        attempt.weigh(value, parts.batch.counts, self._pass.outputs)
        if parts.decision.wants_reading and not parts.progress.committed:
            # Now, because the monitor's thread needs Python and a backward does not.
            self.resources.monitor.request_reading(rested=True)
        if attempt.differentiable:
            parts.hooks.check_forward()
            if not gradients.settled:
                gradients.prepare(attempt)
            self._move(_BACKWARD)
            gradients.run(attempt)
        else:
            parts.hooks.drop_graph(attempt.terms)  # no backward frees it
        parts.peers.after_backward(last=last)
        gradients.observe()
        self._move(_COMMIT)

    def keep(self, attempt: Attempt, outputs: Any) -> None:
        """Keep the outputs of an attempt at the place of its pass."""
        attempt.keep(outputs, self._pass.outputs)

    def end(self, attempt: Attempt, error: BaseException | None) -> bool:
        """End an attempt: commit it, or note its failure.

        Returns:
            Whether the error is swallowed.
        """
        try:
            self.parts.hooks.end(error)  # first of all: the rest needs memory itself
            if error is None:
                if self.phase is _DONE:
                    raise unwinding.closed_inside()
                self._commit(attempt)
                if not self.parts.progress.schedule:
                    # Here and not in the next turn of the loop, which a `break` would leave out.
                    self._end_pass()
                return False
            self.parts.snapshot.restore_modes()
            if self.phase is _DONE:  # closed inside the block; the error is the user's
                unwinding.unwind_rest(self.parts, error)
                return False
            if isinstance(error, Exception) and self._failed(attempt, error):
                return True
            unwinding.note_piece(self.parts, attempt, error)
            self.abort(error)
            return False
        except BaseException as refusal:
            typed = self._abort_by(refusal)
            if not typed:
                raise
        raise typed.pop()

    def _commit(self, attempt: Attempt) -> None:
        parts = self.parts
        profile, progress, snapshot = parts.profile, parts.progress, parts.snapshot
        if progress.committed:
            snapshot.check_rates()
        elif progress.schedule:  # others follow
            snapshot.note_rates()
        if self._pass.training:
            if self.phase is not _COMMIT:
                parts.gradients.check(first=progress.untouched)
                raise LossError("the `with micro:` block ended without micro.backward(loss)")
            if parts.gradients.commit(attempt):
                profile.learn_draws(snapshot.drew_since_start())
        if snapshot.watches_buffers:
            profile.learn_buffers(snapshot.buffers_show_the_split())
        if not profile.seen:
            parts.edits.learn_from(attempt.data)
        progress.commit(attempt)
        if self._floors and (floor := self._floors.get(self._pass.training)) is not None:
            floor.committed(attempt.piece.start, attempt.piece.stop)
        parts.edits.notice(progress)
        snapshot.end_piece()
        self.attempt = None
        self._move(_WAITING)

    # ------------------------------------------------------------------ after a failed attempt

    def _failed(self, attempt: Attempt, error: Exception) -> bool:
        """Note the failure of an attempt; return False where it is not out-of-memory."""
        failure = failure_of(self.parts, attempt, self.phase, error, training=self._pass.training)
        if failure is None:
            return False
        self.failure = failure
        self.attempt = None
        self.phase = _FAILED
        return True

    def _recover(self) -> None:
        """Roll the failed attempt back, and go on with smaller pieces."""
        failure, parts = self.failure, self.parts
        assert failure is not None
        mode, smaller = recover(parts, failure, self._pass)
        if not smaller:
            training = self._pass.training
            floor = self._floors.setdefault(training, Floor(parts))
            floor.reached(failure, training=training)
        check_cap(parts, failure)
        if mode is Mode.STEP:
            self._pass = self.passes.restarted(self._pass)
        self.failure = None
        self._move(_WAITING)

    # ------------------------------------------------------------------ the end of the batch

    def _end_pass(self) -> None:
        """End a pass whose pieces have all committed, and the call after the last one."""
        self.phase = _FORWARD  # a loss between two passes is still inside the step
        following = self.passes.after(self._pass)
        if following is None:
            self._finish()
        else:
            self._move(_WAITING)
            self._pass = following

    def _finish(self) -> None:
        """Finish the call: its result, the controller's knowledge of it, and the callbacks."""
        parts, resources = self.parts, self.resources
        gradients, progress, profile = parts.gradients, parts.progress, parts.profile
        training = parts.batch.training
        if training:
            if not gradients.unchanged(at_end=True):
                gradients.check(first=False)
            check_nothing_lost(progress.committed, resources.retry)
        gradients.finish()
        # A failure finds out whether the step draws, but where gradients were there it is refused.
        if gradients.full and not profile.draws:
            profile.learn_draws(parts.snapshot.drew_since_start())
        check_not_overwritten([attempt.outputs for attempt in progress.committed])
        attempts = progress.in_order()
        result = parts.report.result(progress, attempts, parts.batch.counts.names, self._pass.pad)
        if not training:
            resources.retry(
                'join the outputs on the device (outputs="cpu" keeps them on the host)',
                lambda: result.outputs,
            )
        noise = parts.knowledge.noise
        if noise is not None and training:
            result.noise_scale = resources.retry(
                "read the norms of the gradients",
                lambda: gradients.noise_scale(noise, adds_up=self._pass.adds_up),
            )
        parts.report.inform_controller(progress, fresh=not gradients.full)
        parts.learn_end()
        result = self.passes.finish(parts.peers.meet(gradients, result))
        callbacks = [callback for attempt in attempts for callback in attempt.callbacks]
        if self.phase is _DONE:
            raise unwinding.closed_inside()
        # First: a callback may step, or evaluate, and the gradient of other ranks is whole as well.
        self.result = result
        self._close()
        unwinding.run_callbacks(callbacks)

    def _close(self) -> None:
        if self.resources.guard is not None:
            self.resources.guard.lift()  # an interrupt between the lines can have left it up
        running.leave_call(self)
        self.parts.progress.drop_committed()
        self.passes.close()
        self.parts.gradients.close()
        self.phase = _DONE

    # ------------------------------------------------------------------ a call that ends early

    def _abort_by(self, error: BaseException) -> list[ElasticMBSError]:
        """Abort the call by `error`.

        Returns:
            The typed error to raise where the library itself ran out of memory, or where the
            runtime was closed inside the call, else nothing.
        """
        typed = list[ElasticMBSError]()
        own = isinstance(error, ElasticMBSError) or not isinstance(error, Exception)
        if self.phase is _DONE:
            if self.result is None and not own:
                typed.append(unwinding.closed_inside())  # the error follows from it
        elif not own:
            verdict = oom.classify(error, self.resources.settings.recovery.is_oom)
            if verdict is not None:
                typed.append(
                    MicroBatchFloorError(
                        "there is no room for the library's own bookkeeping after an "
                        f"out-of-memory error: {verdict.message}"
                    )
                )
        error = typed[0] if typed else error
        if self.phase is _DONE and self.result is None:
            unwinding.unwind_rest(self.parts, error)
        self.abort(error)
        return typed

    def abort(self, error: BaseException) -> None:
        """End the call by `error`: state goes back to its start, and the rest is noted on it."""
        if self.phase is _DONE:
            return
        self.result = None  # the batch is undone
        interrupt = None
        # Once more where an interrupt or a lack of memory has struck in the middle.
        for last in (False, True):
            try:
                self._drop_attempt()
                unwinding.unwind(self.parts, error)
                self._close()
                break
            except Exception as problem:
                if last:  # a lost device: the error that is on its way says more
                    error.add_note(
                        f"elastic_mbs: the state could not be put back: {type(problem).__name__}: "
                        f"{problem}"
                    )
                    self._close()
            except BaseException as problem:
                error = interrupt = problem
        self.parts.report.failed(error, self.parts.progress)
        if self.parts.progress.failures:
            self.parts.end_turn(failed=True)
        unwinding.tell(self.parts, error)
        if interrupt is not None:
            raise interrupt

    def _drop_attempt(self) -> None:
        parts = self.parts
        # Modes that are switched between two attempts are the user's doing.
        if self.phase is not _WAITING:
            parts.snapshot.unwind_modes()
        if self.attempt is not None:
            self.attempt.drop()  # a variable of the user's can still hold it
            self.attempt = None
        parts.hooks.end()  # an interrupt between the lines can have left them in place
        if parts.hooks.table is not None:
            parts.hooks.table.empty()
        parts.knowledge.controller.abandon(parts.key, parts.report.watch.waited)

    # ------------------------------------------------------------------ misuse

    def check_inside(self, attempt: Attempt, what: str) -> None:
        """Refuse a value given to an attempt that has not begun or is over: it would be lost."""
        if attempt is not self.attempt or not self.inside:
            raise UsageError(
                f"{what} is called inside its own `with micro:` block, where it belongs to the "
                "samples of that block"
            )

    def leave_early(self, what: str = "a loop over micro-batches was left early") -> NoReturn:
        """Abort a call whose loop did not run to its end, and raise the error that says so."""
        error = self.left_early(what)
        try:
            self.abort(error)
            raise error
        finally:
            del error  # in a variable it would be a cycle, which keeps the batch alive

    def left_early(
        self, what: str = "a loop over micro-batches was left early"
    ) -> IncompleteBatchError:
        """Return the error for a loop that did not run to its end, with the missing samples."""
        begun = [each.piece for each in (self.attempt, self.failure) if each is not None]
        return IncompleteBatchError(
            f"{what}: samples {self.parts.progress.missing(begun)} of "
            f"{self.parts.batch.view.length} were not run. Its gradients have been emptied"
        )
