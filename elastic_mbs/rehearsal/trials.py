"""Trials of a batch: forward and backward of all its pieces, for their time alone."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.schedule import Range, Schedule
from elastic_mbs.batch.transfer import to_device
from elastic_mbs.batch.view import BatchView
from elastic_mbs.engine.attempt import Attempt
from elastic_mbs.engine.hooks import AttemptHooks
from elastic_mbs.engine.outcome.timing import Stopwatch
from elastic_mbs.engine.progress import Progress
from elastic_mbs.engine.shared.resources import Resources
from elastic_mbs.engine.snapshot import Snapshot
from elastic_mbs.errors import UsageError
from elastic_mbs.escalation.head import OtherLayers
from elastic_mbs.escalation.ladder import Step
from elastic_mbs.escalation.position_wise import PositionWise
from elastic_mbs.memory import oom
from elastic_mbs.planning.report import PlanReport
from elastic_mbs.planning.ways import NONE, Times
from elastic_mbs.rehearsal.kept import Kept
from elastic_mbs.rehearsal.no_trace import no_trace
from elastic_mbs.rollback.graph import has_hook, walk

RUNS = 3  # that are timed, after one that is not; the quickest counts
_LESS = 4  # the second size is so much smaller

Pieces = tuple[int, Step]  # the size of the pieces of a trial, and the way in which they are made


class Trials:
    """The trials of one batch. Nothing of them stays."""

    def __init__(
        self,
        resources: Resources,
        view: BatchView,
        counts: Counts,
        loss_fn: Callable[[Any], Any],
    ) -> None:
        self._resources = resources
        self._view = view
        self._counts = counts
        self._loss_fn = loss_fn
        self._outside: dict[int, tuple[Tensor, Tensor | None]] = {}  # leaves, with their gradients

    def times(self, report: PlanReport) -> Times:
        """Return the times of the batch that has this plan.

        Raises:
            UsageError: a hook of the user's would run.
        """
        self._refuse_hooks(self._resources.model.leaves)
        ways = {way.step or NONE: way.largest for way in report.ways if way.largest}
        large = report.largest or 0
        small = max(self._resources.settings.limits.floor, large // _LESS) if large else 0
        tried = [(size, NONE) for size in (large, small) if size]
        seconds = self.seconds(dict.fromkeys([*tried, *((ways[step], step) for step in ways)]))
        time = None
        if large:
            fast, slow = (seconds[size, NONE] for size in (large, small))
            time = self._coefficients(large, small, fast, slow)
        return Times(time, {step: seconds[size, step] for step, size in ways.items()})

    def _coefficients(
        self, large: int, small: int, fast: float | None, slow: float | None
    ) -> tuple[float, float] | None:
        """Return γ in seconds per element and δ in seconds per piece; None while not known.

        Args:
            large: a size, in samples.
            small: another one.
            fast: seconds of the batch in pieces of the large size.
            slow: in pieces of the small one.
        """
        limits, samples = self._resources.settings.limits, self._view.worth
        few, many = (limits.pieces(samples, size) for size in (large, small))
        if few == many or fast is None or slow is None or math.isinf(fast) or math.isinf(slow):
            return None
        per_piece = max(0.0, (slow - fast) / (many - few))
        per_sample = max(0.0, fast - per_piece * few) / samples
        return per_sample / self._view.elements, per_piece

    # ------------------------------------------------------------------ sizes and ways, in turns

    def seconds(self, tried: Iterable[Pieces]) -> dict[Pieces, float | None]:
        """Return the time of the batch in each kind of pieces, which take turns.

        It is infinite where a piece runs out of memory, and None where the device tells no time.
        """
        found: dict[Pieces, list[float | None]] = {each: [] for each in tried}
        with ExitStack() as undo:
            snapshot, kept = undo.enter_context(no_trace(self._resources, Trials, training=True))
            undo.callback(self._put_back)
            hooks = {each: self._hooks(each[1], snapshot) for each in found}
            for turn in range(1 + RUNS):  # the first one fills caches, and shows what is edited
                for each, times in found.items():
                    if math.inf in times:
                        continue
                    self._resources.retry("put buffers and streams back", snapshot.restore)
                    self._resources.retry("put back what loss_fn edited", kept.restore)
                    seconds = self._timed(each[0], hooks[each], None if turn else kept)
                    if turn or seconds == math.inf:
                        times.append(seconds)
        return {each: _quickest(times) for each, times in found.items()}

    def _timed(self, size: int, hooks: AttemptHooks, kept: Kept | None) -> float | None:
        """Run the batch, and return its time: infinity where it runs out of memory."""
        try:
            watch = Stopwatch(self._resources.asynchronous)
            with ExitStack() as around:
                if kept is not None:
                    if "torch._dynamo" in sys.modules:
                        around.enter_context(torch.compiler.set_stance("force_eager"))
                    around.enter_context(kept)
                self._run(size, hooks, looks=kept is not None)
            watch.stop()
            watch.done(wait=True)
            return watch.seconds()
        except Exception as error:
            if oom.classify(error, self._resources.settings.recovery.is_oom) is None:
                raise
            oom.clear_traceback(error)
        self._resources.release(thorough=True)
        return math.inf

    def _hooks(self, step: Step, snapshot: Snapshot) -> AttemptHooks:
        return AttemptHooks(
            self._resources,
            Progress(self._schedule(), self._view.worth),
            start=lambda: snapshot.start,
            own_graph=False,
            steps=() if step == NONE else (step,),
            other_layers=OtherLayers(),
            position_wise=PositionWise(),
        )

    def _schedule(self) -> Schedule:
        settings = self._resources.settings
        return Schedule(
            self._counts,
            reduction=settings.reduction,
            minimum=settings.limits.minimum,
            align=settings.limits.align,
            costs=self._view.costs,
        )

    # ------------------------------------------------------------------ one run

    def _run(self, size: int, hooks: AttemptHooks, *, looks: bool = False) -> None:
        """Run forward and backward of every piece, into empty gradients.

        Args:
            size: of a piece, in samples.
            hooks: put the way in place.
            looks: look for leaves outside of the model.
        """
        for leaf in self._resources.model.leaves:
            leaf.grad = None
        schedule = self._schedule()
        with torch.inference_mode(False), torch.enable_grad():
            while (piece := schedule.next(size)) is not None:
                self._run_piece(piece, hooks, looks=looks)

    def _run_piece(self, piece: Range, hooks: AttemptHooks, *, looks: bool) -> None:
        cut = self._view.piece(piece.start, piece.stop)
        attempt = Attempt(piece, to_device(cut, self._resources.piece_device))
        hooks.begin(attempt)
        try:
            attempt.weigh(self._loss_fn(attempt.data), self._counts, None)
            if attempt.graph is not None and attempt.differentiable:
                if looks:
                    self._look_outside(attempt)
                torch.autograd.backward(attempt.graph, attempt.weight)
        except BaseException as error:
            hooks.end(error)
            attempt.drop()
            raise
        hooks.end()

    # ------------------------------------------------------------------ leaves

    def _look_outside(self, attempt: Attempt) -> None:
        """Set the gradients of leaves outside of the model aside."""
        assert attempt.root is not None
        own = set(map(id, self._resources.model.leaves)) | self._outside.keys()
        found = [leaf for leaf in walk(attempt.root).leaves if id(leaf) not in own]
        self._refuse_hooks(found)
        for leaf in found:
            self._outside[id(leaf)] = leaf, leaf.grad
            leaf.grad = None

    def _put_back(self) -> None:
        for leaf, grad in self._outside.values():
            leaf.grad = grad
        self._outside.clear()

    def _refuse_hooks(self, leaves: list[Tensor]) -> None:
        for leaf in filter(has_hook, leaves):
            raise UsageError(
                f"measure=True runs backward, and a hook on {self._resources.model.name_of(leaf)} "
                "would run with it (an optimizer that steps inside of backward, say): plan "
                "without measure=True, before the hook is there"
            )


def _quickest(times: Sequence[float | None]) -> float | None:
    if math.inf in times:
        return math.inf
    known = [each for each in times if each is not None]
    return min(known) if len(known) == len(times) else None
