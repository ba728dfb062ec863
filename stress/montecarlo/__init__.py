"""Random cases against a reference: `python -m stress montecarlo`. A case is a `Plan`; `run_trial` runs one and checks all that comes out of it."""

from __future__ import annotations

from ..repeat import case_seed
from .plan import Fault, Plan, draw
from .totals import Outcome
from .trial import run_trial

__all__ = ["Fault", "Outcome", "Plan", "case_seed", "draw", "run_trial"]
