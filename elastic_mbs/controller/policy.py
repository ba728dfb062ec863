"""The sizes that the user allows, and the rules of growth: frozen, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_mbs.batch.pieces import aligned, longest, piece_count
from elastic_mbs.errors import UsageError


@dataclass(frozen=True)
class Limits:
    """The micro-batch sizes that are allowed, in samples."""

    minimum: int = 1  # no micro-batch is smaller, unless the batch is
    maximum: int | None = None  # no micro-batch is larger
    align: int = 1  # sizes are multiples of it

    @property
    def floor(self) -> int:
        """The smallest aligned size that is not below the minimum."""
        return -(-self.minimum // self.align) * self.align

    def pieces(self, samples: int, size: int) -> int:
        """Return the number of pieces of up to `size` samples that a batch is cut into."""
        return piece_count(samples, size, minimum=self.minimum, align=self.align)

    def longest(self, samples: int, size: int) -> int:
        """Return the length of the longest of these pieces."""
        return longest(samples, size, minimum=self.minimum, align=self.align)

    def clamp(self, size: int) -> int:
        """Return `size`, aligned and brought between the floor and the maximum."""
        if self.maximum is not None:
            size = min(size, self.maximum)
        return max(self.floor, aligned(size, self.align))


@dataclass(frozen=True)
class Policy:
    """The micro-batch sizes that are allowed, and the rules by which the size grows.

    Attributes:
        min_micro_batch_size: no micro-batch is smaller, in samples, unless the batch is. None: 1,
            or 2 where the model has BatchNorm, because one sample has no statistics.
        max_micro_batch_size: no micro-batch is larger, in samples. None: no limit.
        max_tokens: no micro-batch has more tokens, its padding counted: for
            `pieces="by_length"`, and for packed rows. A sample that is longer is a micro-batch by
            itself. None: no limit.
        align: sizes are multiples of it; the last piece takes the rest. With
            `recipes.GhostBatchNorm2d` in the model they are multiples of its groups, too.
        grow: False: the size never rises. A failure lowers it, and nothing in training raises it
            again. Only the user does, with `ElasticMBS.plan` or `ElasticMBS.load_state_dict`.
        seed: seed of the jitter. None: drawn from the clock, so that two processes differ.
        patience: clean calls at one size before it may grow. One is enough to go back to a size
            that has run clean with the memory that is there now.
        jitter: patience and cooldown are lengthened at random by up to this fraction, so that two
            processes on one device do not act in step.
        margin: fraction of the capacity that stays free. It shrinks to 0.01 when usage is exact
            (no allocator reserves more) and readings are stable.
        min_gain: smallest saving of step time that is worth a change of size, as a fraction. A
            whole batch that has run clean with the memory that is there now comes back in any case.
        cooldown: after a failed growth that cost t seconds, do not grow beyond the memory seen
            then for cooldown × t seconds. Failed growths cost at most 1/cooldown of the time.
        thrash_calls: consecutive calls with allocator retries that count as a failure.
        changed: fraction by which the capacity must rise before a size that failed is tried again.

    Raises:
        UsageError: a value is out of range.
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
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("min_micro_batch_size", "max_micro_batch_size", "max_tokens"):
            _check_whole(name, getattr(self, name), optional=True)
        for name in ("align", "patience", "thrash_calls"):
            _check_whole(name, getattr(self, name))
        for name in ("jitter", "margin", "min_gain", "cooldown", "changed"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and value >= 0):  # NaN is refused, too
                raise UsageError(f"{name}={value!r} must be a number of at least 0")
        if not isinstance(self.seed, int | None):
            raise UsageError(f"seed={self.seed!r} must be None or a whole number")
        if not self.margin < 1:
            raise UsageError(
                f"margin={self.margin} leaves no memory: it is a fraction of the capacity, below 1"
            )
        limits = self.limits
        if self.max_tokens is not None and limits.floor > 1:
            least = "min_micro_batch_size" if limits.minimum > 1 else "align"
            raise UsageError(
                f"max_tokens={self.max_tokens} limits a piece to its tokens, and "
                f"{least}={getattr(self, least)} asks for more than one sample, however long: "
                "leave one of them out"
            )
        if limits.maximum is not None and limits.maximum < limits.floor:
            raise UsageError(
                f"max_micro_batch_size={limits.maximum} leaves no size: it must be at least "
                f"min_micro_batch_size={limits.minimum}, rounded up to a multiple of "
                f"align={limits.align}, which is {limits.floor}"
            )

    @property
    def limits(self) -> Limits:
        """The sizes that are allowed."""
        return Limits(self.min_micro_batch_size or 1, self.max_micro_batch_size, self.align)


def _check_whole(name: str, value: object, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if type(value) is not int or value < 1:
        kind = "None or a whole number" if optional else "a whole number"
        raise UsageError(f"{name}={value!r} must be {kind} of at least 1")
