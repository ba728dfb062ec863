"""Every place where a call can fail, and the outcome compared with a reference.

`python -m stress exhaustive`; see `command.py`.
"""

from __future__ import annotations

from .run import run
from .strike import PATTERNS, Lines, Operations
from .sweep import Sweep
from .target import builtin

__all__ = ["PATTERNS", "Lines", "Operations", "Sweep", "builtin", "run"]
