"""Trials of a batch: forward and backward of all its pieces, for their time alone."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
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
from elastic_mbs.rehearsal.no_trace import no_trace
from elastic_mbs.rollback.graph import has_hook, walk

RUNS = 2  # that are timed; the quickest counts
_LESS = 4  # the second size is so much smaller


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
        time = self._coefficients(report.largest) if report.largest else None
        steps = {way.step or NONE: way.largest for way in report.ways if way.largest}
        return Times(time, {step: self._seconds(size, step) for step, size in steps.items()})

    def _coefficients(self, largest: int) -> tuple[float, float] | None:
        """Return γ in seconds per element and δ in seconds per piece; None while not known.

        Args:
            largest: a size that fits.
        """
        limits, samples = self._resources.settings.limits, self._view.worth
        sizes = largest, max(limits.floor, largest // _LESS)
        few, many = (limits.pieces(samples, size) for size in sizes)
        if few == many:
            return None
        fast, slow = (self._seconds(size, NONE) for size in sizes)
        if fast is None or slow is None or math.isinf(fast) or math.isinf(slow):
            return None
        per_piece = max(0.0, (slow - fast) / (many - few))
        per_sample = max(0.0, fast - per_piece * few) / samples
        return per_sample / self._view.elements, per_piece

    # ------------------------------------------------------------------ one size, one way

    def _seconds(self, size: int, step: Step) -> float | None:
        """Return the time of the batch in pieces of a size, made in one way.

        Returns:
            Infinity where a piece runs out of memory, None where the device tells no time.
        """
        try:
            return self._timed(size, step)
        except Exception as error:
            if oom.classify(error, self._resources.settings.recovery.is_oom) is None:
                raise
            oom.clear_traceback(error)
        self._resources.release(thorough=True)
        return math.inf

    def _timed(self, size: int, step: Step) -> float | None:
        found = list[float | None]()
        with ExitStack() as undo:
            snapshot, kept = undo.enter_context(no_trace(self._resources, Trials, training=True))
            undo.callback(self._put_back)
            hooks = self._hooks(step, snapshot)
            with ExitStack() as first:  # this run shows what has to be put back
                if "torch._dynamo" in sys.modules:
                    first.enter_context(torch.compiler.set_stance("force_eager"))
                first.enter_context(kept)
                self._run(size, hooks, looks=True)
            for timed in (False, *RUNS * (True,)):  # the first one compiles, and fills caches
                snapshot.restore()
                kept.restore()
                watch = Stopwatch(self._resources.asynchronous)
                self._run(size, hooks)
                watch.stop()
                watch.done(wait=True)
                found += [watch.seconds()] * timed
        known = [each for each in found if each is not None]
        return min(known) if len(known) == len(found) else None

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
