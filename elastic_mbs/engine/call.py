"""The loop with all side effects: pieces → forward → backward → commit, or recover → replay.

`state.py` draws its phases.

A `Call` is the work on one batch: an iterator over attempts, each begun, run backward and ended by
its `MicroBatch`. All doors run exactly this loop. Recovery runs in `__next__`, when the exception
of the failed attempt and its traceback are gone: they would keep the attempt's tensors alive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch

from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.loss_terms import is_plain, read_losses, weighted_sum
from elastic_mbs.batch.schedule import Range
from elastic_mbs.batch.view import BatchView
from elastic_mbs.controller.plan import Key, shape_class
from elastic_mbs.engine import misuse
from elastic_mbs.engine.backward import commit, measure_noise, run_backward
from elastic_mbs.engine.context import Context
from elastic_mbs.engine.failure import note_failure
from elastic_mbs.engine.recovery import call_on_fatal, recover, unwind
from elastic_mbs.engine.result import StoredOutput, check_not_overwritten
from elastic_mbs.engine.state import Attempt, CallState, Phase
from elastic_mbs.errors import (
    ElasticMBSError,
    IncompleteBatchError,
    LossError,
    MicroBatchFloorError,
    NestedCallError,
    StepInsideError,
    UsageError,
)
from elastic_mbs.memory import oom
from elastic_mbs.options import OutputPlace

Take = Callable[[Attempt, Any], None]


class Call:
    """The work on one batch, from its split to its result.

    Arguments are those of `CallState`; `name` is in its `key`, and `own_graph` asks for its
    `table`.
    """

    def __init__(
        self,
        context: Context,
        view: BatchView,
        counts: Counts,
        *,
        name: str,
        identity: object,
        training: bool = True,
        outputs: OutputPlace = "cpu",
        own_graph: bool = False,
    ) -> None:
        _check_outer(context, training)
        self.context = context
        key = Key(name, "train" if training else "eval", shape_class(view.elements))
        try:
            self.state = CallState(
                context,
                view,
                counts,
                key,
                identity,
                training=training,
                outputs=outputs,
                own_graph=own_graph,
            )
            misuse.enter_call(self)
        except BaseException:
            misuse.leave_call(self)
            context.model.forget()  # it can have changed without the ledger's knowledge
            context.ledger.forget()
            context.controller.abandon(key)
            raise

    @property
    def totals(self) -> Any:
        """The batch's counts."""
        return self.state.totals

    @property
    def finished(self) -> bool:
        """Whether the gradient is whole, or the call has ended early."""
        return self.state.phase in (Phase.WHOLE, Phase.DONE)

    # ------------------------------------------------------------------ the loop, in the order of a step

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Ends the call where an interrupt has struck between the lines of the engine itself."""
        if error is not None:
            self.abort(error)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        take: Take | None = None,
    ) -> None:
        """Runs `fn` on every piece: backward of the loss that it returns, or, in an evaluation, its outputs are kept; or what `take` does with it."""
        take = take or (self.backward if self.state.training else self.keep)
        for attempt in self:
            self.begin(attempt)
            try:
                take(attempt, fn(attempt.data, *args, **kwargs))
            except BaseException as error:
                if not self.end(attempt, error):
                    raise
            else:
                self.end(attempt, None)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Attempt:
        state = self.state
        if state.phase is Phase.DONE:
            raise StopIteration
        try:
            while True:
                if state.phase is Phase.FAILED:
                    recover(state)
                elif state.attempt is not None:
                    raise self.left_early("a micro-batch was not entered with `with micro:`")
                piece = state.schedule.next(state.size)
                if piece is None:
                    break
                attempt = self._prepare(piece)
                if attempt is not None:
                    return attempt
            self._finish()  # the last piece was skipped
        except BaseException as error:
            typed = self._abort_by(error)
            if typed is None:
                raise
        else:
            raise StopIteration
        raise typed  # outside of the handler: the raw error keeps its frames' tensors alive

    def _prepare(self, piece: Range) -> Attempt | None:
        """Takes a snapshot of what the attempt can change and brings the piece to the device; None when that itself ran out of memory."""
        state, context = self.state, self.context
        attempt = Attempt(piece)
        state.watch.attempt()
        try:
            if state.streams is None:
                streams = context.streams.read(hosts=True)
                context.buffers.begin_call(context.model.modules, (state.key, state.identity))
                state.streams = attempt.streams = streams
            else:
                if context.buffers.busy:
                    context.buffers.begin_piece()  # before all else that can fail
                # A step that was never seen to draw has probably not moved them since the call
                # began. A failure compares, and where they have moved the batch starts over
                # (`recovery._streams_lost`), which it cannot where there were gradients.
                draws = state.profile.draws or state.had_gradient or not state.settled
                attempt.streams = context.streams.read() if draws else state.streams
            attempt.data = state.loader.load(
                piece, state.schedule, cloned=state.profile.edits_batch
            )
        except Exception as error:
            if not note_failure(state, attempt, error):
                raise
            return None
        state.attempt = attempt
        return attempt

    def begin(self, attempt: Attempt) -> None:
        """Starts the attempt."""
        state, context = self.state, self.context
        if attempt is not state.attempt or state.phase is not Phase.WAITING:
            raise IncompleteBatchError(
                "this micro-batch is over: each is entered once, in the loop that yields it"
            )
        try:
            if state.table is not None:
                attempt.first_node = torch._C._autograd._get_sequence_nr()
            for hook in state.hooks:
                hook.__enter__()
            if context.guard is not None:
                context.guard.renew()
            attempt.grad_enabled, attempt.training = (
                torch.is_grad_enabled(),
                context.model.training(),
            )
            state.modes = state.modes or attempt.training
            if misuse.fault_injector is not None:
                misuse.fault_injector.begin(
                    self, context.model.modules, ready=state.failures_in_row == 0
                )
            state.phase = Phase.FORWARD
            return
        except BaseException as error:
            typed = self._abort_by(error)
            if typed is None:
                raise
        raise typed

    def backward(self, attempt: Attempt, value: Any) -> None:
        """Weighs the loss and runs backward."""
        state = self.state
        if attempt is not state.attempt or state.phase is not Phase.FORWARD or not state.training:
            raise LossError(
                "micro.backward(loss) is called once, inside its own `with micro:` block"
            )
        # the loss can have a graph all the same, and `loss.backward()` would use it
        if not torch.is_grad_enabled():
            with torch.inference_mode(False), torch.enable_grad():
                self.backward(attempt, value)
            return
        if not self.context.ledger.unchanged(kept=state.settled and bool(state.committed)):
            state.check_gradients()
        weights = attempt.piece.weights
        assert weights is not None  # or the piece would have been skipped
        if state.count_names is None and is_plain(value):
            loss, weight = value, weights[None]
            terms: tuple[torch.Tensor, ...] = (value,)
        else:
            named, outputs = read_losses(value, state.count_names)
            # Stored before backward: once something has committed, nothing but backward itself
            # should be left that can fail.
            if attempt.outputs is None:  # what `micro.keep` was given comes first
                self.keep(attempt, outputs)
            terms, loss, weight = tuple(named.values()), weighted_sum(named, weights), 1.0
        if state.table is not None:
            attempt.terms = terms
        attempt.loss, attempt.graph = loss.detach() * weight, loss
        if state.plan.wants_reading and not state.committed:
            # now, because the monitor's thread needs Python and a backward does not
            self.context.monitor.request_reading(rested=True)
        run_backward(state, attempt, loss, weight)
        attempt.seen = self.context.ledger.observe(kept=state.settled)
        state.phase = Phase.COMMIT

    def keep(self, attempt: Attempt, outputs: Any) -> None:
        """Keeps the outputs of the piece where the user wants them."""
        if outputs is not None and self.state.outputs is not None:
            if attempt.outputs is not None:
                raise UsageError(
                    "this micro-batch has outputs already: give all of them to one "
                    "micro.keep(outputs)"
                )
            attempt.outputs = StoredOutput(outputs, self.state.outputs)

    def end(self, attempt: Attempt, error: BaseException | None) -> bool:
        """Ends the attempt: commits, or notes the failure; returns whether the error is swallowed."""
        state, context = self.state, self.context
        try:
            if context.guard is not None:
                context.guard.lift()  # first of all: what follows needs memory itself
            if misuse.fault_injector is not None:
                misuse.fault_injector.end()
            for hook in state.hooks:
                hook.__exit__(None, None, None)
            if error is None:
                if state.phase is Phase.DONE:
                    raise IncompleteBatchError(
                        "the runtime was closed inside a `with micro:` block, so its batch is "
                        "incomplete"
                    )
                self._commit(attempt)
                if not state.schedule:
                    # here and not in the next turn of the loop, which a `break` would leave out
                    self._finish()
                return False
            torch.set_grad_enabled(attempt.grad_enabled)
            context.model.restore(attempt.training)
            if isinstance(error, Exception) and note_failure(state, attempt, error):
                return True
            self.abort(error)
            return False
        except BaseException as refusal:
            typed = self._abort_by(refusal)
            if typed is None:
                raise
        raise typed

    def _commit(self, attempt: Attempt) -> None:
        state, context = self.state, self.context
        if state.training:
            if state.phase is not Phase.COMMIT:
                state.check_gradients()
                raise LossError("the `with micro:` block ended without micro.backward(loss)")
            assert attempt.seen is not None
            if state.isolation is not None or not context.ledger.advance(
                attempt.seen, state.profile.commits
            ):
                # what has changed since backward is seen by the next check where this is left out
                commit(state, attempt)
        if context.buffers.watched:
            state.profile.changes_buffers = context.retry(
                "compare the buffers with their copies", context.buffers.end_clean_piece
            )
        state.add_committed(attempt)
        if not state.settled:
            state.notice_edits()
        state.attempt, state.phase = None, Phase.WAITING

    def _finish(self) -> None:
        """Ends the call whose last piece has committed: its result, what the controller learns of it, and the callbacks."""
        state, context = self.state, self.context
        if state.training and not context.ledger.unchanged():
            state.check_gradients()
        if state.isolation is not None:
            context.retry("write the gradient in its own type", state.isolation.finish)
        state.notice_edits()
        if state.had_gradient and not state.profile.draws and state.streams is not None:
            start = state.streams
            state.profile.draws = context.retry(
                "read the random streams", lambda: context.streams.learn(start)
            )
        if state.outputs == "device":
            check_not_overwritten([attempt.outputs for attempt in state.committed])
        attempts = state.in_order()
        result = state.make_result(attempts)
        if not state.training:
            context.retry(
                'join the outputs on the device (outputs="cpu" keeps them on the host)',
                lambda: result.outputs,
            )
        if context.noise is not None:
            result.noise_scale = context.retry(
                "read the norms of the gradients", lambda: measure_noise(state)
            )
        state.inform_controller()
        misuse.leave_call(self)
        state.phase = Phase.WHOLE  # a callback may step, or evaluate
        try:
            for attempt in attempts:
                for callback in attempt.callbacks:
                    callback()
        except BaseException as error:  # the user's own, so it stays as it is
            self.abort(error)
            raise
        self._close()
        state.result = result

    def _close(self) -> None:
        state, context = self.state, self.context
        if context.guard is not None:
            context.guard.lift()  # an interrupt between the lines can have left it up
        if state.phase is not Phase.WHOLE:
            misuse.leave_call(self)
        state.drop_committed()
        # last: where an interrupt strikes before it, everything can still be put back
        context.ledger.forget()
        state.phase = Phase.DONE

    # ------------------------------------------------------------------ what ends a call early

    def _abort_by(self, error: BaseException) -> MicroBatchFloorError | None:
        """Aborts the call by `error`, or, where the library itself ran out of memory, by a typed error, which is returned to be raised."""
        typed = None
        if self.state.phase is not Phase.DONE and not isinstance(error, ElasticMBSError):
            verdict = oom.classify(error, self.context.settings.recovery.is_oom)
            if verdict is not None:
                typed = MicroBatchFloorError(
                    "there is no room for the library's own bookkeeping after an out-of-memory "
                    f"error: {verdict.message}"
                )
        self.abort(typed or error)
        return typed

    def abort(self, error: BaseException) -> None:
        """Ends the call by `error`: state goes back to the call's start, and what could not is noted on the error."""
        state, interrupt = self.state, None
        if state.phase is Phase.DONE:
            return
        # once more where an interrupt or a lack of memory has struck in the middle
        for last in (False, True):
            try:
                self._drop_attempt()
                unwind(state, error)
                self._close()
                break
            except Exception as problem:
                if last:  # a lost device: the error that is on its way says more
                    error.add_note(
                        f"elastic_mbs: buffers could not be restored: {type(problem).__name__}: "
                        f"{problem}"
                    )
                    self._close()
            except BaseException as problem:
                error = interrupt = problem
        if self.context.telemetry is not None:
            self.context.telemetry.ended(state.failed_event(error), state.watch, error)
        call_on_fatal(state, error)
        if interrupt is not None:
            raise interrupt

    def _drop_attempt(self) -> None:
        state = self.state
        # what is switched between two attempts is the user's doing
        if self.inside or state.phase is Phase.FAILED:
            self.context.model.restore(state.modes)
        if state.attempt is not None:
            state.attempt.drop()  # a variable of the user's can still hold it
            state.attempt = None
        for hook in state.hooks:
            # an interrupt between the lines can have left it in place
            hook.__exit__(None, None, None)
        if state.table is not None:
            state.table.empty()
        self.context.controller.abandon(state.key)

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses a step of an optimizer over the leaves of this batch while it is incomplete."""
        ledger = self.context.ledger
        if not any(
            parameter in ledger for group in optimizer.param_groups for parameter in group["params"]
        ):
            return  # an optimizer of the step's own, over tensors that it makes itself
        if self.inside:
            raise StepInsideError(
                f"{type(optimizer).__name__}.step() ran inside the step function, on a part of "
                "the gradient: step once, after the batch"
            )
        error = self.left_early(
            f"{type(optimizer).__name__}.step() ran before the whole batch was accumulated"
        )
        self.abort(error)
        raise error

    def check_inside(self, attempt: Attempt, what: str) -> None:
        """Refuses what is given to an attempt that has not begun or is over: it would be lost."""
        if attempt is not self.state.attempt or not self.inside:
            raise UsageError(
                f"{what} is called inside its own `with micro:` block, where it belongs to the "
                "samples of that block"
            )

    @property
    def inside(self) -> bool:
        """Whether an attempt is being made, or a sink runs, as opposed to the loop standing between two."""
        return (
            self.state.phase in (Phase.FORWARD, Phase.BACKWARD, Phase.COMMIT)
            or self.context.log.emitting
        )

    def left_early(
        self, what: str = "a loop over micro-batches was left early"
    ) -> IncompleteBatchError:
        """The error for a loop that did not run to its end, with what is missing."""
        state = self.state
        missing = state.schedule.missing()
        missing += [each.piece for each in (state.attempt, state.failure) if each is not None]
        ranges = ", ".join(
            f"{rest.start}:{rest.stop}" for rest in sorted(missing, key=lambda rest: rest.start)
        )
        return IncompleteBatchError(
            f"{what}: samples {ranges} of {state.view.length} were not run. Its gradients have "
            "been emptied"
        )


# ---------------------------------------------------------------------- how a call begins


def _check_outer(context: Context, training: bool) -> None:
    """Ends a loop that was left early, and refuses a call inside a step function that could not be undone with it."""
    outer: Call | None = misuse.running_call()
    if outer is not None and not outer.inside:
        error = outer.left_early()
        outer.abort(error)
        raise error
    if outer is not None and (training or outer.context is context):
        raise NestedCallError(
            "a call was started inside the step function of another one, or in a function of "
            "on_event while it runs, and could not be undone "
            "when that one is replayed: take it out of there (an eval by another runtime may stay)"
        )
