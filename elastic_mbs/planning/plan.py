"""A plan: the model of the peak, the largest size that fits, and a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from torch._subclasses import fake_tensor
from torch.optim import Optimizer

from elastic_mbs.batch.containers import tensors_in
from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.view import BatchView
from elastic_mbs.controller.peak import PeakModel
from elastic_mbs.engine.shared.resources import Resources
from elastic_mbs.errors import ElasticMBSError, UsageError
from elastic_mbs.escalation.ladder import Step
from elastic_mbs.escalation.largest import Origin, names_of, origin_of_error
from elastic_mbs.memory import Headroom, oom
from elastic_mbs.planning import kept
from elastic_mbs.planning.fakes import Fakes, storage_bytes
from elastic_mbs.planning.lines import Lines, Trace, lines_of
from elastic_mbs.planning.outside import Outside
from elastic_mbs.planning.report import PlannedSize, PlannedWay, PlanReport
from elastic_mbs.planning.timeline import OpaqueKernelError, SparseError
from elastic_mbs.planning.trace import Tracer, UntraceableStepError
from elastic_mbs.planning.ways import (
    NONE,
    NOTHING,
    Known,
    NoWayError,
    seconds_to_move,
    ways_of,
    weighed,
)

_REASONS: dict[type[Exception], str] = {
    fake_tensor.DataDependentOutputException: "loss_fn reads the value of a tensor (.item(), `if "
    "tensor`), and fake tensors have none: plan with a loss_fn that has a constant in its place",
    fake_tensor.DynamicOutputShapeException: "loss_fn has an operation whose output has a shape "
    "that depends on values (a mask as an index, nonzero): plan with a loss_fn that has indices of "
    "a fixed number in its place",
    fake_tensor.UnsupportedOperatorException: "loss_fn has an operation that cannot say what "
    "shapes it makes: see torch.library.register_fake",
    OpaqueKernelError: "an LSTM runs as a kernel of oneDNN, whose fake does not show what it keeps "
    "for its backward",
    SparseError: "the gradient of a sparse embedding is as large as the rows that a batch has, and "
    "fake tensors do not know them: plan with sparse=False, where it is as large as the weight",
    UntraceableStepError: "the optimizer's step cannot be traced, plan without optimizer=",
}

_NUMPY = (
    "loss_fn hands a tensor to numpy (a matching of boxes by scipy, say), and fake tensors have no "
    "values: plan with a loss_fn that has a fixed result in its place"
)


def plan(
    context: Resources,
    view: BatchView,
    counts: Counts,
    loss_fn: Callable[[Any], Any],
    optimizer: Optimizer | None,
    budget: Budget,
    *,
    compare: bool,
) -> PlanReport:
    """Trace a step on fake tensors and change nothing; see `ElasticMBS.plan`.

    With `compare`, the ways that need less memory and more work are traced too.
    """
    if len(context.devices) > 1:
        return PlanReport(
            view.length,
            reason=f"the model is on {len(context.devices)} devices, and a plan is for one",
        )
    streams, outside = context.streams.read(hosts=True), Outside(loss_fn)
    mark, reason = object(), None
    try:
        traced = _trace(context, view, counts, loss_fn, optimizer, outside, mark, compare=compare)
    except Exception as error:
        where = origin_of_error(error, names_of(context.model.roots))
        oom.clear_traceback(error)  # its frames hold fakes
        if isinstance(error, ElasticMBSError):  # a mistake that training would find as well
            _check_nothing_kept(mark, error)
            raise
        reason = _why(error, where)
    finally:
        context.streams.restore(streams)
        outside.put_back()
    _check_nothing_kept(mark)
    return traced.report(budget) if reason is None else PlanReport(view.length, reason=reason)


class Budget(NamedTuple):
    """The memory that may be used, and the measured time."""

    memory: int | None  # bytes; None: the present capacity of this process
    # γ, in seconds per element, and δ, in seconds per piece; None before calls have shown them
    time: tuple[float, float] | None


def _trace(
    context: Resources,
    view: BatchView,
    counts: Counts,
    loss_fn: Callable[[Any], Any],
    optimizer: Optimizer | None,
    outside: Outside,
    mark: object,
    *,
    compare: bool,
) -> _Traced:
    """Return the findings. All fakes are marked.

    The tracer is made here and dies here. Passed in as an argument it could outlive the traces:
    where a frame evaluator is installed (as by a `torch.compile` that failed), the caller's
    evaluation stack holds the arguments of a running function.
    """
    tracer = Tracer(context, view, counts, loss_fn, Fakes(mark))
    modules = dict.fromkeys([*context.model.modules, *outside.modules])
    with tracer.fakes.inside(list(modules)):
        floor = context.settings.policy.limits.floor
        lines = lines_of(partial(tracer.piece, count=compare), floor, view.worth, view.elements)
        every = ways_of(context.model.modules) if compare else []
        ways = {way: _lines_of(way, tracer, floor, lines.largest) for way in every}
        state, step = (0, 0) if optimizer is None else tracer.step(optimizer)
    return _Traced(context, view, optimizer, lines, ways, state, step)


def _check_nothing_kept(mark: object, error: ElasticMBSError | None = None) -> None:
    """Refuse a loss function that keeps tensors: training could not use the fakes.

    Args:
        mark: of the fakes.
        error: is on its way already, and gets a note.

    Raises:
        UsageError: fakes are kept, and no error is on its way.
    """
    count, found = kept.places(mark)
    if not count:
        return
    where = ", ".join(found) or "a place without a name"
    text = (
        f"planning has left {count} fake tensor{'s' * (count > 1)}, which training cannot use, in "
        f"{where}: loss_fn, or something that it calls, keeps what it makes. Clear that place. "
        "Then plan with a loss_fn that keeps nothing, or, where it is a cache, run a batch before "
        "the plan (mbs.verify does), so that the cache holds real tensors"
    )
    if error is None:
        raise UsageError(text)
    error.add_note(f"elastic_mbs: {text}")


def _lines_of(way: Step, tracer: Tracer, floor: int, none: Trace) -> Lines | str:
    """Return the lines of pieces made in this way, or the reason why there are none.

    Args:
        way: the way.
        tracer: makes the traces.
        floor: samples of the smallest piece.
        none: the largest piece that was traced without any way.
    """
    samples = tracer.view.worth
    try:  # from half the batch on: some tensors of a small piece are too small to be moved
        found = lines_of(
            partial(tracer.piece, way=way, count=True),
            max(floor, samples // 2),
            samples,
            tracer.view.elements,
        )
        same = found.largest.operations == none.operations and way.rung in NOTHING
        return NOTHING[way.rung] if same else found
    except (ElasticMBSError, NoWayError) as error:
        return str(error)
    except Exception as error:
        return _why(error, origin_of_error(error, names_of(tracer.context.model.roots)))


def _why(error: Exception, where: Origin) -> str:
    known = next(
        (words for kind, words in _REASONS.items() if isinstance(error, kind)),
        _NUMPY if ".numpy()" in str(error) else "loss_fn cannot be traced on fake tensors",
    )
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    at = ", ".join(filter(None, [type(error).__name__, str(where)]))
    return f"{known} ({at}: {text[:200]})"


@dataclass
class _Traced:
    """The findings of the traces, and the memory of the process beside them."""

    context: Resources
    view: BatchView
    optimizer: Optimizer | None
    lines: Lines
    ways: Mapping[Step, Lines | str]
    state: int  # bytes of the optimizer's state, once it is there
    step: int  # bytes at the peak of its step beyond state and gradients

    def report(self, budget: Budget) -> PlanReport:
        context, samples = self.context, self.view.worth
        reading = context.monitor.read_now()
        seen = reading if isinstance(reading, Headroom) and reading.doubt is None else None
        capacity = seen.capacity if budget.memory is None and seen is not None else budget.memory
        usable = None if capacity is None else int(capacity * (1 - context.settings.policy.margin))
        parameters, other = self._held(seen)
        step = 0 if self.optimizer is None else self.lines.gradients + self.step
        held = parameters + other + self.state
        model = self._model(self.lines, held, step)
        largest = None if usable is None else self._largest(model, usable)
        time = (
            None if budget.time is None else (budget.time[0] * self.view.elements, budget.time[1])
        )
        sizes = {self._clamp(-(-samples >> k)) for k in range(samples.bit_length())} | {
            largest or 0
        }
        rows = tuple(
            self._row(model, size, parameters, other, usable, time)
            for size in sorted(sizes - {0}, reverse=True)
        )
        ways = (
            self._weighed(largest, usable, held, step, time)
            if usable is not None and largest is not None
            else ()
        )
        return PlanReport(
            self.view.length,
            rows,
            largest,
            capacity,
            usable,
            step and held + step,
            None,
            model,
            ways,
        )

    def _weighed(
        self, largest: int, usable: int, held: int, step: int, time: tuple[float, float] | None
    ) -> tuple[PlannedWay, ...]:
        """Return every way with its cost; empty unless ways were traced."""
        known = Known(
            time,
            seconds_to_move(self.context.devices[0]) if time is not None and self.ways else None,
        )
        of = partial(
            weighed,
            none=self.lines.largest,
            samples=self.view.worth,
            before=self._pieces(largest),
            known=known,
        )
        plain = self._model(self.lines, held, step)
        found = list[PlannedWay]()
        every = {NONE: self.lines, **self.ways} if self.ways else {}
        for way, lines in every.items():
            if isinstance(lines, str):
                found.append(PlannedWay(str(way), reason=lines))
                continue
            model = self._model(lines, held, step)
            size = largest if way == NONE else self._largest(model, usable)
            peak = self._least(model, size)
            planned = of(
                way, trace=lines.largest, largest=size, pieces=self._pieces(size), peak=peak
            )
            until = None if way == NONE or not size else self._until(planned, plain, largest, time)
            found.append(
                replace(planned, until=until, step=None if way == NONE else way, model=model)
            )
        return tuple(found)

    def _until(
        self, way: PlannedWay, plain: PeakModel, largest: int, time: tuple[float, float] | None
    ) -> int | None:
        """Return the bytes with which the batch takes no more time without a way that fits.

        Args:
            way: the way.
            plain: the peak without it.
            largest: the largest size that fits without it, in samples; 0 if none does.
            time: seconds of a sample and of a piece without it; None while they are not known.
        """
        samples = self.view.worth
        if way.seconds is None or time is None:
            # Where nothing fits without it, any size that does is better than none.
            floor = min(self.context.settings.policy.limits.floor, samples)
            return None if largest else self._needed(plain, floor)
        per_sample, per_piece = time
        over = way.seconds - per_sample * samples  # that pieces may take
        pieces = min(samples, int(over / per_piece)) if per_piece else samples
        size = self._clamp(-(-samples // pieces)) if pieces > 0 else 0
        return self._needed(plain, size) if size else None

    def _needed(self, model: PeakModel, size: int) -> int | None:
        """Return the bytes that pieces of a size need, with the policy's margin."""
        peak = model.predict(size * self.view.elements, first=self._is_first(size))
        return None if peak is None else round(peak / (1 - self.context.settings.policy.margin))

    def _least(self, model: PeakModel, largest: int) -> int | None:
        """Return the peak of the smallest piece, in bytes; None where it is not known.

        Tiles of small pieces are not as long as those of large ones, so the line through the large
        ones can be too high. A smaller piece needs no more than the largest one that fits.
        """
        floor = min(self.context.settings.policy.limits.floor, self.view.worth)
        sizes, first = [floor, largest] if largest else [floor], self._is_first(floor)
        peaks = [model.predict(size * self.view.elements, first=first) for size in sizes]
        return round(min(each for each in peaks if each is not None)) if any(peaks) else None

    def _pieces(self, size: int) -> int:
        return self.context.settings.policy.limits.pieces(self.view.worth, size) if size else 0

    def _held(self, seen: Headroom | None) -> tuple[int, int]:
        """Return the bytes of parameters and buffers, and of the rest of the process.

        Gradients and optimizer state are in neither.
        """
        context = self.context
        now = context.meter.usage()
        device = context.devices[0]
        owned = [
            tensor
            for root in context.model.roots
            for tensor in (*root.parameters(), *root.buffers())
        ]
        parameters = storage_bytes(owned, device)
        gradients = storage_bytes([leaf.grad for leaf in context.model.leaves], device)
        state = (
            0
            if self.optimizer is None
            else storage_bytes(tensors_in(list(self.optimizer.state.values())), device)
        )
        ours = (
            now.allocated
            if now is not None
            else seen.capacity - seen.free
            if seen is not None
            else 0
        )
        return parameters, max(0, ours - parameters - gradients - state)

    def _model(self, found: Lines, held: int, step: int) -> PeakModel:
        """Return the model of the peak, for pieces that find gradients and for a call's only piece.

        An isolated piece makes gradients once more, beside those that are kept. Pieces are isolated
        on request, and where gradients are there when a call begins.
        """
        settings, lines = self.context.settings, found.lines
        isolates = settings.isolates or not self._starts_empty()
        wide = settings.gradients.accumulate_dtype
        kept = found.gradients
        if not isolates:
            return PeakModel(
                [line._replace(fixed=kept) for line in lines],
                lines,
                held=held,
                step=step,
                reach=found.reach,
            )
        if wide is not None:
            kept = sum(
                leaf.numel() * max(wide.itemsize, leaf.itemsize)
                for leaf in self.context.model.leaves
            )
        lines = [line._replace(fixed=kept + line.fixed) for line in lines]
        return PeakModel(lines, lines, held=held, step=step, reach=found.reach)

    def _clamp(self, size: int) -> int:
        """Return the size as the policy allows it; 0 if it allows none so small."""
        limits = self.context.settings.policy.limits
        whole = size == self.view.worth and (limits.maximum is None or size <= limits.maximum)
        return size if whole else limits.clamp(size) if size >= limits.floor else 0

    def _is_first(self, size: int) -> bool:
        """Return whether a piece of that size is a whole call that begins without gradients."""
        return size >= self.view.length and self._starts_empty()

    def _starts_empty(self) -> bool:
        """Return whether no leaf of the model has a gradient now."""
        return all(leaf.grad is None for leaf in self.context.model.leaves)

    def _largest(self, model: PeakModel, usable: int) -> int:
        samples, elements = self.view.worth, self.view.elements
        if self._clamp(samples) == samples and model.fits(
            samples * elements, usable, first=self._is_first(samples)
        ):
            return samples
        return self._clamp(model.largest(usable, samples * elements) // elements)

    def _row(
        self,
        model: PeakModel,
        size: int,
        parameters: int,
        other: int,
        usable: int | None,
        time: tuple[float, float] | None,
    ) -> PlannedSize:
        x, first = size * self.view.elements, self._is_first(size)
        line, peak = model.line(x, first=first), model.predict(x, first=first)
        pieces = self._pieces(size)
        seconds = None if time is None else time[0] * self.view.worth + time[1] * pieces
        fits = None if usable is None else model.fits(x, usable, first=first)
        at_peak = (parameters, round(line.fixed), self.state, other, round(line.at(x) - line.fixed))
        return PlannedSize(
            size, pieces, *at_peak, None if peak is None else round(peak), fits, seconds
        )
