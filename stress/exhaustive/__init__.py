"""Every place a call can fail, and the outcome compared with a reference: `python -m stress exhaustive`; see `command.py`."""

from __future__ import annotations

from .run import DAMAGED, RAW, WRONG, Outcome, run
from .strike import PAIR, PATTERNS, Lines, Operations
from .sweep import Sweep
from .target import Target, builtin, of_subject

__all__ = ["DAMAGED", "PAIR", "PATTERNS", "RAW", "WRONG", "Lines", "Operations", "Outcome", "Sweep", "Target", "builtin", "of_subject", "run"]
