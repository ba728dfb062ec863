"""One training run under a script: what the user's loop would be, with a record of each step."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from elastic_mbs import ElasticMBS, RecoveryError
from elastic_mbs.events import CallDone, Event, OptimizerOutOfMemory, OutOfMemory, Resized, SensorBack, SensorLost, WaitingForMemory, Warned
from elastic_mbs.memory import MemorySensor, Reading, Unavailable, sensor_for
from elastic_mbs.memory.budget import on_host
from elastic_mbs.memory.oom import classify

from ..flat_options import grouped
from ..limits import MemoryLimit
from ..models.factory import make
from ..record import End, Mark, Step
from ..reference.by_hand import Partition, view_of
from ..streams import Streams
from .catalogue import Order, Play
from .measure import batch_of
from .reference import Curve, Probe, begin_streams, flat, generators_of, norm_of, state_of, weight_difference
from .scripts import Room
from .timeline import Timeline

EVERY = 4
"""Steps from one checkpoint to the next."""

_NAMES: dict[type[Event], str] = {
    OptimizerOutOfMemory: "optimizer",
    SensorLost: "sensor_lost",
    SensorBack: "sensor_back",
    WaitingForMemory: "waiting",
    Warned: "warned",
}


class NoRoomForBatchError(RuntimeError):
    """A batch did not fit while it was made, before the runtime had it."""


class FailingSensor:
    """A sensor that can be switched off, as a driver that stops answering does."""

    def __init__(self, sensor: MemorySensor) -> None:
        self._sensor = sensor
        self.dead = False

    def read(self) -> Reading:
        return Unavailable("the sensor is dead: the script says so") if self.dead else self._sensor.read()


class Journal:
    """Marks of one run; a sink for events."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.marks: list[Mark] = []
        self.begin(0)

    def now(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.began

    def begin(self, step: int) -> None:
        """A step begins: its out-of-memory errors and the seconds that they cost are counted from here."""
        self._step, self.ooms, self.lost = step, 0, 0.0

    def mark(self, what: str, text: str, before: int | None = None, after: int | None = None) -> None:
        self.marks.append(Mark(self.now(), self._step, what, text, before, after))

    def __call__(self, event: Event) -> None:
        if isinstance(event, OutOfMemory):
            self.ooms += 1
            self.lost += event.seconds_lost or 0.0
            self.mark("oom", event.line(), event.size_before, event.size_after)
        elif isinstance(event, Resized):
            self.mark("grow" if event.after > event.before else "shrink", event.line(), event.before, event.after)
        elif not isinstance(event, CallDone):
            self.ooms += isinstance(event, OptimizerOutOfMemory)
            self.mark(_NAMES.get(type(event), "error"), event.line())


@dataclass
class Trained:
    """A training run, up to the last step that was made."""

    steps: list[Step] = field(default_factory=list)
    curve: Curve = field(default_factory=Curve)  # what is compared with the reference
    evaluated: dict[int, Partition] = field(default_factory=dict)  # after which steps there was an evaluation, and its pieces
    end: End | None = None


class Session:
    """A model in training under the script of an order. What is trained is made here, before there is a limit."""

    def __init__(self, order: Order, memory: MemoryLimit, room: Room) -> None:
        self._order, self._scenario, self._memory = order, order.entry, memory
        self.subject = make(order.model, order.seed, memory.device)
        self.model = self.subject.model
        self.journal, self.trained = Journal(), Trained()
        self._sensor = None if self._scenario.dead is None else FailingSensor(memory.sensor or sensor_for(memory.device)[0])
        options = {
            "policy": self._scenario.policy,
            "seed": order.seed + 7919 * order.process,
            "monitor_interval": 0.0,
            "wait_for_memory": self._scenario.wait,
            **self.subject.options,
        }
        self._mbs = ElasticMBS(self.model, on_event=self.journal, **grouped({**options, "sensor": self._sensor or memory.sensor}))
        self._optimizer = self.subject.optimizer(self.model.parameters())
        self._timeline = Timeline(
            memory,
            room,
            lambda step: self._scenario.script(step, order.steps, order.seed),
            lambda text: self.journal.mark("move", text),
            moves=self._scenario.play is not Play.TWO,
        )
        self._loss_fn = self._timeline.wrap(self.subject.loss_fn, None if order.dies is None else self._die)
        self._step = 0
        self._error: tuple[str, bool, float] | None = None  # that ended training: its first line, whether all was restored, seconds

    def train(self, tell: Callable[[Step], object]) -> Trained:
        """Trains to the last step, from a checkpoint where there is one, and lets go of all but the model and the optimizer's state."""
        self.journal.began = time.monotonic()
        if not self._load():
            begin_streams(self._order.seed)
        first = len(self.trained.steps)
        with self._mbs:
            for step in range(self._step, self._order.steps):
                self._step = step
                if not self._train_step(step):
                    break
                self._step = step + 1
                tell(self.trained.steps[-1])
                self._save()
        self._optimizer.zero_grad()
        del self._mbs
        gc.collect()
        held = self._memory.live()
        expected = self.trained.steps[first].live if self.trained.steps[first:] else held
        self.trained.end = End(held, expected, self._memory.failures(), *(self._error or ()))
        with on_host():
            self.trained.curve.final = state_of(self.model)
        return self.trained

    def _train_step(self, step: int) -> bool:
        """Whether training goes on."""
        journal, timeline, memory = self.journal, self._timeline, self._memory
        journal.begin(step)
        began = journal.now()
        timeline.begin(step)
        if self._sensor is not None and self._scenario.dead is not None:
            self._sensor.dead = self._scenario.dead(step, self._order.steps)
        figures = self._call(step)
        if figures is None:
            return False
        if self._scenario.evaluates(step, self._order.steps):
            self._evaluate(step)
        self.trained.steps.append(
            Step(
                step=step,
                at=began,
                seconds=journal.now() - began,
                capacity=timeline.capacity,
                others=timeline.others,
                live=memory.live(),
                ooms=journal.ooms,
                loss=self.trained.curve.losses[-1],
                norm=self.trained.curve.norms[-1],
                time_lost=journal.lost,
                lowest=timeline.lowest,
                **figures,
            )
        )
        return True

    def _call(self, step: int) -> dict[str, Any] | None:
        """One batch and the optimizer's step; None where the call has ended by an error. Nothing of it is held afterwards."""
        batch = self._fetch(step)
        self._memory.reset_peak()
        before = self._state() if self._scenario.ends_by_error else None
        called = self.journal.now()
        try:
            result = self._mbs.backward(self._loss_fn, batch)
        except RecoveryError as error:
            text, seconds = f"{type(error).__name__}: {error}", self.journal.now() - called
            self.journal.mark("error", text)
            self._error = text.splitlines()[0], before is not None and self._same(before, self._state()), seconds
            return None
        with on_host():
            self.trained.curve.losses.append(float(result))
            self.trained.curve.norms.append(norm_of(self.model))
        self._mbs.optimizer_step(self._optimizer)
        self._optimizer.zero_grad()
        self._timeline.finish()
        peak, view = self._memory.peak(), view_of(self.subject, batch)
        return {
            "peak": peak,
            "samples": view.length,
            "elements": view.elements,
            "size": result.micro_batch_size,
            "partition": [list(piece) for piece in result.partition],
            "replayed": result.replayed_samples,
            "skipped": [list(piece) for piece in result.skipped],
        }

    def _evaluate(self, step: int) -> None:
        following = self._fetch(step + 1)
        with Probe(self.model) as probe:
            figures, lengths = self._mbs.eval(lambda piece: probe.run(self._loss_fn, piece, view_of(self.subject, piece).length), following)
        with on_host():
            self.trained.curve.outputs.append(flat(figures))
        self.trained.evaluated[step] = list(itertools.pairwise([0, *itertools.accumulate(lengths)]))
        self.journal.mark("eval", f"evaluated {sum(lengths)} samples")

    def _fetch(self, step: int) -> Any:
        try:
            return batch_of(self.subject, step)
        except Exception as error:
            if classify(error) is None:
                raise
            text = f"the batch of step {step} itself did not fit, which is made outside the runtime, so nothing was shown"
            raise NoRoomForBatchError(text) from error

    def _die(self) -> None:
        if self._step == self._order.dies:
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))

    # ------------------------------------------------------------------ what an error must leave as it was

    def _state(self) -> tuple[dict[str, torch.Tensor], list[bool], Streams]:
        with on_host():
            return state_of(self.model), [parameter.grad is not None for parameter in self.model.parameters()], Streams.now()

    def _same(self, before: tuple[dict[str, torch.Tensor], list[bool], Streams], after: tuple[dict[str, torch.Tensor], list[bool], Streams]) -> bool:
        with on_host():
            return before[1] == after[1] and before[2].same(after[2]) and weight_difference(before[0], after[0]) == 0

    # ------------------------------------------------------------------ checkpoints

    def _path(self) -> Path | None:
        return None if self._order.folder is None else Path(self._order.folder, "checkpoint.pt")

    def _save(self) -> None:
        """After every fourth step. The file is whole at any moment, also while it is written."""
        path = self._path()
        if path is None or self._step % EVERY:
            return
        state = {
            "step": self._step,
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "elastic_mbs": self._mbs.state_dict(),
            "streams": generators_of(self.subject).read(hosts=True),
            "trained": self.trained,
            "marks": self.journal.marks,
        }
        torch.save(state, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)
        self.journal.mark("checkpoint", f"saved after {self._step} steps")

    def _load(self) -> bool:
        """Goes to where the checkpoint was saved, if there is one."""
        path = self._path()
        if path is None or not path.exists():
            return False
        with on_host():
            state = torch.load(path, weights_only=False)  # written by us; the states of numpy's streams hold arrays
            self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._mbs.load_state_dict(state["elastic_mbs"])
        generators_of(self.subject).restore(state["streams"])
        self._step, self.trained = state["step"], state["trained"]
        self.journal.marks.extend(state["marks"])
        self.journal.began -= self.trained.steps[-1].at + self.trained.steps[-1].seconds  # the curve goes on where it stood
        self.journal.begin(self._step)
        self.journal.mark("resumed", f"resumed at step {self._step} from a checkpoint")
        return True
