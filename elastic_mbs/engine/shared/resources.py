"""The resources that all calls of a runtime share: the model, its devices, sensors and streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, TypeVar

import torch

from elastic_mbs.batch.transfer import choose_device, to_device
from elastic_mbs.controller.messages import Capacity
from elastic_mbs.device import accelerator_of
from elastic_mbs.engine.outcome.timing import Telemetry
from elastic_mbs.engine.shared.peers import Alone, Peers
from elastic_mbs.engine.shared.running import check_capture
from elastic_mbs.engine.shared.trained_model import TrainedModel
from elastic_mbs.escalation.checkpoint import is_compiled
from elastic_mbs.events import EventLog, SensorBack, SensorLost
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
from elastic_mbs.memory.budget import on_host
from elastic_mbs.memory.host_guard import margin_of, refuse_devices
from elastic_mbs.memory.sensor import trouble_with
from elastic_mbs.options import Rung, Settings
from elastic_mbs.rollback.buffers import BufferCopies
from elastic_mbs.rollback.gradients import Ledger
from elastic_mbs.rollback.random_streams import RandomStreams, check_generators

T = TypeVar("T")

_PARAMETERS = itemgetter("params")


class Resources:
    """The model, its devices, and everything that is made for them once.

    Attributes:
        settings: the options of the runtime.
        model: the modules that are trained.
        log: the sinks of events.
        peers: the other ranks of the job.
        telemetry: the reports of finished calls; None where nothing listens.
        ledger: the leaves of the model and their gradients.
        buffers: memory for copies of the buffers.
        guard: the limit on host memory; None where there is none.
        devices: the devices of the model. The first one is where the batch goes.
        streams: the random streams of these devices and of the host.
        monitor: the sensor of the memory that others leave.
        meter: the counter of the memory that this process uses.
    """

    def __init__(
        self,
        settings: Settings,
        model: TrainedModel,
        log: EventLog,
        *,
        exact: bool = True,
        peers: Peers | None = None,
    ) -> None:
        """Make the resources.

        Args:
            settings: the options.
            model: the modules.
            log: the sinks.
            exact: calls are replayed, so what no replay is exact on is refused.
            peers: the other ranks of the job; None where there are none.
        """
        memory = settings.memory
        self.settings = settings
        self.model = model
        self.log = log
        self.peers = peers or Alone()
        self._exact = exact
        self.telemetry = Telemetry(log) if log.listened else None
        self.ledger = Ledger()
        self.ledger.set_leaves(model.leaves)
        self.buffers = BufferCopies(on_host)
        self.sleep: Callable[[float], None] = time.sleep
        self.guard: HostGuard | None = None
        if memory.host_guard is not False:
            self.guard = HostGuard(
                margin_of(memory.host_guard),
                modules=model.modules,
                warn=partial(self.warn, "host_guard", once=False),  # each once by itself
            )
        self._cache_is_stale = False  # the allocator's cache holds memory of a failed attempt
        self._retries: int | None = None  # of the allocator, when they were last read
        self._reading: Reading | None = None
        self._capacity: Capacity | None = None
        self._generators = list(settings.recovery.generators)  # named, or found in first calls
        self._place()

    def _place(self) -> None:
        """Make everything that depends on the model's devices."""
        settings, memory = self.settings, self.settings.memory
        self.devices = self.model.devices()
        kind = self.devices[0].type  # asked once: it takes microseconds each time
        self.on_cpu = kind == "cpu"
        self.asynchronous = accelerator_of(self.devices[0])
        if self.guard is not None:
            refuse_devices(self.devices)
        found, meter = sensor_for(self.devices[0])
        if isinstance(found, MemoryBudget):
            found.track(*self.model.roots)
        if self._exact:
            oom.refuse_unrecognised(self.devices, settings.recovery.is_oom)
        drawn_from = self.devices if self._exact else ()
        self.streams = RandomStreams(self._generators, drawn_from)
        self.monitor = Monitor(
            memory.sensor or found,
            interval=memory.monitor_interval,
            on_change=self._on_sensor_change,
        )
        self.meter: UsageMeter = memory.sensor if isinstance(memory.sensor, UsageMeter) else meter
        self.piece_device = choose_device(memory.device, self.devices)

    # ------------------------------------------------------------------ lifetime

    def wake(self) -> None:
        """Prepare for a call: follow the model, start the monitor, open the log."""
        self.follow_model()
        if self.asynchronous is not None:
            check_capture(self.asynchronous)
        self.monitor.start()
        if self.telemetry is not None:
            self.log.begin()

    def follow_model(self) -> None:
        """Move with the model to another device."""
        leaves = self.model.leaves
        moved = leaves and leaves[0].device not in self.devices
        if moved and self.model.devices() != self.devices:
            self.monitor.stop()
            self._place()

    def refresh_model(self) -> None:
        """Look again at the model's trainable leaves."""
        if self.model.refresh():
            self.ledger.set_leaves(self.model.leaves)

    def is_compiled(self) -> bool:
        """Return whether `torch.compile` has compiled a module of the model."""
        return any(map(is_compiled, self.model.modules))

    def rungs(self) -> Sequence[Rung]:
        """Return the rungs of `escalate` that may be taken.

        By itself nothing is moved from the host to the host. Compiled modules run as they are.
        """
        recovery = self.settings.recovery
        by_itself = recovery.escalate == "auto" and self.on_cpu and not MemoryBudget.current()
        left_out = {"offload"} if by_itself else set[str]()
        if self.is_compiled():
            left_out |= {"logits", "tile", "checkpoint"}
        return [rung for rung in recovery.rungs if rung not in left_out]

    def take_over(self, generators: list[Any], *, for_good: bool) -> None:
        """Put these random generators back after failures, too, where their states can be read.

        Args:
            generators: generators that were found.
            for_good: in all later calls; else in this one alone.
        """
        known = set(map(id, self._generators))
        new = [
            each
            for each in generators
            if id(each) not in known and check_generators([each]) is None
        ]
        if for_good:
            self._generators += new
        self.streams.follow([*self._generators, *new])

    def trains(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer steps a leaf that a backward of this runtime can reach."""
        parameters = chain.from_iterable(map(_PARAMETERS, optimizer.param_groups))
        return self.ledger.has_any(self.model.leaves_of(parameters))

    def forget_model(self) -> None:
        """Drop the view of the model: it can have changed without the ledger's knowledge."""
        self.model.forget()
        self.ledger.forget()

    def load(self, piece: Any) -> Any:
        """Return the piece, or a whole batch, on the model's device."""
        self.follow_model()
        return to_device(piece, self.piece_device)

    # ------------------------------------------------------------------ memory

    def headroom(self) -> Headroom | None:
        """Return the latest memory reading, or None where the sensor has none."""
        reading = self.monitor.latest()
        return reading if isinstance(reading, Headroom) else None

    def capacity(self) -> Capacity | None:
        """Return the latest reading for the controller, or None where it is in doubt.

        The object stays the same until there is another reading. Without one nothing grows.
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

    def release(self, *, thorough: bool) -> None:
        """Release the memory of a failed attempt (see `oom.release`)."""
        oom.release(devices=self.devices, thorough=thorough)
        self._cache_is_stale = True

    def drop_stale_cache(self) -> None:
        """Empty the allocator's cache once after a failure, before peaks are learned.

        It still holds the memory of the failed attempt, and smaller pieces use a part of that. The
        reserved memory would say nothing of their need.
        """
        if self._cache_is_stale:
            self._cache_is_stale = False
            oom.empty_caches(self.devices)

    def new_retries(self, now: int) -> int:
        """Return the allocator's retries since the last time.

        Args:
            now: its retries since the process began.
        """
        before = self._retries
        self._retries = now
        return 0 if before is None else now - before

    def retry(self, what: str, operation: Callable[[], T]) -> T:
        """Run bookkeeping of our own that can run out of memory (see `oom.retry`)."""
        return oom.retry(what, operation, self.devices, self.settings.recovery.is_oom)

    # ------------------------------------------------------------------ messages

    def _on_sensor_change(self, reading: Reading) -> None:
        problem = trouble_with(reading)
        name = self.settings.name
        if problem is not None:
            self.log.emit(SensorLost(name, problem))
        else:
            self.log.emit(SensorBack(name, getattr(reading, "source", "")))

    def warn(self, topic: str, message: str, *, once: bool = True) -> None:
        """Emit a warning of this runtime; see `EventLog.emit_warning`."""
        self.log.emit_warning(self.settings.name, topic, message, once=once)
