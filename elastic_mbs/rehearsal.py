"""What runs without a call of the engine: `verify` and `plan` beside the training loop, and the plain pass of a runtime that is not enabled."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.optim import Optimizer

from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.reader import BatchReader
from elastic_mbs.batch.view import BatchView
from elastic_mbs.controller.messages import Key, shape_class
from elastic_mbs.disabled import DisabledPass
from elastic_mbs.engine.micro_batch import MicroBatch
from elastic_mbs.engine.outcome.result import StepResult
from elastic_mbs.engine.shared.knowledge import Knowledge, names_of
from elastic_mbs.engine.shared.resources import Resources
from elastic_mbs.engine.shared.running import check_function, running_call
from elastic_mbs.errors import NestedCallError, UsageError
from elastic_mbs.memory.sensor import parse_bytes
from elastic_mbs.planning.plan import Budget, plan
from elastic_mbs.planning.report import PlanReport
from elastic_mbs.verify import VerifyReport, verify

LossFn = Callable[..., Any]
Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]  # that are passed on to it
NONE: Arguments = ((), {})
Cap = int | str | None  # in bytes, or such as "8GiB"


class Rehearsal:
    """Runs of one runtime without a call."""

    def __init__(self, resources: Resources, knowledge: Knowledge, batches: BatchReader) -> None:
        self._totals: Any = None  # counts of the batch that runs
        self._resources, self._knowledge = resources, knowledge
        self._batches = batches

    @property
    def total(self) -> Any:
        """See `ElasticMBS.total`."""
        if self._totals is None:
            raise UsageError("mbs.total is known only while a batch runs: read it inside loss_fn")
        return self._totals

    def verify(self, loss_fn: LossFn, batch: Any, given: Arguments, samples: int) -> VerifyReport:
        """See `ElasticMBS.verify`."""
        _check_no_loss("verify", given)
        with self._of("verify", loss_fn, lambda: self._batches.first(batch, samples)) as (
            few,
            counts,
        ):
            return verify(
                self._resources, few, counts, lambda piece: loss_fn(piece, *given[0], **given[1])
            )

    def plan(
        self,
        loss_fn: LossFn,
        batch: Any,
        given: Arguments,
        optimizer: Optimizer | None,
        budget: Cap,
        *,
        compare: bool,
    ) -> PlanReport:
        """See `ElasticMBS.plan`."""
        _check_no_loss("plan", given)
        capacity, name = None if budget is None else parse_bytes(budget), names_of(loss_fn)[0]
        read = partial(self._batches.read, batch, name, given, training=True)
        with self._of("plan", loss_fn, read) as (view, counts):
            key, controller = (
                Key(name, "train", shape_class(view.elements)),
                self._knowledge.controller,
            )
            there = Budget(capacity, controller.time(key))
            report = plan(
                self._resources,
                view,
                counts,
                lambda piece: loss_fn(piece, *given[0], **given[1]),
                optimizer,
                there,
                compare=compare,
            )
        if report.model is not None and report.largest is not None:
            controller.planned(key, view.worth, view.elements, report.model, report.largest)
        return report

    def whole(self, batch: Any, *, counted: bool = True) -> Generator[MicroBatch, None, StepResult]:
        """The batch in one piece; returns what came of it.

        Where nothing is counted the loss is one of the whole batch.
        """
        batch = self._resources.load(batch)
        totals, length = self._batches.totals(batch)
        whole = DisabledPass(
            self._resources.settings,
            batch,
            self._batches.count_names if counted else None,
            totals,
            length,
        )
        self._totals = totals
        try:
            yield whole.micro
        finally:
            self._totals = None
        return whole.result()

    @contextmanager
    def _of(
        self, door: str, loss_fn: LossFn, read: Callable[[], tuple[BatchView, Counts]]
    ) -> Iterator[tuple[BatchView, Counts]]:
        check_function(loss_fn, f"{door}(loss_fn, batch)")
        if running_call() is not None:
            raise NestedCallError(
                f"{door}() was called inside a step function; call it beside the training loop"
            )
        self._resources.follow_model()
        found = self._resources.retry("look at the batch", read)
        self._totals = found[1].total
        try:
            yield found
        finally:
            self._totals = None


def _check_no_loss(door: str, given: Arguments) -> None:
    if callable(given[1].get("loss")):
        raise UsageError(
            f"{door}() takes no loss=: a loss over the embeddings of the whole batch is no sum "
            "over pieces. Leave it out"
        )
