"""What is known of one kind of call, for people to read: peak memory and time as functions of the micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_mbs.controller.fit import MemoryFit
from elastic_mbs.controller.peak import PeakModel
from elastic_mbs.controller.track import WHOLE, Track

KNEE = 10  # times δ/γ: a piece of more samples runs at 10/11 of the best speed or faster


@dataclass(frozen=True)
class SizeModel:
    """Peak memory and time of one kind of call as functions of the micro-batch m, as they are known now.

    A step of B samples takes γ·B + δ·B/m seconds, so pieces of m samples run at m/(m + δ/γ) of the
    best speed (PAPAYA, arXiv 2303.14633).

    Attributes:
        size: the micro-batch in samples; None while the whole batch has never failed.
        elements: of a sample, the longest one of late.
        seconds_per_sample: γ; None while no two sizes far enough apart were timed.
        seconds_per_piece: δ; None likewise.
        spread: by how much of a predicted peak a measured one was off, at most; None where the peak
            was not planned (see `ElasticMBS.plan`).
    """

    size: int | None
    elements: int
    seconds_per_sample: float | None
    seconds_per_piece: float | None
    spread: float | None
    _memory: MemoryFit | PeakModel

    @classmethod
    def of(cls, track: Track) -> SizeModel:
        """What a track knows."""
        elements, fitted = track.expected()[1], track.time.coefficients()
        gamma, delta = (None, None) if fitted is None else (fitted[0] * elements, fitted[1])
        # a copy: the track goes on learning
        memory = type(track.memory).restored(track.memory.state())
        spread = memory.spread if isinstance(memory, PeakModel) else None
        return cls(
            None if track.size >= WHOLE // elements else track.size,
            elements,
            gamma,
            delta,
            spread,
            memory,
        )

    @property
    def knee(self) -> float | None:
        """The size above which more saves less than a tenth: 10·δ/γ samples; None while it is not known."""
        return (
            None
            if not self.seconds_per_sample or self.seconds_per_piece is None
            else KNEE * self.seconds_per_piece / self.seconds_per_sample
        )

    def efficiency(self, size: int) -> float | None:
        """The speed of pieces of `size` samples, as a fraction of the best; None while it is not known."""
        return None if self.knee is None else size / (size + self.knee / KNEE)

    def seconds(self, size: int) -> float | None:
        """Seconds of a piece of `size` samples; None while it is not known."""
        known = self.seconds_per_sample is not None and self.seconds_per_piece is not None
        return self.seconds_per_sample * size + self.seconds_per_piece if known else None  # type: ignore[operator]  # both are numbers then

    def peak(self, size: int) -> int | None:
        """Predicted peak in bytes in pieces of `size` samples; None where it is not known, or too far from what was measured."""
        predicted = self._memory.predict(size * self.elements)
        return None if predicted is None else round(predicted)
