"""What a plan says: the peak of each size by its parts, and the largest size that fits."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from elastic_mbs.controller.peak import PeakModel
from elastic_mbs.events import format_bytes


@dataclass(frozen=True)
class PlannedSize:
    """One size of a plan.

    Attributes:
        size: samples of a piece.
        pieces: how many of them the batch is cut into.
        parameters: bytes of parameters and buffers.
        gradients: bytes of gradients at the peak.
        optimizer: bytes of the optimizer's state; 0 where no optimizer was given.
        other: bytes that the process holds besides: the batch, other models.
        activations: bytes of activations and temporaries at the peak of forward and backward.
        peak: bytes at the highest point of forward, backward and the optimizer's step, before any margin; None for a size that
            nothing is known of.
        fits: whether that fits, margin included; None where it is not known how much there is.
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


@dataclass(frozen=True)
class PlanReport:
    """What a plan found; `str()` of it is a table.

    Attributes:
        samples: length of the batch.
        sizes: the whole batch, its halves, and the largest size that fits, largest first; empty where there is no plan.
        largest: the largest size that fits, in samples; 0 if none does, None where it is not known.
        capacity: bytes that the plan was held against; None where they are not known.
        usable: what the policy's margin leaves of them.
        step: bytes at the peak of the optimizer's step; 0 where no optimizer was given.
        reason: why there is no plan; None where there is one.
        model: the peak as a function of elements; None where there is no plan.
    """

    samples: int
    sizes: tuple[PlannedSize, ...] = ()
    largest: int | None = None
    capacity: int | None = None
    usable: int | None = None
    step: int = 0
    reason: str | None = None
    model: PeakModel | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        """The verdict and the table."""
        if self.reason is not None:
            return f"no plan: {self.reason}"
        rows = [[each.name for each in fields(PlannedSize)]]
        for planned in self.sizes:
            values = [getattr(planned, name) for name in rows[0]]
            sizes = ["?" if value is None else format_bytes(value) for value in values[2:-1]]
            rows.append([*map(str, values[:2]), *sizes, {True: "yes", False: "no", None: "?"}[planned.fits]])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([self._verdict(), *table, *([f"optimizer step: {format_bytes(self.step)}"] if self.step else [])])

    def _verdict(self) -> str:
        if self.capacity is None or self.usable is None:
            return f"batch of {self.samples}; how much memory there is is not known: give budget="
        fit = f"pieces of {self.largest} fit" if self.largest else "not even the smallest size fits"
        return f"batch of {self.samples}; {format_bytes(self.usable)} of {format_bytes(self.capacity)} may be used: {fit}"
