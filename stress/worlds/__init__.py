"""Where a run takes place: the ways of running out of memory, behind one protocol."""

from __future__ import annotations

from .world import World

__all__ = ["World"]
