"""What happened when: memory, sizes, failures, and the time that they cost. The training loop knows nothing of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import nn

from elastic_mbs.cli.demo.tenant import Move
from elastic_mbs.cli.demo.text import Batch
from elastic_mbs.engine.result import StepResult
from elastic_mbs.events import CallDone, Event, OutOfMemory, Resized
from elastic_mbs.memory import Headroom, MemorySensor, UsageMeter

SAMPLE_EVERY = 0.004
"""Seconds between two looks at the memory."""


@dataclass
class Sample:
    """Memory at one moment: bytes in use, and bytes that there are for this process."""

    at: float
    used: int
    limit: int


@dataclass
class Step:
    """One step of training.

    Attributes:
        index: counted from 0.
        length: tokens of the batch's longest document.
        began: time, in seconds.
        ended: time, in seconds.
        sizes: micro-batch sizes in force, each with the time from which it was.
        events: what happened in it, each with its time.
        result: as the runtime gave it.
        loss: the batch's loss.
        peak: the moment of highest use; None where memory cannot be read.
        lost: seconds in attempts that failed.
    """

    index: int
    length: int
    began: float
    ended: float = 0.0
    sizes: list[tuple[float, int]] = field(default_factory=list)
    events: list[tuple[float, Event]] = field(default_factory=list)
    result: StepResult | None = None
    loss: float = 0.0
    peak: Sample | None = None
    lost: float = 0.0


class Console(Protocol):
    """Whoever watches the run."""

    def step(self, step: Step) -> None:
        """A step is done."""

    def event(self, event: Event) -> None:
        """Something happened to a call."""

    def move(self, move: Move) -> None:
        """The co-tenant is about to move."""


class Record:
    """Takes notes of a run: a thread samples the memory, a hook on the model sees each attempt, and `note` gets the events.

    Args:
        model: its forward passes are the attempts.
        sensor: how much memory there is.
        meter: how much of it is used.
        console: told of each step, event and move.
        clock: seconds.
    """

    def __init__(
        self,
        model: nn.Module,
        sensor: MemorySensor,
        meter: UsageMeter,
        console: Console,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.steps: list[Step] = []
        self.samples: list[Sample] = []
        self.moves: list[tuple[float, Move]] = []
        self._sensor, self._meter = sensor, meter
        self._console = console
        self._clock = clock
        self._attempt = 0.0
        self._first = 0
        self._hook = model.register_forward_pre_hook(self._forward)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample_on, name="demo-memory-record", daemon=True)

    def __enter__(self) -> Self:
        """Starts the thread."""
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Ends the thread and takes the hook off."""
        self._stop.set()
        self._thread.join()
        self._hook.remove()

    def steps_of(self, batches: Iterable[Batch], begin: Callable[[int], object]) -> Iterator[Batch]:
        """The batches; each step is opened when its batch is taken and closed when the next one is.

        Args:
            batches: one per step.
            begin: called with the step's index before its batch is given.
        """
        for index, batch in enumerate(batches):
            begin(index)
            self._first = len(self.samples)
            step = Step(index, batch["tokens"].shape[1], self._clock())
            self.steps.append(step)
            yield batch
            step.ended = self._clock()
            self._sample()
            step.peak = max(self.samples[self._first :], key=lambda sample: sample.used, default=None)
            self._console.step(step)

    def result(self, result: StepResult) -> None:
        """Takes down what a call gave back."""
        step = self.steps[-1]
        step.result, step.loss = result, float(result)
        if len(step.sizes) > 1 and not step.events:
            self._size(self._clock(), result.micro_batch_size)  # a size was looked for, and what was left of the batch too short to show it

    def note(self, event: Event) -> None:
        """A sink for events.

        An attempt that failed is lost from the start of its forward until it has been undone, which is when its event comes. Where the whole batch is
        replayed, everything since the step began is lost.
        """
        if isinstance(event, CallDone):
            return  # `result` has that
        now, step = self._clock(), self.steps[-1]
        self._sample()
        step.events.append((now, event))
        if isinstance(event, OutOfMemory):
            step.lost = now - step.began if event.mode == "step" else step.lost + now - self._attempt
            self._size(now, event.size_after)
        elif isinstance(event, Resized):
            self._size(now, event.after)
        self._console.event(event)

    def moved(self, move: Move) -> None:
        """Takes down a move of the co-tenant."""
        self.moves.append((self._clock(), move))
        self._console.move(move)

    def _forward(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        now, step = self._clock(), self.steps[-1]
        self._attempt = now
        tokens: torch.Tensor = inputs[0]
        if not step.sizes or len(tokens) > step.sizes[-1][1]:
            self._size(now, len(tokens))  # the first of the step, or the next doubling of a size that is being looked for

    def _size(self, now: float, size: int) -> None:
        self.steps[-1].sizes.append((now, size))

    def _sample(self) -> None:
        reading, usage = self._sensor.read(), self._meter.usage()
        if isinstance(reading, Headroom) and usage is not None:
            self.samples.append(Sample(self._clock(), usage.allocated, reading.capacity))

    def _sample_on(self) -> None:
        while not self._stop.wait(SAMPLE_EVERY):
            self._sample()
