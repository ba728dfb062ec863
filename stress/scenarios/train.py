"""A training run under a script, which moves the memory here.

It is the user's loop, with a record of each step.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from elastic_mbs import ElasticMBS, RecoveryError, events
from elastic_mbs.events import format_bytes
from elastic_mbs.memory import MemorySensor, Reading, Unavailable, sensor_for
from elastic_mbs.memory.budget import on_host

from ..flat_options import grouped
from ..limits import MemoryLimit
from ..models.factory import make
from ..record import End, Mark, Run, Step
from ..reference.by_hand import view_of
from ..streams import Streams, start_streams
from .catalogue import Order
from .measure import batch_of
from .reference import (
    Curve,
    evaluating,
    generators_of,
    norm_of,
    rounding_of,
    state_of,
    weight_difference,
)
from .scripts import Room, Supply, dead

EVERY = 4  # steps from one checkpoint to the next

_NAMES: dict[type[events.Event], str] = {
    events.OptimizerOutOfMemory: "optimizer",
    events.SensorLost: "sensor_lost",
    events.SensorBack: "sensor_back",
    events.WaitingForMemory: "waiting",
    events.Warned: "warned",
}


class Timeline:
    """Follower of an order's script; `note` gets each move in words.

    Nothing moves where two share a device, whose size is set once for both.
    """

    def __init__(
        self, memory: MemoryLimit, room: Room, order: Order, note: Callable[[str], object]
    ) -> None:
        self._memory = memory
        self._room = room
        self._order = order
        self._note = note
        self._pending: Supply | None = None
        self.capacity: int | None = None  # bytes for all, now; None before the first step
        self._held = 0  # bytes that the co-tenant was made to hold
        # Lowest bytes that were left in this step, where they moved in its middle.
        self.lowest: int | None = None

    def begin(self, step: int) -> None:
        """Apply the step's supply, or keep it for the step's middle."""
        self.lowest = None
        supply = self._order.entry.script(step, self._order.steps, self._order.seed)
        if supply.when == "before" or self.capacity is None:
            self._apply(supply)
        else:
            self._pending = supply

    def reach(self, when: str = "") -> None:
        """Apply a move that is due at this place of the step, or at its end, once.

        A piece that runs again comes here again, too.
        """
        supply = self._pending
        if supply is not None and when in {supply.when, ""}:
            self._pending = None
            before = (self.capacity or 0) - self._held
            self._apply(supply)
            self.lowest = min(before, (self.capacity or 0) - self._held)

    def _apply(self, supply: Supply) -> None:
        before = self.capacity, self._held
        capacity = self._room.capacity(supply)
        held = self._room.others(supply)
        self.capacity = capacity
        self._held = held
        if before == (capacity, held) or self._order.entry.together:
            return
        if before[0] != capacity:
            self._memory.resize(capacity)
        if before[1] != held:
            self._memory.occupy(held)
        who = f"a co-tenant holds {format_bytes(held)} of" if held else "there are"
        self._note(f"{who} {format_bytes(capacity)}")


class FailingSensor:
    """A sensor that can be switched off, as a driver that stops answering is."""

    def __init__(self, sensor: MemorySensor) -> None:
        self._sensor = sensor
        self.dead = False

    def read(self) -> Reading:
        return (
            Unavailable("the sensor is dead: the script says so")
            if self.dead
            else self._sensor.read()
        )


class Session:
    """A model in training under the script of an order.

    The model is made here, before there is a limit.
    """

    def __init__(self, order: Order, memory: MemoryLimit, room: Room) -> None:
        self._order = order
        self._scenario = order.entry
        self._memory = memory
        self.subject = make(order.model, order.seed, memory.device)
        self.model = self.subject.model
        dtype = rounding_of(self.subject.model)[0]
        self.record = Run(
            order.scenario,
            order.kind,
            self.subject.name,
            dtype,
            order.seed,
            room.needs,
            process=order.process,
        )
        self.record.began = time.monotonic()
        self.curve = Curve()  # figures that are compared with the reference
        self._streams = generators_of(self.subject)
        self._sensor = (
            FailingSensor(memory.sensor or sensor_for(memory.device)[0])
            if self._scenario.sensor_dies
            else None
        )
        options = {
            "policy": self._scenario.policy,
            "seed": order.seed + 7919 * order.process,
            "monitor_interval": 0.0,
            "wait_for_memory": self._scenario.wait,
            **self.subject.options,
            "sensor": self._sensor or memory.sensor,
        }
        self._mbs = ElasticMBS(self.model, on_event=self._hear, **grouped(options))
        self._optimizer = self.subject.optimizer(self.model.parameters())
        self._timeline = Timeline(memory, room, order, functools.partial(self._mark, "move"))
        # Sizes are learned by name.
        self._loss_fn = functools.update_wrapper(
            functools.partial(self._run_piece), self.subject.loss_fn
        )
        self._path = None if order.folder is None else Path(order.folder, "checkpoint.pt")
        self._ooms = 0  # errors survived in this step
        self._lost = 0.0  # seconds that they cost
        # Error that ended training: its first line, whether all was restored, seconds.
        self._error: tuple[str, bool, float] | None = None

    def train(self, tell: Callable[[Step], object]) -> Curve:
        """Train to the last step, from a checkpoint where there is one.

        Lets go of all but the model and the optimizer's state.
        """
        steps = self.record.steps
        self.record.began = time.monotonic()
        start_streams(self._order.seed + 1)
        self._load()
        first = len(steps)
        with self._mbs:
            while len(steps) < self._order.steps and self._train_step(len(steps)):
                tell(steps[-1])
                self._save()
        self._optimizer.zero_grad()
        del self._mbs
        gc.collect()
        held = self._memory.live()
        expected = steps[first].live if steps[first:] else held
        self.record.end = End(held, expected, self._memory.failures(), *(self._error or ()))
        with on_host():
            self.curve.final = state_of(self.model)
        return self.curve

    def _train_step(self, step: int) -> bool:
        """Make one step; return False where the call has ended by an error."""
        self._ooms = 0
        self._lost = 0.0
        began = self._now()
        self._timeline.begin(step)
        if self._sensor is not None:
            self._sensor.dead = dead(step, self._order.steps)
        made = self._call(step, began)
        if made is None:
            return False
        every = self._scenario.evaluate
        # The last step has no batch to follow it.
        if every and step % every == every - 1 and step + 1 < self._order.steps:
            self._evaluate(step)
        made = replace(
            made,
            seconds=self._now() - began,
            live=self._memory.live(),
            ooms=self._ooms,
            time_lost=self._lost,
        )
        self.record.steps.append(made)
        return True

    def _call(self, step: int, began: float) -> Step | None:
        """Make one batch's call and the optimizer's step, and hold nothing of them afterwards."""
        batch = batch_of(self.subject, step)
        timeline = self._timeline
        self._memory.reset_peak()
        before = self._state() if self._scenario.ends_by_error else None
        called = self._now()
        try:
            result = self._mbs.backward(self._loss_fn, batch)
        except RecoveryError as error:
            text, seconds = f"{type(error).__name__}: {error}", self._now() - called
            self._mark("error", text)
            self._error = text.splitlines()[0], before is not None and self._is_as(before), seconds
            return None
        with on_host():
            loss, norm = float(result), norm_of(self.model)
        self.curve.losses.append(loss)
        self.curve.norms.append(norm)
        self._mbs.optimizer_step(self._optimizer)
        self._optimizer.zero_grad()
        timeline.reach()
        capacity, others, peak = timeline.capacity, self._memory.others(), self._memory.peak()
        size = result.micro_batch_size
        replayed = result.replayed_samples
        view = view_of(self.subject, batch)
        partition = [list(piece) for piece in result.partition]
        figures = (view.length, view.elements, size, partition, replayed, loss, norm)
        return Step(step, began, capacity, others, peak, *figures, lowest=timeline.lowest)

    def _run_piece(self, piece: Any) -> Any:
        """Run the loss function.

        The script's moves take place in its forward or in the backward after it.
        """
        self._timeline.reach("forward")
        loss = self.subject.loss_fn(piece)
        leaf = next(
            (each for each in tree_leaves(loss) if isinstance(each, Tensor) and each.requires_grad),
            None,
        )
        if leaf is not None:
            leaf.register_hook(self._go_back)
        return loss

    def _go_back(self, gradient: Tensor) -> None:
        self._timeline.reach("backward")
        if len(self.record.steps) == self._order.dies:
            os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))

    def _evaluate(self, step: int) -> None:
        following = batch_of(self.subject, step + 1)
        with evaluating(self.subject) as evaluate:
            losses = self._mbs.evaluate(evaluate, following)  # one of each piece
        self.curve.outputs += losses
        self.curve.evaluated[step] = list(
            itertools.pairwise([0, *itertools.accumulate(losses.lengths)])
        )
        self._mark("eval", f"evaluated {sum(losses.lengths)} samples")

    # ------------------------------------------------------------------ notes

    def _now(self) -> float:
        """Return the seconds since the run began."""
        return time.monotonic() - self.record.began

    def _mark(
        self, what: str, text: str, before: int | None = None, after: int | None = None
    ) -> None:
        self.record.marks.append(
            Mark(self._now(), len(self.record.steps), what, text, before, after)
        )

    def _hear(self, event: events.Event) -> None:
        if isinstance(event, events.OutOfMemory):
            self._ooms += 1
            self._lost += event.seconds_lost or 0.0
            self._mark("oom", event.line(), event.size_before, event.size_after)
        elif isinstance(event, events.Resized):
            self._mark(
                "grow" if event.after > event.before else "shrink",
                event.line(),
                event.before,
                event.after,
            )
        elif not isinstance(event, events.CallDone):
            self._ooms += isinstance(event, events.OptimizerOutOfMemory)
            self._mark(_NAMES.get(type(event), "error"), event.line())

    # ------------------------------------------------------------------ state that is kept

    def _state(self) -> tuple[dict[str, Tensor], list[bool], Streams]:
        """Return the state that an error must leave as it was."""
        with on_host():
            return (
                state_of(self.model),
                [parameter.grad is None for parameter in self.model.parameters()],
                Streams.now(),
            )

    def _is_as(self, before: tuple[dict[str, Tensor], list[bool], Streams]) -> bool:
        state, empty, streams = self._state()
        with on_host():
            return (
                empty == before[1]
                and streams.same(before[2])
                and weight_difference(state, before[0]) == 0
            )

    def _save(self) -> None:
        """Save a checkpoint, after every fourth step.

        The file is whole at any moment, also while it is written.
        """
        if self._path is None or len(self.record.steps) % EVERY:
            return
        state = {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "elastic_mbs": self._mbs.state_dict(),
            "streams": self._streams.read(hosts=True),
            "curve": self.curve,
            "record": self.record,
        }
        torch.save(state, self._path.with_suffix(".new"))
        os.replace(self._path.with_suffix(".new"), self._path)
        self._mark("checkpoint", f"saved after {len(self.record.steps)} steps")

    def _load(self) -> None:
        """Go to where the checkpoint was saved, if there is one."""
        if self._path is None or not self._path.exists():
            return
        with on_host():
            # We wrote it ourselves; the states of numpy's streams hold arrays.
            state = torch.load(self._path, weights_only=False)
            self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._mbs.load_state_dict(state["elastic_mbs"])
        self._streams.restore(state["streams"])
        self.curve = state["curve"]
        saved = state["record"]
        self.record.steps += saved.steps
        self.record.marks += saved.marks
        # The curve goes on where it stood.
        self.record.began -= saved.steps[-1].at + saved.steps[-1].seconds
        self._mark("resumed", f"resumed at step {len(saved.steps)} from a checkpoint")
