"""Every place a call can fail: out of memory at every operation, and the outcome compared with a reference.

`python -m stress exhaustive`; see `command.py`.
"""

from __future__ import annotations

from ..state import WrongOutcomeError
from .run import PATTERNS, Run, run, sweep
from .target import Target, builtin, of_subject

__all__ = ["PATTERNS", "Run", "Target", "WrongOutcomeError", "builtin", "of_subject", "run", "sweep"]
