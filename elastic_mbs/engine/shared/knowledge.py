"""The knowledge that finished calls leave to later ones: sizes, loss functions, the noise scale."""

from __future__ import annotations

import inspect
import random
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from elastic_mbs.batch.containers import Path
from elastic_mbs.controller.controller import Controller
from elastic_mbs.controller.messages import CallOutcome, Key
from elastic_mbs.engine.outcome.timing import Timed
from elastic_mbs.escalation.autotune import Autotune
from elastic_mbs.escalation.head import OtherLayers
from elastic_mbs.escalation.ladder import Ladder
from elastic_mbs.escalation.position_wise import PositionWise
from elastic_mbs.noise_scale import Smoothed
from elastic_mbs.options import Settings


@dataclass
class LossProfile:
    """The facts that calls have shown about one loss function, over one set of trainable leaves.

    They decide the work before a backward and the replay of a failed piece. But for
    `changes_buffers`, a fact that was seen once is never taken back.
    """

    # Numbers of commits of clean backwards. There are several where the graph depends on the data.
    commits: set[int] = field(default_factory=set)
    census_taken: bool = False
    # The census found leaves outside the model. Each call then takes it again.
    extra_leaves: bool = False
    # Python functions in the graph. Their backward can run another one inside.
    custom: set[str] = field(default_factory=set)
    draws: bool = False  # the step draws random numbers
    changes_buffers: bool = False
    normalises_batch: bool = False
    edits_batch: bool = False  # it edits its batch in place: pieces are copies
    seen: bool = False  # a call has ended, so it is known what else it changes
    ladder: Ladder = field(default_factory=Ladder)  # the steps of `escalate` that are in use
    # Of the linear layers, those whose output is more than the logits of a cross-entropy.
    other_layers: OtherLayers = field(default_factory=OtherLayers)
    position_wise: PositionWise = field(default_factory=PositionWise)  # the modules that are
    # Samples in the largest piece that failed and could not be cut. No piece is prefetched beside
    # one of that size.
    too_full: int = 0
    # Failures and samples run again in a call that was begun again: they count for the next one.
    carried: tuple[int, int] = (0, 0)
    compared: bool = False  # whole and pieces were compared, see `GradientOptions.verify`
    # Paths of outputs that come once per piece and not once per sample.
    per_piece: set[Path] = field(default_factory=set)

    @property
    def mixes(self) -> bool:
        """True if a sample's contribution can depend on the piece that it is in."""
        return self.draws or self.changes_buffers or self.normalises_batch

    @property
    def settled(self) -> bool:
        """True if a backward needs neither a census nor isolation."""
        return bool(self.census_taken and self.commits and not (self.extra_leaves or self.custom))

    def learn_census(self, *, normalises_batch: bool) -> None:
        """Record that a census was taken, and whether the graph normalises over the batch."""
        self.census_taken = True
        self.normalises_batch = self.normalises_batch or normalises_batch

    def learn_normalises(self, normalises_batch: bool) -> None:
        """Record whether the model normalises over the batch."""
        self.normalises_batch = self.normalises_batch or normalises_batch

    def learn_extra_leaves(self) -> None:
        """Record that the graph reaches leaves outside the model."""
        self.extra_leaves = True

    def learn_commits(self, commits: int) -> None:
        """Record the number of commits of a clean backward."""
        self.commits.add(commits)

    def learn_custom(self, custom: Collection[str]) -> None:
        """Record the Python functions in a graph."""
        self.custom.update(custom)

    def learn_draws(self, drew: bool) -> None:
        """Record whether a piece drew random numbers."""
        self.draws = self.draws or drew

    def learn_buffers(self, changes: bool) -> None:
        """Record whether the forward changes buffers in a way that depends on the split."""
        self.changes_buffers = changes

    def learn_edits(self) -> None:
        """Record that the function edits its batch in place."""
        self.edits_batch = True

    def learn_end(self) -> None:
        """Record that a call has ended well."""
        self.seen = True
        self.ladder.count_call()

    def learn_too_full(self, samples: int) -> None:
        """Record the length of a piece that failed and could not be cut."""
        self.too_full = max(self.too_full, samples)

    def carry(self, failures: int, replayed: int) -> None:
        """Record what a call has survived that is begun again."""
        self.carried = self.carried[0] + failures, self.carried[1] + replayed

    def take_carried(self) -> tuple[int, int]:
        """Return what calls have survived that were begun again, once."""
        carried, self.carried = self.carried, (0, 0)
        return carried

    def learn_compared(self) -> None:
        """Record that whole and pieces are not to be compared any more."""
        self.compared = True


class Knowledge:
    """The knowledge of one runtime."""

    def __init__(self, settings: Settings) -> None:
        policy = settings.policy
        self.controller = Controller(
            start=None if settings.micro_batch_size == "auto" else settings.micro_batch_size,
            policy=policy,
            clock=time.monotonic,
            random=random.Random(time.time_ns() if policy.seed is None else policy.seed),
        )
        # Calls whose seconds the device has not told yet.
        self.timed: Timed[tuple[Key, CallOutcome]] = deque()
        window = settings.gradients.noise_scale
        self.noise = None if window is None else Smoothed(window)
        self._profiles: dict[object, tuple[int, LossProfile]] = {}
        self._tunings: dict[Key, Autotune] = {}  # by the kind of the calls that take turns

    def begin_tuning(self, tuning: Autotune) -> None:
        """Let the next calls of a kind take turns in some ways."""
        self._tunings[tuning.key] = tuning

    def tuning_of(self, key: Key) -> Autotune | None:
        """Return the ways that calls of this kind take turns in; None where there are none."""
        return self._tunings.get(key) if self._tunings else None

    def end_tuning(self, key: Key) -> None:
        """End the turns of calls of this kind, if there are any."""
        self._tunings.pop(key, None)

    def profile_of(self, identity: object, generation: int) -> LossProfile:
        """Return the profile of a loss function, a new one where the set of leaves has changed.

        Args:
            identity: the function's name and code (see `names_of`).
            generation: number of the present set of trainable leaves.
        """
        known = self._profiles.get(identity)
        if known is None or known[0] != generation:
            known = self._profiles[identity] = generation, LossProfile()
        return known[1]


def names_of(fn: Callable[..., Any]) -> tuple[str, object]:
    """Return a function's display name and the key of its profile.

    The name is its qualified name, and limits and sizes are kept by it. The key is its code, which
    closures share.
    """
    called: Any = fn
    if not hasattr(called, "__wrapped__"):
        called = getattr(fn, "func", fn)  # of a functools.partial
    if hasattr(called, "__wrapped__"):
        # All functions of one decorator share the decorator's code (torch.autocast).
        called = inspect.unwrap(called)
    if type(called) is FunctionType:
        return called.__qualname__, called.__code__
    name = getattr(called, "__qualname__", type(called).__qualname__)
    return name, getattr(called, "__code__", type(called))
