"""The one impure loop: pieces → forward → backward → commit, or recover → replay.

A `Call` is the work on one batch. It is an iterator over `MicroBatch`es, each a context manager around one attempt at one piece:

    for micro in call:                    # __next__: recover from the last failure, split, snapshot, load
        with micro:                       # __exit__: commit; or note the failure as strings, and swallow it
            micro.backward(loss_fn(micro.data))

All doors run exactly this loop. What happens after a failure stands in `recovery.py`. It runs in `__next__`, when the exception and its
traceback are gone: they would keep the failed attempt's tensors alive.
"""

from __future__ import annotations

from typing import Any, Self

import torch

from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.loss_terms import read_losses, weighted_sum
from elastic_mbs.batch.schedule import Range, Schedule
from elastic_mbs.batch.view import BatchView, map_tensors
from elastic_mbs.controller.controller import Key, shape_class
from elastic_mbs.engine import misuse
from elastic_mbs.engine.backward import backward_with_care, commit_with_care
from elastic_mbs.engine.committed import Committed
from elastic_mbs.engine.context import Parts
from elastic_mbs.engine.history import History
from elastic_mbs.engine.learning import held_beside, look_at_batch, look_at_streams, tell_controller
from elastic_mbs.engine.micro_batch import MicroBatch, Totals
from elastic_mbs.engine.misuse import enter_call, leave_call, running_call
from elastic_mbs.engine.recovery import Failure, note_failure, recover, retrying, unwind
from elastic_mbs.engine.result import StepResult, StoredOutput
from elastic_mbs.engine.scalar_backward import backward
from elastic_mbs.errors import BackwardInsideError, IncompleteBatchError, LossError, NestedCallError, StepInsideError
from elastic_mbs.options import OutputPlace
from elastic_mbs.rollback.gradients import GradientNotes
from elastic_mbs.rollback.isolation import Isolation
from elastic_mbs.rollback.random_streams import StreamState
from elastic_mbs.rollback.saved_tensors import SavedTensorTable


