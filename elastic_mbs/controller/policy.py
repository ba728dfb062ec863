"""What the user allows, and how eager the controller is: two frozen values, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_mbs.batch.pieces import aligned, longest, piece_count
from elastic_mbs.errors import UsageError


@dataclass(frozen=True)
class Limits:
    """The sizes that are allowed, in samples."""

    minimum: int = 1  # no micro-batch is smaller, unless the batch is
    maximum: int | None = None  # none is larger
    align: int = 1  # sizes are multiples of it

    @property
    def floor(self) -> int:
        """The smallest aligned size that is not below the minimum."""
        return -(-self.minimum // self.align) * self.align

    def pieces(self, samples: int, size: int) -> int:
        """How many pieces of up to `size` a batch of so many samples is cut into."""
        return piece_count(samples, size, minimum=self.minimum, align=self.align)

    def longest(self, samples: int, size: int) -> int:
        """Length of the longest of these pieces."""
        return longest(samples, size, minimum=self.minimum, align=self.align)

    def clamp(self, size: int) -> int:
        """`size` aligned and brought between floor and maximum."""
        if self.maximum is not None:
            size = min(size, self.maximum)
        return max(self.floor, aligned(size, self.align))


@dataclass(frozen=True)
class Policy:
    """Which micro-batch sizes are allowed, and how eager the controller is to raise the size.

    Attributes:
        min_micro_batch_size: no micro-batch is smaller, in samples (unless the batch is). None: 1,
            or 2 where the model has BatchNorm: one sample has no statistics.
        max_micro_batch_size: none is larger.
        align: sizes are multiples of it (the last piece takes the rest), and of the groups of a
            model with `recipes.GhostBatchNorm2d`.
        grow: whether a size may rise. False: failures lower it, and nothing raises it again, not
            even a failure that memory does not explain. Only the user does, by
            `ElasticMBS.plan` or `load_state_dict`.
        seed: seed of the jitter; None draws one from the clock, so that two processes differ.
        patience: clean calls at one size before it can grow; one is enough for a size that has run
            clean with as much memory before.
        jitter: patience and cooldown are longer by up to this fraction, drawn at random, so that
            two processes on one device do not act in step.
        margin: fraction of the capacity that is kept free; less, down to 0.01, where each byte is
            counted (no allocator reserves more) and readings hardly fall from one to the next.
        min_gain: smallest saving of step time worth a change of size, as a fraction.
        cooldown: for so many times the seconds that a growth has lost by its failure nothing grows
            beyond what the memory seen then allows: such failures cost at most 1/cooldown of the
            time that is run.
        thrash_calls: calls in a row with allocator retries that count as a failure.
        changed: fraction by which capacity must rise to count as changed evidence.

    Raises:
        UsageError: a value out of range.
    """

    min_micro_batch_size: int | None = None
    max_micro_batch_size: int | None = None
    align: int = 1
    grow: bool = True
    seed: int | None = None
    patience: int = 4
    jitter: float = 0.25
    margin: float = 0.05
    min_gain: float = 0.005
    cooldown: float = 100.0
    thrash_calls: int = 2
    changed: float = 0.05

    def __post_init__(self) -> None:
        for name in (
            "min_micro_batch_size",
            "max_micro_batch_size",
            "align",
            "patience",
            "thrash_calls",
        ):
            value, optional = getattr(self, name), name.endswith("_micro_batch_size")
            if not (type(value) is int and value >= 1) and not (value is None and optional):
                raise UsageError(
                    f"{name}={value!r} must be {'None or ' if optional else ''}a whole number of "
                    "at least 1"
                )
        for name in ("jitter", "margin", "min_gain", "cooldown", "changed"):
            if not getattr(self, name) >= 0:
                raise UsageError(f"{name}={getattr(self, name)} must not be negative")
        limits = self.limits
        if limits.maximum is not None and limits.maximum < limits.floor:
            least = f"min_micro_batch_size={limits.minimum}, rounded up to a multiple of align={limits.align}, which is {limits.floor}"
            raise UsageError(
                f"max_micro_batch_size={limits.maximum} leaves no size: it must be at least {least}"
            )
        if not self.margin < 1:
            raise UsageError(
                f"margin={self.margin} leaves no memory: it is a fraction of the capacity, below 1"
            )

    @property
    def limits(self) -> Limits:
        """The sizes that are allowed."""
        return Limits(self.min_micro_batch_size or 1, self.max_micro_batch_size, self.align)
