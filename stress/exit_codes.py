"""How a run of `montecarlo`, `exhaustive`, `hammer` or `soak` has ended, for scripts: the highest of several. 2 is bad input, as everywhere."""

from __future__ import annotations

PASSED = 0
WRONG = 3
"""A gradient, a buffer, a random stream, an event or what is left in memory is not what it has to be."""
UNEXPECTED = 4
"""An error that is none of ours, or none that may come of running out of memory."""
HANG = 5
"""Not done within its deadline."""
