"""For tests of training code: memory that runs out where a test wants it to.

`MemoryBudget` is a device of a given size; `InjectOOM` makes chosen operations fail, whatever there is.
"""

from __future__ import annotations

from elastic_mbs.memory import MemoryBudget
from elastic_mbs.testing.injection import InjectOOM

__all__ = ["InjectOOM", "MemoryBudget"]
