"""One training run under a script, which is put into force here: what the user's loop would be, with a record of each step."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from elastic_mbs import ElasticMBS, RecoveryError
from elastic_mbs.events import (
    CallDone,
    Event,
    OptimizerOutOfMemory,
    OutOfMemory,
    Resized,
    SensorBack,
    SensorLost,
    WaitingForMemory,
    Warned,
    format_bytes,
)
from elastic_mbs.memory import MemorySensor, Reading, Unavailable, sensor_for
from elastic_mbs.memory.budget import on_host

from ..flat_options import grouped
from ..limits import MemoryLimit
from ..models.factory import make
from ..record import End, Mark, Step
from ..reference.by_hand import view_of
from ..streams import Streams, start_streams
from .catalogue import Order
from .measure import batch_of
from .reference import Curve, evaluating, generators_of, norm_of, state_of, weight_difference
from .scripts import Room, Supply, dead

EVERY = 4  # steps from one checkpoint to the next

_NAMES = {OptimizerOutOfMemory: "optimizer", SensorLost: "sensor_lost", SensorBack: "sensor_back", WaitingForMemory: "waiting", Warned: "warned"}


class Timeline:
    """Follows an order's script; `note` gets each move in words. Nothing moves where two share a device, whose size is set once for both."""

    def __init__(self, memory: MemoryLimit, room: Room, order: Order, note: Callable[[str], object]) -> None:
        self._memory, self._room, self._order, self._note = memory, room, order, note
        self._pending: Supply | None = None
        self.capacity: int | None = None  # bytes for all, now; None before the first step
        self._held: int | None = None  # bytes that the co-tenant was made to hold
        self.lowest: int | None = None  # what was left at the lowest in this step, where it moved in its middle

    @property
    def others(self) -> int:
        """Bytes that the co-tenant was made to hold; where it is one of us, what it holds now."""
        return self._memory.others() if self._order.together else (self._held or 0)

    def begin(self, step: int) -> None:
        """Applies the step's supply, or keeps it for the step's middle."""
        self.lowest = None
        supply = self._order.entry.script(step, self._order.steps, self._order.seed)
        if supply.when == "before" or self.capacity is None:
            self._apply(supply)
        else:
            self._pending = supply

    def finish(self) -> None:
        """Applies what is due in this step, if it has not come yet: a piece that runs again has its hook, too."""
        supply, self._pending = self._pending, None
        if supply is not None:
            before = self._left()
            self._apply(supply)
            self.lowest = min(self._left(), before)

    def wrap(self, loss_fn: Callable[[Any], Any], inside: Callable[[], None]) -> Callable[[Any], Any]:
        """The loss function, with the moves that are due in its forward or in the backward after it; `inside` is called in each backward."""

        @functools.wraps(loss_fn)  # sizes are learned by name
        def watched(piece: Any) -> Any:
            when = self._pending.when if self._pending is not None else ""
            if when == "forward":
                self.finish()
            loss = loss_fn(piece)
            leaf = next((each for each in tree_leaves(loss) if isinstance(each, Tensor) and each.requires_grad), None)
            if leaf is not None:
                for hook in (self.finish, inside) if when == "backward" else (inside,):
                    leaf.register_hook(lambda gradient, hook=hook: hook())
            return loss

        return watched

    def _left(self) -> int:
        return (self.capacity or 0) - (self._held or 0)

    def _apply(self, supply: Supply) -> None:
        before = self.capacity, self._held
        self.capacity, self._held = capacity, held = self._room.capacity(supply), self._room.others(supply)
        if before == (capacity, held) or self._order.together:
            return
        if before[0] != capacity:
            self._memory.resize(capacity)
        if before[1] != held:
            self._memory.occupy(held)
        who = f"a co-tenant holds {format_bytes(held)} of" if held else "there are"
        self._note(f"{who} {format_bytes(capacity)}")


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
    end: End | None = None


