"""The size model: peak memory and time of one kind of call by micro-batch, for people to read."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_mbs.controller.memory_model import MemoryModel
from elastic_mbs.controller.peak import PeakModel
from elastic_mbs.controller.track import WHOLE, Track

KNEE = 10  # times δ/γ: pieces of more samples run at 10/11 of the best speed or faster


@dataclass(frozen=True)
class SizeModel:
    """Peak memory and time of one kind of call, as functions of the micro-batch m in samples.

    A step of B samples takes γ·B + δ·B/m seconds, so pieces of m samples run at m/(m + δ/γ) of the
    best speed (PAPAYA, arXiv 2303.14633).

    Attributes:
        size: the micro-batch in samples; None while the whole batch has never failed.
        elements: elements of the longest sample of late.
        seconds_per_sample: γ; None until two sizes far enough apart were timed.
        seconds_per_piece: δ; None likewise.
        spread: largest error of a predicted peak so far, as a fraction; None where the peak was not
            planned (see `ElasticMBS.plan`).
    """

    size: int | None
    elements: int
    seconds_per_sample: float | None
    seconds_per_piece: float | None
    spread: float | None
    _memory: MemoryModel

    @classmethod
    def of(cls, track: Track) -> SizeModel:
        """Return the present knowledge of a track; it does not follow the track afterwards."""
        elements = track.expected()[1]
        gamma = delta = None
        fitted = track.time.coefficients()
        if fitted is not None:
            gamma, delta = fitted[0] * elements, fitted[1]
        memory = type(track.memory).restored(track.memory.state())
        return cls(
            None if track.size >= WHOLE // elements else track.size,
            elements,
            gamma,
            delta,
            memory.at(elements).spread if isinstance(memory, PeakModel) else None,
            memory,
        )

    @property
    def knee(self) -> float | None:
        """The size above which a larger one saves less than a tenth: 10·δ/γ samples.

        None while it is not known.
        """
        if not self.seconds_per_sample or self.seconds_per_piece is None:
            return None
        return KNEE * self.seconds_per_piece / self.seconds_per_sample

    def efficiency(self, size: int) -> float | None:
        """Return the speed of pieces of `size` samples as a fraction of the best; None: unknown."""
        return None if self.knee is None else size / (size + self.knee / KNEE)

    def seconds(self, size: int) -> float | None:
        """Return the seconds of a piece of `size` samples; None while they are not known."""
        if self.seconds_per_sample is None or self.seconds_per_piece is None:
            return None
        return self.seconds_per_sample * size + self.seconds_per_piece

    def peak(self, size: int) -> int | None:
        """Return the predicted peak in bytes of pieces of `size` samples.

        None where it is not known, or too far from the sizes measured.
        """
        predicted = self._memory.at(self.elements).predict(size * self.elements)
        return None if predicted is None else round(predicted)
