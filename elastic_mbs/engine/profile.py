"""What is known of one loss function, over one set of trainable leaves."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from elastic_mbs.batch.containers import Path


@dataclass
class LossProfile:
    """What calls without a failure have shown of a loss function: it decides how a failed piece can be replayed."""

    # numbers of commits of clean backwards; several where the graph depends on the data (routing)
    commits: set[int] = field(default_factory=set)
    census_taken: bool = False
    # the census found leaves outside the model, so that each call takes it again
    extra_leaves: bool = False
    # leaves commit that the census does not reach, or commit twice in a backward: isolate
    hidden: bool = False
    # functions written in Python that have had a clean backward; they can run another one inside
    custom: set[str] = field(default_factory=set)
    draws: bool = False  # the step draws random numbers
    changes_buffers: bool = False
    normalises_batch: bool = False
    edits_batch: bool = False  # `loss_fn` edits its batch in place, so pieces are copies
    escalated: int = 0  # how many of `escalate` are in use
    # samples in the largest piece that has failed and could not be cut: no other one is copied to
    # the device beside it
    too_full: int = 0
    # outputs that come once per piece and not once per sample, by path
    per_piece: set[Path] = field(default_factory=set)

    @property
    def mixes(self) -> bool:
        """Whether a partly committed piece cannot be replayed in halves: they would draw other masks or see other statistics."""
        return self.draws or self.changes_buffers or self.normalises_batch

    @property
    def settled(self) -> bool:
        """Whether nothing is left to find out before a backward, and no gradient has to be set aside for it."""
        return bool(
            self.census_taken
            and self.commits
            and not (self.extra_leaves or self.hidden or self.custom)
        )


def graphs_made() -> int:
    """How many graphs torch.compile has made in this process."""
    # not imported here: it is large, and without it nothing is compiled
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def names_of(fn: Callable[..., Any]) -> tuple[str, object]:
    """What limits and sizes of a function are kept by, and what its profile is kept by: its qualified name, and its code, which closures share."""
    called: Any = getattr(fn, "func", fn)  # of a functools.partial
    if hasattr(called, "__wrapped__"):
        # a decorator's code is that of all it decorates (torch.autocast)
        called = inspect.unwrap(called)
    if type(called) is FunctionType:
        return called.__qualname__, called.__code__
    return getattr(called, "__qualname__", type(called).__qualname__), getattr(
        called, "__code__", type(called)
    )