class Call:
    """The work on one batch, from its split to its `result`.

    Args:
        parts: the runtime's parts.
        view: the batch.
        counts: its counts.
        name: what the loss function is called; limits are kept by it.
        identity: what it is; traits are kept by it, because two functions may share a name.
        training: whether pieces run backward.
        outputs: where outputs go.
        own_graph: whether autograd saves its tensors in a table that can be emptied (door 3).
    """

    def __init__(
        self,
        parts: Parts,
        view: BatchView,
        counts: Counts,
        *,
        name: str,
        identity: object,
        training: bool = True,
        outputs: OutputPlace = "cpu",
        own_graph: bool = False,
    ) -> None:
        settings = parts.settings
        self.parts = parts
        self.view = view
        self.counts = counts
        self.names = counts.names
        self.identity = identity
        self.training = training
        self.outputs = outputs
        self.key = Key(name, "train" if training else "eval", shape_class(view.elements))
        self.result: StepResult | None = None
        self.finished = False
        self.schedule = Schedule(counts, reduction=settings.reduction, minimum=settings.limits.minimum, align=settings.limits.align)
        self.isolation: Isolation | None = None
        self.stream_start: StreamState | None = None
        self.table = SavedTensorTable() if own_graph else None
        self.failure: Failure | None = None
        self.filled: set[int] = set()  # leaves whose .grad was not empty at the start
        self.history = History(settings.memory.wait_for_memory)
        self.running: MicroBatch | None = None
        self.committed = Committed()
        self.walked = False
        self.gradients = GradientNotes()
        try:
            self._enter()
            self._begin()
        except BaseException:
            leave_call(self)
            parts.inventory.forget()  # it may have changed without that its leaves are watched
            raise

    @property
    def totals(self) -> Totals:
        """The batch's counts."""
        return self.counts.total

    # ------------------------------------------------------------------ the path without a failure, in the order of a step

    def _enter(self) -> None:
        outer: Call | None = running_call()
        if outer is not None and not outer.inside:
            error = outer.left_early()
            outer.abort(error)
            raise error
        if outer is not None and (self.training or outer.parts is self.parts):
            raise NestedCallError(
                "a call was started inside the step function of another one, and could not be undone when that one is replayed: "
                "take it out of the step function (an eval by another runtime may stay)"
            )
        enter_call(self)

    def _begin(self) -> None:
        parts = self.parts
        if parts.inventory.refresh():
            parts.commits.watch(parts.inventory.leaves)
        self.traits = parts.traits_of((self.key.name, self.identity))
        if self.training:
            self.gradients.note(parts.inventory.leaves)
            self.filled = self.gradients.filled()
        self.steady = self.is_steady()
        if self.training:
            self._choose_watch()
        self.versions = self.view.versions()
        self.plan = parts.controller.begin(self.key, self.view.length, self.view.elements)
        self.size = self.plan.size
        if self.plan.learning:
            parts.drop_stale_cache()
            parts.meter.reset_peak()
            parts.controller.holds(self.key, held_beside(self))
        self.resets = parts.meter.resets
        parts.stopwatch.start()

    def is_steady(self) -> bool:
        """Whether all that can be learned about the loss function is known, and its gradients are added up in place: then backward is only that."""
        settings, traits = self.parts.settings, self.traits
        return traits.steady and settings.plain and not (self.filled and traits.mixes)

    def _choose_watch(self) -> None:
        """Has commits told by hooks, or by the gradients alone where that has proved as good."""
        commits = self.parts.commits
        if not (self.steady and self.traits.counted) or (self.filled and self.gradients.share_memory()):
            commits.listen()
        elif commits.listening:
            commits.rest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Ends the call where an interrupt has struck between the lines of the engine itself."""
        if error is not None:
            self.abort(error)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> MicroBatch:
        if self.finished:
            raise StopIteration
        try:
            if self.running is not None:
                raise self.left_early("a micro-batch was not entered with `with micro:`")
            while True:
                if self.failure is not None:
                    recover(self)
                piece = self.schedule.next(self.size)
                if piece is None:
                    break
                micro = self.prepare(piece)
                if micro is not None:
                    self.running = micro
                    return micro
            self.refuse_touched()
            self.finish()  # the last piece was skipped
        except BaseException as error:
            self.abort(error)
            raise
        raise StopIteration

    def prepare(self, piece: Range) -> MicroBatch | None:
        """Snapshots what the attempt may change and brings the piece to the device; None when that itself ran out of memory."""
        parts = self.parts
        micro = MicroBatch(self, piece, None)
        if parts.telemetry is not None:
            parts.telemetry.attempt()
        try:
            if self.stream_start is None:
                self._snapshot_call(micro)
            else:
                if parts.buffers.busy:
                    parts.buffers.begin_piece()  # before all else that can fail
                micro._streams = parts.streams.read()
            data = self.view.piece(piece.start, piece.stop)
            if self.traits.edits_batch:
                data = map_tensors(data, torch.Tensor.clone)
            micro.data = parts.streamer.load(data)
        except Exception as error:
            if not note_failure(self, micro, error):
                raise
            return None
        return micro

    def _snapshot_call(self, micro: MicroBatch) -> None:
        parts = self.parts
        micro._streams = parts.streams.read(hosts=True)
        parts.buffers.begin_call(parts.inventory.modules, (self.key, self.identity))
        self.stream_start = micro._streams

    def enter(self, micro: MicroBatch) -> None:
        """Starts the attempt."""
        if micro is not self.running or micro._phase != "load":
            raise IncompleteBatchError("this micro-batch is over: each is entered once, in the loop that yields it")
        self.parts.commits.fired.clear()
        if self.table is not None:
            self.table.__enter__()
        if self.parts.guard is not None:
            self.parts.guard.renew()
        if misuse.attempt_watch is not None:
            misuse.attempt_watch.begin(self, self.parts.inventory.modules, ready=self.history.since_progress == 0)
        micro._phase = "forward"  # last: until here the loop stands between two attempts

    def backward(self, micro: MicroBatch, value: Any) -> None:
        """Weighs the loss and runs backward; see `MicroBatch.backward`."""
        if micro is not self.running or micro._phase != "forward" or not self.training:
            raise LossError("micro.backward(loss) is called once, inside its own `with micro:` block")
        if not torch.is_grad_enabled():  # the loss can have a graph all the same, and `loss.backward()` would use it
            with torch.inference_mode(False), torch.enable_grad():
                self.backward(micro, value)
            return
        if self.parts.commits.fired or not self.gradients.stayed():
            self.refuse_touched()
        terms, outputs = read_losses(value, self.names)
        # Stored before backward: once something has committed, nothing but backward itself should be left that can fail.
        if outputs is not None:
            self.store(micro, outputs)
        if self.table is not None:
            micro._losses = tuple(terms.values())
        assert micro._piece.weights is not None
        weighted = weighted_sum(terms, micro._piece.weights)
        micro._loss, micro._weighed = weighted.detach(), weighted
        if self.steady and weighted.grad_fn is not None:
            self.history.touched = True
            micro._phase = "backward"
            backward(weighted)
        else:
            backward_with_care(self, micro, weighted)
        micro._phase = "commit"

    def store(self, micro: MicroBatch, outputs: Any) -> None:
        """Keeps the outputs of the piece where the user wants them."""
        if outputs is not None and self.outputs is not None:
            micro._stored = StoredOutput(outputs, self.outputs)

    def leave(self, micro: MicroBatch, error: BaseException | None) -> bool:
        """Ends the attempt: commits, or notes the failure; returns whether the error is swallowed."""
        if self.parts.guard is not None:
            self.parts.guard.lift()  # first of all: what follows needs memory itself
        if misuse.attempt_watch is not None:
            misuse.attempt_watch.end()
        self.running = None
        if self.table is not None:
            self.table.__exit__(None, None, None)
        try:
            if error is None:
                self._commit(micro)
                if not self.schedule:
                    self.finish()  # here and not in the next turn of the loop, which a `break` would leave out
                return False
            if isinstance(error, Exception) and note_failure(self, micro, error):
                return True
        except BaseException as refusal:
            self.parts.inventory.thaw()
            self.abort(refusal)
            raise
        self.parts.inventory.thaw()  # not in `abort`: what is frozen between two attempts is the user's doing
        self.abort(error)
        return False

    def _commit(self, micro: MicroBatch) -> None:
        parts, traits = self.parts, self.traits
        if self.training:
            if micro._phase != "commit":
                self.refuse_touched()
                raise LossError("the `with micro:` block ended without micro.backward(loss)")
            if self.steady and not parts.commits.listening and self.gradients.commits() in traits.commits:
                self.gradients.advance()
            else:
                commit_with_care(self, micro)
        if parts.buffers.watched:
            traits.changes_buffers = retrying(parts, "compare the buffers with their copies", parts.buffers.end_clean_piece)
        if not self.steady:
            look_at_batch(self)
        self.committed.add(micro)
        self.history.progress(micro.start, micro.stop)
        if self.plan.probing:
            # The first piece makes the gradients, of which its peak has a part at most: beside it the next one would seem to need them all.
            usage = None if self.training and len(self.committed) == 1 and not self.filled else parts.meter.usage()
            self.size = parts.controller.piece_done(self.key, len(micro), usage.peak_allocated if usage else None, parts.capacity())

    def finish(self) -> None:
        """Ends the call whose last piece has committed: its result, what the controller makes of it, and the callbacks."""
        parts = self.parts
        if self.isolation is not None:
            retrying(parts, "write the gradient in its own type", self.isolation.finish)
        if self.steady:
            look_at_batch(self)
        look_at_streams(self)
        self.result = self.committed.result(self.size, self.history, self.schedule.skipped, self.traits.apart)
        tell_controller(self, len(self.committed))
        self._leave()  # the gradient is whole: a callback may step, or evaluate
        try:
            self.committed.run_callbacks()
        except BaseException as error:
            unwind(self, error)
            raise
        finally:
            self._close()

    def _leave(self) -> None:
        self.finished = True
        if self.parts.guard is not None:
            self.parts.guard.lift()  # an interrupt between the lines may have left it up
        leave_call(self)

    def _close(self) -> None:
        self._leave()
        self.gradients.forget()
        self.committed.clear()
        self.parts.commits.forget_guests()
        self.parts.commits.clear()

    # ------------------------------------------------------------------ what ends a call early

    def restart(self) -> None:
        """Forgets every piece: the batch will be replayed from its start."""
        self.schedule.restart()
        self.committed.clear()
        self.remember_gradients()

    def remember_gradients(self) -> None:
        """Notes the gradients as the engine left them."""
        parts = self.parts
        self.gradients.note(parts.commits.leaves() if self.traits.guests else parts.inventory.leaves)

    def abort(self, error: BaseException) -> None:
        """Ends the call by `error`: state goes back to the call's start, and what could not is noted on the error."""
        if not self.finished:
            self.running = None
            try:
                unwind(self, error)
            finally:
                self.parts.controller.abandon(self.key)
                self._close()
                if self.parts.telemetry is not None:
                    self.parts.telemetry.ended(self, error)

    def refuse_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses a step of an optimizer over the leaves of this batch while it is incomplete."""
        watches = self.parts.commits.watches
        if not any(watches(parameter) for group in optimizer.param_groups for parameter in group["params"]):
            return  # an optimizer of the step's own, over tensors that it makes itself
        if self.inside:
            raise StepInsideError(
                f"{type(optimizer).__name__}.step() ran inside the step function, on a part of the gradient: step once, after the batch"
            )
        error = self.left_early(f"{type(optimizer).__name__}.step() ran before the whole batch was accumulated")
        self.abort(error)
        raise error

    @property
    def inside(self) -> bool:
        """Whether an attempt is being made, as opposed to the loop standing between two."""
        return self.running is not None and self.running._phase != "load"

    def refuse_touched(self) -> None:
        """Refuses gradients that somebody else has changed since the last piece. Before the first one they may be cleared."""
        if self.parts.commits.fired:
            raise BackwardInsideError(
                "backward() ran inside the step function: return the loss (or hand it to micro.backward), and leave backward to the engine"
            )
        if not len(self.committed) and not self.history.failures and all(leaf.grad is None for leaf in self.gradients.moved()):
            self.remember_gradients()
        self.gradients.refuse_touched()

    def left_early(self, what: str = "a loop over micro-batches was left early") -> IncompleteBatchError:
        """The error for a loop that did not run to its end, with what is missing."""
        missing = self.schedule.missing() if self.running is None else [*self.schedule.missing(), self.running._piece]
        ranges = ", ".join(f"{rest.start}:{rest.stop}" for rest in sorted(missing, key=lambda rest: rest.start))
        return IncompleteBatchError(f"{what}: samples {ranges} of {self.view.length} were not run. Its gradients have been emptied")
