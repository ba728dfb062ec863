"""All data of one call.

            begin             backward             end
WAITING ─────────► FORWARD ─────────► BACKWARD ───► COMMIT ───► WAITING … → WHOLE → DONE
 ▲    │               │                  │            │
 │    │ OOM           │ OOM              │ OOM        │ OOM     any other error → abort → DONE
 │    └───────────────┴────────┬─────────┴────────────┘
 └───────── recover ─────── FAILED

An evaluation goes from FORWARD to WAITING.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils.weak import TensorWeakRef

from elastic_mbs.batch.containers import tensors_in
from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.schedule import Range, Schedule
from elastic_mbs.batch.transfer import Loader
from elastic_mbs.batch.view import BatchView
from elastic_mbs.controller.messages import CallOutcome, Key
from elastic_mbs.engine.context import Context
from elastic_mbs.engine.model import Modes
from elastic_mbs.engine.profile import graphs_made
from elastic_mbs.engine.result import StepResult, StoredOutput
from elastic_mbs.engine.timing import Stopwatch, known, memory_figures
from elastic_mbs.errors import BatchError
from elastic_mbs.escalation.checkpoint import CheckpointedBlocks
from elastic_mbs.escalation.offload import OffloadedTensors
from elastic_mbs.events import CallDone, CallFailed, Resized
from elastic_mbs.memory import MemoryBudget
from elastic_mbs.memory.oom import Verdict
from elastic_mbs.options import OutputPlace
from elastic_mbs.rollback.gradients import Observation
from elastic_mbs.rollback.graph import has_hook_after
from elastic_mbs.rollback.isolation import Isolation
from elastic_mbs.rollback.random_streams import StreamState
from elastic_mbs.rollback.saved_tensors import SavedTensorTable


class Phase(Enum):
    """Where a call is. The values are the words of `OutOfMemory.phase`."""

    WAITING = "load"  # between two attempts, or loading the next piece
    FORWARD = "forward"
    BACKWARD = "backward"
    COMMIT = "commit"
    FAILED = "failed"  # an attempt ran out of memory, and was not recovered from yet
    WHOLE = "whole"  # every piece has committed, and the user's callbacks run
    DONE = "done"


class Attempt:
    """One attempt at one piece of the batch.

    Made for every piece, so it is cheap: an instance holds only what differs from the defaults.
    """

    data: Any = None  # the piece, in the batch's own container type
    streams: StreamState | None = None  # random streams at its start; None until they were read
    grad_enabled: bool = True  # at its start
    training: Modes = ()  # of the modules, at its start
    first_node: int = 0  # number of the first node of autograd's that it makes
    graph: torch.Tensor | None = None  # where backward begins
    loss: torch.Tensor | None = None  # times the piece's weight, detached
    # losses of the user's, where the user's frame can still hold them
    terms: tuple[torch.Tensor, ...] = ()
    # that its graph reaches, where a census was taken
    leaves: tuple[torch.Tensor, ...] | None = None
    custom: frozenset[str] = frozenset()  # functions written in Python in its graph
    # all gradients after its backward: what changes them from then on is not the engine
    seen: Observation | None = None
    squared_norm: Sequence[torch.Tensor] = ()  # of its gradient, where the noise scale is wanted
    outputs: StoredOutput | None = None
    callbacks: tuple[Callable[[], object], ...] = ()

    def __init__(self, piece: Range) -> None:
        self.piece = piece

    def __len__(self) -> int:
        return self.piece.stop - self.piece.start

    @property
    def root(self) -> Node | None:
        """Where its graph begins. A property, because wrapping a node for Python is not free."""
        return None if self.graph is None else self.graph.grad_fn

    def drop(self) -> None:
        """Drops everything: a user's variable can still hold this attempt."""
        self.__dict__ = {"piece": self.piece}


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt, as strings and numbers: nothing of it is kept alive."""

    piece: Range
    phase: Phase
    verdict: Verdict
    committed: frozenset[int]  # ids of the leaves that committed in this attempt
    # shapes of leaves with a gradient that the graph reaches and the ledger lacks: their commits
    # cannot be counted
    unknown: tuple[str, ...]
    normalises_batch: bool  # its graph normalises with statistics of the batch
    # it has custom functions without a clean backward so far, or committed to leaves in ways the
    # graph does not show
    surprising: bool
    # gradients share memory or have hooks, so versions do not tell which of them has a commit
    indistinct: bool
    edited: bool  # it changed its piece of the batch in place
    streams: StreamState | None  # random streams at its start


class CallState:
    """What is known of one call: the batch, what still has to run, what has committed, and its failures.

    Made for every call, so it is cheap: an instance holds only what differs from the defaults.
    """

    blocks: CheckpointedBlocks | None = None  # that run again in backward
    # both, in place while an attempt is made. Leaving one can be repeated
    hooks: tuple[SavedTensorTable | CheckpointedBlocks, ...] = ()
    phase: Phase = Phase.WAITING
    attempt: Attempt | None = None  # the one that runs
    failure: Failure | None = None  # of the latest attempt, until it is recovered from
    result: StepResult | None = None

    modes: Modes = ()  # of the modules, when the first attempt began
    census_taken: bool = False  # in this call
    isolation: Isolation | None = None
    # random streams at the call's start; None until the snapshot of the call was taken
    streams: StreamState | None = None
    # gradients that were there share memory or have hooks, so versions do not tell which of them
    # has a commit
    indistinct: bool = False
    modified: bool = False  # something of this call can be in a gradient that was there before it
    edited: bool = False  # an earlier piece of this call edited its samples in place
    # its pieces are those of an earlier pass over the batch (`elastic_mbs.embeddings`)
    bound: bool = False

    failures: int = 0
    failures_in_row: int = 0  # since a piece committed
    failures_at_floor: int = 0
    # first sample of the piece that failed at the floor and has not committed yet
    floor_start: int | None = None
    restarts: int = 0
    replayed_samples: int = 0
    # an error that is perhaps a hidden out-of-memory was tried with half the size
    tried_masked: bool = False

    def __init__(
        self,
        context: Context,
        view: BatchView,
        counts: Counts,
        key: Key,
        identity: object,
        *,
        training: bool,
        outputs: OutputPlace,
        own_graph: bool,
    ) -> None:
        settings, ledger, limits = context.settings, context.ledger, context.settings.limits
        # of the last call, whose snapshot this one must not restore before it has its own
        context.buffers.end_call()
        if context.model.refresh():
            ledger.set_leaves(context.model.leaves)
        self.context = context
        self.view = view  # the batch
        # its counts: a number, or a dict where losses have names
        self.totals, self.count_names = counts.total, counts.names
        self.key = key  # limits and sizes are kept by it
        self.identity = identity  # of the loss function; what is known of its buffers is kept by it
        self.training = training
        self.outputs: OutputPlace = outputs
        self.profile = context.profile_of((key.name, identity))
        if training:
            ledger.note()
        # ids of the leaves whose `.grad` was not empty
        self.had_gradient: set[int] = ledger.with_gradient() if training else set()
        self.plan = context.controller.begin(key, view.worth, view.elements)
        self.size = self.plan.size  # micro-batch in samples
        self.schedule = Schedule(
            counts,
            reduction=settings.reduction,
            minimum=limits.minimum,
            align=limits.align,
            costs=view.costs,
        )
        self.loader = Loader(
            view, context.piece_device, settings.memory.prefetch, longer_than=self.profile.too_full
        )
        self.batch_versions = view.versions()  # of the batch's tensors at the start
        self.committed: list[Attempt] = []
        self.marked: dict[int, TensorWeakRef] = {}  # leaves that failed attempts have committed to
        self.wait_left = settings.memory.wait_for_memory  # seconds
        self.graphs = graphs_made()  # before the call
        # Of autograd's saved tensors, for `micro_batches`, and where they are offloaded.
        self.table = SavedTensorTable() if own_graph else None
        if own_graph or self.profile.escalated:
            self.escalate()
        if self.had_gradient:
            self.indistinct = ledger.share_memory() or any(map(has_hook_after, ledger.leaves()))
        # nothing is left to find out before a backward, and no gradient has to be set aside
        self.settled = self.is_settled()
        self._begin_measuring()

    def _begin_measuring(self) -> None:
        context = self.context
        if self.plan.learning:
            context.drop_stale_cache()
            # it would see the batch in the first piece, as a part of what that needs
            if isinstance(context.meter, MemoryBudget):
                context.meter.track(self.view.tensors)
            context.meter.reset_peak()
            context.controller.holds(self.key, self._held_at_start())
        self.resets = context.meter.resets  # of the memory statistics, before the call
        self.watch = Stopwatch(context.asynchronous)
        # a training call asks when its first backward begins
        if self.plan.wants_reading and not self.training:
            context.monitor.request_reading(rested=True)

    def _held_at_start(self) -> int | None:
        """Bytes in use when the call begins, without gradients: those are in its peak, whether they were there or are made in it."""
        usage = self.context.meter.usage()
        if usage is None:
            return None
        grads = (leaf.grad for leaf in self.context.model.leaves if id(leaf) in self.had_gradient)
        return usage.allocated - sum(
            grad.nbytes for grad in grads if grad is not None and grad.layout is torch.strided
        )

    def escalate(self) -> None:
        """Has the attempts from here on made with what this loss function has been escalated to."""
        used = (
            self.context.settings.recovery.escalate[: self.profile.escalated]
            if self.training
            else ()
        )
        if "offload" in used:
            self.table = OffloadedTensors(self._resident)
        if "checkpoint" in used:
            self.blocks = CheckpointedBlocks(self.context.model.roots, self.context.streams)
        self.hooks = tuple(each for each in (self.table, self.blocks) if each is not None)

    def _resident(self) -> Iterable[torch.Tensor]:
        """What is in memory for the whole attempt."""
        yield from chain.from_iterable(
            chain(root.parameters(), root.buffers()) for root in self.context.model.roots
        )
        if self.attempt is not None:
            yield from tensors_in(self.attempt.data)

    # ------------------------------------------------------------------ what has committed

    def add_committed(self, attempt: Attempt) -> None:
        """Keeps an attempt that has succeeded, without its graph."""
        self.committed.append(attempt)
        attempt.data = attempt.graph = attempt.seen = attempt.leaves = attempt.streams = None
        attempt.terms = ()  # its loss and outputs stay
        self.failures_in_row = 0
        if (
            self.floor_start is not None
            and attempt.piece.start <= self.floor_start < attempt.piece.stop
        ):
            self.floor_start, self.failures_at_floor = None, 0

    def drop_committed(self) -> None:
        """Drops every attempt: the batch is replayed from its start, or over."""
        for attempt in self.committed:
            attempt.drop()
        self.committed.clear()

    def in_order(self) -> list[Attempt]:
        """The attempts that committed, in the batch's order."""
        return sorted(self.committed, key=_START) if self.failures else self.committed

    def make_result(self, attempts: Iterable[Attempt]) -> StepResult:
        partition, losses, stored = [], [], []
        for attempt in attempts:
            partition.append((attempt.piece.start, attempt.piece.stop))
            stored.append(attempt.outputs)
            if attempt.loss is not None:
                losses.append(attempt.loss)
        by_length = self.view.sorted
        return StepResult(
            partition=tuple(partition),
            micro_batch_size=self.size,
            ooms=self.failures,
            replayed_samples=self.replayed_samples,
            skipped=tuple(sorted(self.schedule.skipped)),
            order=None if by_length is None else tuple(by_length.order),
            _lengths=() if by_length is None else by_length.lengths,
            _losses=tuple(losses),
            _outputs=stored if any(stored) else [],
            _per_piece=self.profile.per_piece,
        )

    # ------------------------------------------------------------------ gradients

    def is_settled(self) -> bool:
        """Whether backward adds to the gradients in place and nothing has to be found out: then a piece's backward is only that."""
        return (
            self.context.plain
            and self.profile.settled
            and not (self.had_gradient and (self.indistinct or self.profile.mixes))
        )

    def check_gradients(self) -> None:
        """Checks that no other code has changed a gradient since the last piece.

        Before the first one the caller can clear them.
        """
        ledger = self.context.ledger
        if (
            not self.committed
            and not self.failures
            and all(leaf.grad is None for leaf in ledger.changed())
        ):
            ledger.note()
            self.had_gradient &= ledger.with_gradient()
        ledger.check_unchanged()

    def mark(self, leaves: Iterable[torch.Tensor]) -> frozenset[int]:
        """The ids of leaves that a failed attempt committed to.

        Weak: a step can make leaves of its own, which end with it.
        """
        found = {id(leaf): TensorWeakRef(leaf) for leaf in leaves}
        self.marked.update(found)
        return frozenset(found)

    def is_marked(self, leaf: torch.Tensor, ids: frozenset[int]) -> bool:
        """Whether `leaf` is one of them, and not another tensor that got the id of one that is gone."""
        return id(leaf) in ids and self.marked[id(leaf)]() is leaf

    def notice_edits(self) -> None:
        """Notices a `loss_fn` that edits its samples in place; refuses one that edits what later pieces see, too."""
        if self.profile.edits_batch or self.view.versions() == self.batch_versions:
            return
        if not self.view.whole_edited(self.batch_versions):
            self.profile.edits_batch = self.edited = True
        elif len(self.committed) > 1 or self.schedule:
            raise BatchError(
                "a tensor that every piece gets whole was changed in place by loss_fn, so later "
                "pieces would see it changed: work on a copy "
                "(w = w.clone()) inside loss_fn, and keep what lasts from step to step in a "
                "buffer of the model"
            )

    # ------------------------------------------------------------------ what others learn of the call

    def outcome(self, seconds: float | None) -> CallOutcome:
        """For the controller; None for seconds that are not known yet."""
        context, plan = self.context, self.plan
        # Once a size is learned, only an allocator that can thrash has something to show.
        usage = context.meter.usage() if plan.learning or not context.on_cpu else None
        # A peak counts when it belongs to this call alone: other code can have reset the process's
        # statistics meanwhile.
        own_peak = plan.learning and context.meter.resets == self.resets
        return CallOutcome(
            samples=self.view.worth,
            elements=self.view.elements,
            pieces=len(self.committed),
            peak=usage.peak_allocated if usage and own_peak else None,
            fragmentation=usage.fragmentation if usage else 1.0,
            seconds=seconds,
            retries=context.new_retries(usage.retries) if usage else 0,
            ooms=self.failures,
            least_fragmentation=usage.least_fragmentation if usage else None,
            lost=self.watch.lost,
            fresh=len(self.committed) == 1 and not self.had_gradient,
        )

    def inform_controller(self) -> None:
        """Gives the controller what the call has shown, and emits the move that follows."""
        context, watch = self.context, self.watch
        seen = self.outcome(watch.stop())
        if seen.seconds is None:
            context.timed.append((watch, (self.key, seen)))
            for (key, timed), seconds in known(context.timed):
                context.controller.timed(key, timed._replace(seconds=seconds))
        capacity = context.capacity()
        move = context.controller.end(self.key, seen, capacity)
        if move is not None:
            available = None if capacity is None else capacity.bytes
            context.log.emit(
                Resized(
                    context.settings.name,
                    move.before,
                    move.after,
                    move.reason,
                    str(self.key),
                    available,
                )
            )

    def done_event(self, result: StepResult) -> CallDone:
        """`CallDone`; its times and its loss are not known yet."""
        return CallDone(
            self.context.settings.name,
            key=str(self.key),
            mode=self.key.mode,
            samples=self.view.length,
            pieces=len(result.partition),
            size_before=self.plan.size,
            micro_batch_size=result.micro_batch_size,
            ooms=result.ooms,
            replayed_samples=result.replayed_samples,
            seconds=None,
            seconds_lost=0.0,
            loss=None,
            ended=0.0,
            graphs=graphs_made() - self.graphs,
            **memory_figures(self.context.meter, self.context.monitor),
        )

    def failed_event(self, error: BaseException) -> CallFailed:
        """`CallFailed`; its times are not known yet."""
        message = next(iter(str(error).splitlines()), "")
        return CallFailed(
            self.context.settings.name,
            str(self.key),
            type(error).__name__,
            message,
            self.failures,
            0.0,
            0.0,
        )


_START = attrgetter("piece.start")
