"""What a runtime lends to its calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from elastic_mbs.batch.transfer import Streamer
from elastic_mbs.controller.controller import Capacity, Controller, Key, Observation
from elastic_mbs.engine.model import Inventory
from elastic_mbs.engine.profile import Traits
from elastic_mbs.engine.telemetry import Telemetry
from elastic_mbs.engine.timing import Stopwatch
from elastic_mbs.events import EventLog
from elastic_mbs.memory import Headroom, HostGuard, Monitor, Reading, UsageMeter, oom
from elastic_mbs.options import Settings
from elastic_mbs.rollback.buffers import BufferCopies
from elastic_mbs.rollback.graph import CommitLog
from elastic_mbs.rollback.random_streams import RandomStreams


@dataclass
class Parts:
    """What a runtime lends to its calls."""

    settings: Settings
    inventory: Inventory
    controller: Controller
    streams: RandomStreams
    log: EventLog
    monitor: Monitor
    meter: UsageMeter
    stopwatch: Stopwatch[tuple[Key, Observation]]
    streamer: Streamer
    devices: list[torch.device]
    telemetry: Telemetry | None = None
    commits: CommitLog = field(default_factory=CommitLog)
    buffers: BufferCopies = field(default_factory=BufferCopies)
    traits: dict[object, tuple[int, Traits]] = field(default_factory=dict)
    retries: int | None = None
    guard: HostGuard | None = None
    cache_is_stale: bool = False
    sleep: Callable[[float], None] = time.sleep
    _reading: Reading | None = None
    _capacity: Capacity | None = None

    def moved(self) -> bool:
        """Whether the model is on another device than when the parts were made."""
        leaves = self.inventory.leaves
        return bool(leaves) and leaves[0].device not in self.devices

    def capacity(self) -> Capacity | None:
        """The latest reading, as the controller wants it, and the same object while it is that one. None where it is in doubt: then nothing grows."""
        reading = self.monitor.latest()
        if reading is not self._reading:
            self._reading = reading
            self._capacity = Capacity(reading.capacity, reading.at) if isinstance(reading, Headroom) and reading.doubt is None else None
        return self._capacity

    def drop_stale_cache(self) -> None:
        """Empties the allocator's cache once after a failure, before peaks are learned from.

        It still holds what the failed attempt had, of which smaller pieces use a part: reserved memory would say nothing of what they need.
        """
        if self.cache_is_stale:
            self.cache_is_stale = False
            oom.empty_caches(self.devices)

    def new_retries(self, now: int) -> int:
        """Allocator retries since the last time this was asked; the process counts them from its own start."""
        before, self.retries = self.retries, now
        return 0 if before is None else now - before

    def traits_of(self, identity: object) -> Traits:
        """What is known of this loss function; forgotten when the set of trainable leaves changes."""
        generation = self.inventory.generation
        known = self.traits.get(identity)
        if known is None or known[0] != generation:
            known = self.traits[identity] = generation, Traits()
        return known[1]
