"""Reports of plans: the peak of each size by its parts, and the largest size that fits."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from operator import itemgetter

from elastic_mbs.controller.peak import PeakModel
from elastic_mbs.escalation.ladder import Step
from elastic_mbs.events import format_bytes


@dataclass(frozen=True)
class PlannedSize:
    """A size in a plan.

    Attributes:
        size: samples of a piece.
        pieces: their number in the batch.
        parameters: bytes of parameters and buffers.
        gradients: bytes of gradients at the peak.
        optimizer: bytes of the optimizer's state; 0 where no optimizer was given.
        other: other bytes of the process: the batch, other models.
        activations: bytes of activations and temporaries at the peak of forward and backward.
        peak: bytes at the highest point of forward, backward and the optimizer's step, before any
            margin; None for a size beyond the traced ones.
        fits: True if that fits, margin included; None while the memory is not known.
        seconds: time of a call on the batch in pieces of that size, forward and backward; None
            before calls were timed at two sizes.
    """

    size: int
    pieces: int
    parameters: int
    gradients: int
    optimizer: int
    other: int
    activations: int
    peak: int | None
    fits: bool | None
    seconds: float | None = None


@dataclass(frozen=True)
class PlannedWay:
    """A way to run pieces: as they are, or with less memory and more time.

    Attributes:
        name: "none", or a step of `RecoveryOptions.escalate` by itself: "logits", "checkpoint (2
            of 8 blocks)", "tile", "offload".
        largest: the largest size that fits, in samples; 0 if none does.
        pieces: their number in the batch.
        work: multiplications and additions of a sample, as a multiple of those of "none"; None if
            the model has neither matmuls nor convolutions.
        moved: bytes of a sample that go to the host and come back.
        seconds: time of a call on the batch in these pieces: the measured γ times `work`, the
            measured δ times the operations, and the copies of `moved`; None while γ and δ are not
            known.
        pays: the least overhead of a piece (δ/γ, in samples) at which this way is faster than
            "none"; None if it never is, and for "none" and "offload".
        reason: why this way is impossible, or changes nothing; None if it is possible.
        peak: bytes at the highest point with the smallest piece, before any margin. Chunks and
            tiles are made smaller still where memory is short.
        until: bytes with which "none" takes no more time; None if that is never so or not known.
        step: the step itself; None for "none".
        model: the peak as a function of elements; None if the way is impossible.
    """

    name: str
    largest: int = 0
    pieces: int = 0
    work: float | None = None
    moved: int = 0
    seconds: float | None = None
    pays: float | None = None
    reason: str | None = None
    peak: int | None = None
    until: int | None = None
    step: Step | None = field(default=None, repr=False, compare=False)
    model: PeakModel | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class PlanReport:
    """The result of a plan; `str()` of it is a table.

    Attributes:
        samples: length of the batch.
        sizes: the whole batch, its halves, and the largest size that fits, largest first; empty
            without a plan.
        largest: the largest size that fits, in samples; 0 if none does, None if it is not known.
        capacity: bytes that the peaks are compared with; None if they are not known.
        usable: bytes of the capacity without the policy's margin.
        step: bytes at the peak of the optimizer's step; 0 if no optimizer was given.
        reason: why there is no plan; None if there is one.
        model: the peak as a function of elements; None without a plan.
        ways: the ways to make pieces; empty without `compare=True` or while the memory is not
            known.
    """

    samples: int
    sizes: tuple[PlannedSize, ...] = ()
    largest: int | None = None
    capacity: int | None = None
    usable: int | None = None
    step: int = 0
    reason: str | None = None
    model: PeakModel | None = field(default=None, repr=False, compare=False)
    ways: tuple[PlannedWay, ...] = ()

    @property
    def fastest(self) -> str | None:
        """The way with the least time for the batch; None if none fits or times are not known."""
        return None if self.chosen is None else self.chosen.name

    @property
    def chosen(self) -> PlannedWay | None:
        """The way named by `fastest`."""
        fitting = [way for way in self.ways if way.largest]
        if len(fitting) == 1 or (fitting and fitting[0].name == "none" and fitting[0].pieces == 1):
            # the only one that fits; or the batch is not split, and less work is faster
            return fitting[0]
        known = [(way.seconds, way) for way in fitting if way.seconds is not None]
        if not known or len(known) < len(fitting):
            return None
        return min(known, key=itemgetter(0))[1]  # of equals the first one: "none" is before others

    @property
    def why(self) -> str:
        """The reason why a way is the fastest, in words; empty where it is not known."""
        chosen = self.chosen
        if chosen is None:
            return ""
        none, fitting = self.ways[0], [way for way in self.ways if way.largest]
        if chosen is none and none.pieces == 1:
            return "the batch fits whole, and no other way has less work"
        if len(fitting) == 1:
            return "nothing else fits"
        if chosen is none:
            return f"{none.pieces} pieces cost less than the work or the copies of any other way"
        if not none.largest:
            return "the least time of the ways that fit; as it is, not even the smallest piece does"
        return (
            f"{_pieces(chosen)} in {_in_words(chosen.seconds)} s, and as it is "
            f"{_pieces(none)} in {_in_words(none.seconds)} s"
        )

    def __str__(self) -> str:
        """Return the verdict and the table."""
        if self.reason is not None:
            return f"no plan: {self.reason}. Training needs none: it finds its size by itself"
        rows = [[each.name for each in fields(PlannedSize)]]
        for planned in self.sizes:
            values = [getattr(planned, name) for name in rows[0]]
            sizes = ["?" if value is None else format_bytes(value) for value in values[2:-2]]
            rows.append(
                [
                    *map(str, values[:2]),
                    *sizes,
                    {True: "yes", False: "no", None: "?"}[planned.fits],
                    _in_words(planned.seconds),
                ]
            )
        step = [f"optimizer step: {format_bytes(self.step)}"] if self.step else []
        return "\n".join(
            [self._verdict(), *_table(rows), *step, *(self._comparison() if self.ways else [])]
        )

    def _comparison(self) -> list[str]:
        """Return the table of ways, with the fastest."""
        rows = [["way", "smallest needs", "largest", "pieces", "work", "moved", "seconds"]]
        notes = []
        for way in self.ways:
            work = "?" if way.work is None else f"{way.work:.2f} x"
            rows.append(
                [
                    way.name,
                    "?" if way.peak is None else format_bytes(way.peak),
                    str(way.largest),
                    str(way.pieces),
                    work,
                    format_bytes(way.moved),
                    _in_words(way.seconds),
                ]
            )
            if way.reason is not None:
                rows[-1][1:] = 6 * ["-"]
                notes.append(f"{way.name}: {way.reason}")
            elif way.pays is not None:
                notes.append(
                    f"{way.name}: faster than none where a piece costs as much time besides as "
                    f"{way.pays:.3g} samples take"
                )
        unknown = (
            "not known: no calls were timed at two sizes"
            if any(way.largest for way in self.ways)
            else "not even the smallest size fits"
        )
        fastest = unknown if self.chosen is None else f"{self.chosen.name} ({self.why})"
        return [*_table(rows), *notes, f"fastest: {fastest}"]

    def _verdict(self) -> str:
        if self.capacity is None or self.usable is None:
            return f"batch of {self.samples}; how much memory there is is not known: give budget="
        fit = f"pieces of {self.largest} fit" if self.largest else "not even the smallest size fits"
        return (
            f"batch of {self.samples}; {format_bytes(self.usable)} of "
            f"{format_bytes(self.capacity)} may be used: {fit}"
        )


def _pieces(way: PlannedWay) -> str:
    return f"{way.pieces} piece{'s' * (way.pieces > 1)}"


def _in_words(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds:.4g}"


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
