"""Training for a long time under memory that comes and goes: `python -m stress soak`. `trend.py` judges what `job.py` measures."""

from __future__ import annotations

from ..endurance.trend import LIMITS, Sample, complaints, rise

__all__ = ["LIMITS", "Sample", "complaints", "rise"]
