"""The report of one call: its result, its time and its peak for the controller, its events."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from operator import attrgetter, is_not

import torch

from elastic_mbs.batch.join import Pad
from elastic_mbs.batch.view import BatchView
from elastic_mbs.controller.messages import CallOutcome, Decision, Key
from elastic_mbs.engine.attempt import Attempt
from elastic_mbs.engine.outcome.result import StepResult
from elastic_mbs.engine.outcome.timing import Stopwatch, known, memory_figures
from elastic_mbs.engine.progress import Progress
from elastic_mbs.engine.shared.knowledge import Knowledge, LossProfile
from elastic_mbs.engine.shared.resources import Resources
from elastic_mbs.events import CallDone, CallFailed, Resized
from elastic_mbs.memory import MemoryBudget

_LOSS, _OUTPUTS = map(attrgetter, ("loss", "outputs"))
_is_there = partial(is_not, None)


class BeginAgain(Exception):
    """The way in which a step ends its call to run the same batch again: the call has not failed.

    The gradients of the call are dropped, as for any error, and its failures count for the next
    call of the same function.
    """


class CallReport:
    """The measurements of one call, and the reports that are made of them.

    Attributes:
        watch: the time of the call, and the seconds that failures have cost.
    """

    def __init__(
        self,
        resources: Resources,
        knowledge: Knowledge,
        profile: LossProfile,
        view: BatchView,
        key: Key,
        decision: Decision,
        full: Iterable[torch.Tensor],
    ) -> None:
        """Begin measuring.

        Args:
            resources: the sensors.
            knowledge: the controller, which learns from the call.
            profile: the facts about the loss function.
            view: the batch.
            key: the kind of call, by which sizes are kept.
            decision: the size that the controller gave, and what it wants to learn.
            full: the leaves whose `.grad` was not empty when the call began.
        """
        self._resources = resources
        self._knowledge = knowledge
        self._profile = profile
        self._view = view
        self._key = key
        self._decision = decision
        self._graphs = graphs_made()  # before the call
        if decision.learning:
            self._begin_learning(full)
        self._resets = resources.meter.resets  # of the memory statistics, before the call
        self.watch = Stopwatch(resources.asynchronous)

    def _begin_learning(self, full: Iterable[torch.Tensor]) -> None:
        """Make the peak of this call readable."""
        resources = self._resources
        resources.drop_stale_cache()
        count_batch(resources, self._view)
        resources.meter.reset_peak()
        self._knowledge.controller.holds(self._key, held_beside(resources, full))

    def restart_peak(self) -> None:
        """Leave the peak so far out: it says nothing of the rest of the call."""
        if self._decision.learning:
            self._resources.meter.reset_peak()
            self._resets = self._resources.meter.resets

    def graphs(self) -> int:
        """Return how many graphs torch.compile has made since the call began."""
        return graphs_made() - self._graphs

    # ------------------------------------------------------------------ for the caller

    def result(
        self,
        progress: Progress,
        attempts: Sequence[Attempt],
        names: Iterable[str] | None,
        pad: Pad,
    ) -> StepResult:
        """Return the result of the committed attempts.

        Args:
            progress: the failures of the call.
            attempts: the attempts in the batch's order.
            names: the names of the losses; None for a single one.
            pad: fills up outputs whose width differs from piece to piece.
        """
        partition = tuple([(each.piece.start, each.piece.stop) for each in attempts])
        losses = tuple(filter(_is_there, map(_LOSS, attempts)))
        stored = list(map(_OUTPUTS, attempts))
        named = {
            name: [each.losses[name] for each in attempts if name in each.losses]
            for name in names or ()
        }
        by_length = self._view.sorted
        failures, replayed = self._profile.take_carried()
        return StepResult(
            partition=partition,
            micro_batch_size=progress.size,
            ooms=progress.failures + failures,
            replayed_samples=progress.replayed_samples + replayed,
            order=None if by_length is None else tuple(by_length.order),
            _lengths=() if by_length is None else by_length.lengths,
            _losses=losses,
            _named=named,
            _outputs=stored if any(stored) else [],
            _per_piece=self._profile.per_piece,
            _pad=pad,
        )

    # ------------------------------------------------------------------ for the controller

    def _outcome(self, progress: Progress, seconds: float | None, *, fresh: bool) -> CallOutcome:
        resources, decision = self._resources, self._decision
        # Once a size is learned, only an allocator that can thrash has something to show.
        usage = resources.meter.usage() if decision.learning or not resources.on_cpu else None
        # Other code can have reset the process's statistics in the meantime.
        own_peak = decision.learning and resources.meter.resets == self._resets
        return CallOutcome(
            samples=self._view.worth,
            elements=self._view.elements,
            pieces=len(progress.committed),
            peak=usage.peak_allocated if usage and own_peak else None,
            fragmentation=usage.fragmentation if usage else 1.0,
            seconds=seconds,
            retries=resources.new_retries(usage.retries) if usage else 0,
            ooms=progress.failures,
            least_fragmentation=usage.least_fragmentation if usage else None,
            lost=self.watch.lost,
            fresh=fresh and len(progress.committed) == 1,
        )

    def inform_controller(self, progress: Progress, *, fresh: bool) -> None:
        """Give the controller the call's outcome, and emit the move that follows.

        Args:
            progress: the pieces that were run.
            fresh: all gradients were empty when the call began.
        """
        resources, knowledge = self._resources, self._knowledge
        controller = knowledge.controller
        outcome = self._outcome(progress, self.watch.stop(), fresh=fresh)
        if outcome.seconds is None:  # the device has not told them yet
            knowledge.timed.append((self.watch, (self._key, outcome)))
            for (key, timed), seconds in known(knowledge.timed):
                controller.timed(key, timed._replace(seconds=seconds))
        capacity = resources.capacity()
        move = controller.end(self._key, outcome, capacity)
        if move is None:
            return
        available = None if capacity is None else capacity.bytes
        name = resources.settings.name
        resources.log.emit(
            Resized(name, move.before, move.after, move.reason, str(self._key), available)
        )

    # ------------------------------------------------------------------ for the sinks

    def done(self, result: StepResult, *, training: bool) -> None:
        """Emit `CallDone` once the times of the call are known."""
        telemetry = self._resources.telemetry
        if telemetry is None:
            return
        event = CallDone(
            self._resources.settings.name,
            key=str(self._key),
            mode=self._key.mode,
            samples=self._view.length,
            pieces=len(result.partition),
            size_before=self._decision.size,
            micro_batch_size=result.micro_batch_size,
            ooms=result.ooms,
            replayed_samples=result.replayed_samples,
            seconds=None,
            seconds_lost=0.0,
            loss=None,
            ended=0.0,
            graphs=self.graphs(),
            **memory_figures(self._resources.meter, self._resources.monitor),
        )
        telemetry.done(event, self.watch, result if training else None)

    def failed(self, error: BaseException, progress: Progress) -> None:
        """Emit `CallFailed`; of a call that is begun again, keep what the next one has to tell."""
        if isinstance(error, BeginAgain):
            self._profile.carry(progress.failures, progress.replayed_samples)
            return
        telemetry = self._resources.telemetry
        if telemetry is None:
            return
        message = next(iter(str(error).splitlines()), "")
        name = self._resources.settings.name
        failures, kind = progress.failures, type(error).__name__
        event = CallFailed(name, str(self._key), kind, message, failures, 0.0, 0.0)
        telemetry.ended(event, self.watch, error)


def count_batch(resources: Resources, view: BatchView) -> None:
    """Count the batch of a call that begins.

    A budget that saw it in the first piece would take it for a part of that piece's need.
    """
    if isinstance(resources.meter, MemoryBudget):
        resources.meter.track(view.tensors)


def held_beside(resources: Resources, full: Iterable[torch.Tensor]) -> int | None:
    """Return the bytes in use outside the needs of a call that begins; None where not known.

    Args:
        resources: the meter.
        full: the leaves whose `.grad` is not empty. Gradients are in the call's peak, whether they
            were there or are made in it.
    """
    usage = resources.meter.usage()
    gradients = sum(_dense_bytes(leaf.grad) for leaf in full)
    return None if usage is None else usage.allocated - gradients


def graphs_made() -> int:
    """Return how many graphs torch.compile has made in this process."""
    # It is not imported here: it is large, and without it nothing is compiled.
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"].get("unique_graphs", 0))


def _dense_bytes(gradient: torch.Tensor | None) -> int:
    if gradient is None or gradient.layout is not torch.strided:
        return 0
    return gradient.nbytes
