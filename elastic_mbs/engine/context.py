"""What a runtime lends to its calls."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from elastic_mbs.batch.transfer import choose_device, to_device
from elastic_mbs.controller.controller import Controller
from elastic_mbs.controller.plan import CallOutcome, Capacity, Key
from elastic_mbs.engine.misuse import check_capture
from elastic_mbs.engine.model import TrainedModel
from elastic_mbs.engine.profile import LossProfile
from elastic_mbs.engine.timing import Telemetry, Timed
from elastic_mbs.events import EventLog, SensorBack, SensorLost, Warned
from elastic_mbs.memory import (
    Headroom,
    HostGuard,
    MemoryBudget,
    Monitor,
    Reading,
    UsageMeter,
    oom,
    sensor_for,
)
from elastic_mbs.memory.host_guard import margin_of, refuse_devices
from elastic_mbs.memory.sensor import trouble_with
from elastic_mbs.noise_scale import Smoothed
from elastic_mbs.options import Settings
from elastic_mbs.rollback.buffers import BufferCopies
from elastic_mbs.rollback.gradients import Ledger
from elastic_mbs.rollback.random_streams import RandomStreams

T = TypeVar("T")


class Context:
    """What a runtime lends to its calls."""

    def __init__(self, settings: Settings, model: TrainedModel, log: EventLog) -> None:
        policy, memory = settings.policy, settings.memory
        self.settings, self.plain = settings, settings.plain
        self.model = model
        self.log = log
        self.controller = Controller(
            start=None if settings.micro_batch_size == "auto" else settings.micro_batch_size,
            policy=policy,
            clock=time.monotonic,
            random=random.Random(time.time_ns() if policy.seed is None else policy.seed),
        )
        self.timed: Timed[tuple[Key, CallOutcome]] = deque()
        self.telemetry = Telemetry(log) if log.listened else None
        self.ledger = Ledger()
        self.ledger.set_leaves(model.leaves)
        self.buffers = BufferCopies()
        self.profiles: dict[object, tuple[int, LossProfile]] = {}
        self.noise = (
            None
            if settings.gradients.noise_scale is None
            else Smoothed(settings.gradients.noise_scale)
        )
        self.cache_is_stale = False  # the allocator's cache holds what a failed attempt had
        self.sleep: Callable[[float], None] = time.sleep
        self.guard: HostGuard | None = None
        if memory.host_guard is not False:
            self.guard = HostGuard(
                margin_of(memory.host_guard),
                modules=model.modules,
                warn=partial(self.warn, "host_guard"),
            )
        self._retries: int | None = None  # of the allocator, when they were last asked for
        self._reading: Reading | None = None
        self._capacity: Capacity | None = None
        self._place()

    def _place(self) -> None:
        """Makes what depends on the model's devices."""
        settings, memory = self.settings, self.settings.memory
        self.devices = self.model.devices()
        kind = self.devices[0].type  # asked once: it takes microseconds each time
        self.on_cpu, self.asynchronous = kind == "cpu", self.devices[0] if kind == "cuda" else None
        if self.guard is not None:
            refuse_devices(self.devices)
        found, meter = sensor_for(self.devices[0])
        if isinstance(found, MemoryBudget):
            found.track(*self.model.roots)
        self.streams = RandomStreams(settings.recovery.generators, self.devices)
        self.monitor = Monitor(
            memory.sensor or found,
            interval=memory.monitor_interval,
            on_change=self._on_sensor_change,
        )
        self.meter: UsageMeter = memory.sensor if isinstance(memory.sensor, UsageMeter) else meter
        self.piece_device = choose_device(memory.device, self.devices)

    def wake(self) -> None:
        """Readies itself for a call."""
        self.follow_model()
        if self.asynchronous is not None:
            check_capture()
        self.monitor.start()
        if self.telemetry is not None:
            self.log.begin()

    def follow_model(self) -> None:
        """Moves with the model to another device."""
        leaves = self.model.leaves
        if leaves and leaves[0].device not in self.devices:
            self.monitor.stop()
            self._place()

    def load(self, piece: Any) -> Any:
        """The piece, or a whole batch, on the model's device."""
        self.follow_model()
        return to_device(piece, self.piece_device)

    def _on_sensor_change(self, reading: Reading) -> None:
        problem, name = trouble_with(reading), self.settings.name
        self.log.emit(
            SensorLost(name, problem)
            if problem is not None
            else SensorBack(name, getattr(reading, "source", ""))
        )

    def warn(self, kind: str, text: str) -> None:
        self.log.emit(Warned(self.settings.name, kind, text))

    def warn_once(self, kind: str, text: str) -> None:
        self.log.warn_once(self.settings.name, kind, text)

    def headroom(self) -> Headroom | None:
        """The latest memory reading, where it is one."""
        reading = self.monitor.latest()
        return reading if isinstance(reading, Headroom) else None

    def capacity(self) -> Capacity | None:
        """The latest reading for the controller, and the same object until there is another.

        None where it is in doubt: then nothing grows.
        """
        reading = self.monitor.latest()
        if reading is not self._reading:
            self._reading = reading
            self._capacity = (
                Capacity(reading.capacity, reading.at)
                if isinstance(reading, Headroom) and reading.doubt is None
                else None
            )
        return self._capacity

    def drop_stale_cache(self) -> None:
        """Empties the allocator's cache once after a failure, before peaks are learned.

        It still holds what the failed attempt had, of which smaller pieces use a part: reserved
        memory would say nothing of what they need.
        """
        if self.cache_is_stale:
            self.cache_is_stale = False
            oom.empty_caches(self.devices)

    def new_retries(self, now: int) -> int:
        """Allocator retries since the last time; the process counts them from its own start."""
        before, self._retries = self._retries, now
        return 0 if before is None else now - before

    def profile_of(self, identity: object) -> LossProfile:
        """What is known of a loss function; dropped when the set of trainable leaves changes."""
        generation = self.model.generation
        known = self.profiles.get(identity)
        if known is None or known[0] != generation:
            known = self.profiles[identity] = generation, LossProfile()
        return known[1]

    def retry(self, what: str, operation: Callable[[], T]) -> T:
        """See `oom.retry`."""
        return oom.retry(what, operation, self.devices, self.settings.recovery.is_oom)