class Session:
    """A model in training under the script of an order. What is trained is made here, before there is a limit."""

    def __init__(self, order: Order, memory: MemoryLimit, room: Room) -> None:
        self._order, self._scenario, self._memory = order, order.entry, memory
        self.subject = make(order.model, order.seed, memory.device)
        self.model = self.subject.model
        self.journal, self.trained = Journal(), Trained()
        self._sensor = FailingSensor(memory.sensor or sensor_for(memory.device)[0]) if self._scenario.sensor_dies else None
        options = {
            "policy": self._scenario.policy,
            "seed": order.seed + 7919 * order.process,
            "monitor_interval": 0.0,
            "wait_for_memory": self._scenario.wait,
            **self.subject.options,
            "sensor": self._sensor or memory.sensor,
        }
        self._mbs = ElasticMBS(self.model, on_event=self.journal, **grouped(options))
        self._optimizer = self.subject.optimizer(self.model.parameters())
        self._timeline = Timeline(memory, room, order, functools.partial(self.journal.mark, "move"))
        self._loss_fn = self._timeline.wrap(self.subject.loss_fn, self._die)
        self._path = None if order.folder is None else Path(order.folder, "checkpoint.pt")
        self._step = 0
        self._error: tuple[str, bool, float] | None = None  # that ended training: its first line, whether all was restored, seconds

    def train(self, tell: Callable[[Step], object]) -> Trained:
        """Trains to the last step, from a checkpoint where there is one, and lets go of all but the model and the optimizer's state."""
        self.journal.began = time.monotonic()
        start_streams(self._order.seed + 1)
        self._load()
        first = len(self.trained.steps)
        with self._mbs:
            while self._step < self._order.steps:
                made = self._train_step(self._step)
                if made is None:
                    break
                self.trained.steps.append(made)
                self._step += 1
                tell(made)
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

    def _train_step(self, step: int) -> Step | None:
        """None where the call has ended by an error."""
        journal = self.journal
        journal.begin(step)
        began = journal.now()
        self._timeline.begin(step)
        if self._sensor is not None:
            self._sensor.dead = dead(step, self._order.steps)
        made = self._call(step, began)
        if made is None:
            return None
        if self._scenario.evaluates(step, self._order.steps):
            self._evaluate(step)
        return replace(made, seconds=journal.now() - began, live=self._memory.live(), ooms=journal.ooms, time_lost=journal.lost)

    def _call(self, step: int, began: float) -> Step | None:
        """One batch and the optimizer's step; nothing of it is held afterwards."""
        batch, curve, timeline = batch_of(self.subject, step), self.trained.curve, self._timeline
        self._memory.reset_peak()
        before = self._state() if self._scenario.ends_by_error else None
        called = self.journal.now()
        try:
            result = self._mbs.backward(self._loss_fn, batch)
        except RecoveryError as error:
            text, seconds = f"{type(error).__name__}: {error}", self.journal.now() - called
            self.journal.mark("error", text)
            self._error = text.splitlines()[0], before is not None and _same(before, self._state()), seconds
            return None
        with on_host():
            curve.losses.append(float(result))
            curve.norms.append(norm_of(self.model))
        self._mbs.optimizer_step(self._optimizer)
        self._optimizer.zero_grad()
        timeline.finish()
        peak, view = self._memory.peak(), view_of(self.subject, batch)
        return Step(
            step=step,
            at=began,
            capacity=timeline.capacity,
            others=timeline.others,
            lowest=timeline.lowest,
            peak=peak,
            samples=view.length,
            elements=view.elements,
            size=result.micro_batch_size,
            partition=[list(piece) for piece in result.partition],
            skipped=[list(piece) for piece in result.skipped],
            replayed=result.replayed_samples,
            loss=curve.losses[-1],
            norm=curve.norms[-1],
        )

    def _evaluate(self, step: int) -> None:
        following = batch_of(self.subject, step + 1)
        with evaluating(self.subject, self._loss_fn) as evaluate:
            losses = self._mbs.eval(evaluate, following)  # one of each piece
        self.trained.curve.outputs += losses
        self.trained.curve.evaluated[step] = list(itertools.pairwise([0, *itertools.accumulate(losses.lengths)]))
        self.journal.mark("eval", f"evaluated {sum(losses.lengths)} samples")

    def _die(self) -> None:
        if self._step == self._order.dies:
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))

    def _state(self) -> _State:
        """What an error must leave as it was."""
        with on_host():
            return state_of(self.model), [parameter.grad is not None for parameter in self.model.parameters()], Streams.now()

    def _save(self) -> None:
        """After every fourth step. The file is whole at any moment, also while it is written."""
        if self._path is None or self._step % EVERY:
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
        torch.save(state, self._path.with_suffix(".new"))
        os.replace(self._path.with_suffix(".new"), self._path)
        self.journal.mark("checkpoint", f"saved after {self._step} steps")

    def _load(self) -> None:
        """Goes to where the checkpoint was saved, if there is one."""
        if self._path is None or not self._path.exists():
            return
        with on_host():
            state = torch.load(self._path, weights_only=False)  # written by us; the states of numpy's streams hold arrays
            self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._mbs.load_state_dict(state["elastic_mbs"])
        generators_of(self.subject).restore(state["streams"])
        self._step, self.trained = state["step"], state["trained"]
        self.journal.marks.extend(state["marks"])
        self.journal.began -= self.trained.steps[-1].at + self.trained.steps[-1].seconds  # the curve goes on where it stood
        self.journal.begin(self._step)
        self.journal.mark("resumed", f"resumed at step {self._step} from a checkpoint")


_State = tuple[dict[str, Tensor], list[bool], Streams]


def _same(before: _State, after: _State) -> bool:
    with on_host():
        return before[1] == after[1] and before[2].same(after[2]) and weight_difference(before[0], after[0]) == 0
