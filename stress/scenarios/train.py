"""One training run under a script: what the user's loop would be, with notes taken beside it."""

from __future__ import annotations

import functools
import gc
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from elastic_mbs import ElasticMBS, RecoveryError
from elastic_mbs.memory import MemorySensor, Unavailable, sensor_for
from elastic_mbs.memory.budget import on_host
from elastic_mbs.memory.oom import classify
from elastic_mbs.memory.sensor import Reading

from ..flat_options import grouped
from ..limits import MemoryLimit
from ..models.subject import Subject
from ..record import End, Step
from ..reference.by_hand import Partition, view_of
from .catalogue import Scenario
from .needs import batch_of
from .notes import Notes
from .reference import Curve, Probe, begin_streams, flat, norm_of, state_of
from .stage import Stage
from .weather import Room


class NoRoomForBatchError(RuntimeError):
    """A batch did not fit while it was made, before the runtime had it."""


class Mortal:
    """A sensor that can be switched off, as a driver that stops answering does.

    Args:
        sensor: what it reads while it lives.
    """

    def __init__(self, sensor: MemorySensor) -> None:
        self._sensor = sensor
        self.dead = False

    def read(self) -> Reading:
        """One reading, or none."""
        return Unavailable("the sensor is dead: the script says so") if self.dead else self._sensor.read()


@dataclass
class Trained:
    """A training run that is over.

    Attributes:
        steps: one for each optimizer step.
        curve: what is compared with the reference.
        evaluated: after which steps there was an evaluation, and its pieces.
        end: how it ended.
    """

    steps: list[Step] = field(default_factory=list)
    curve: Curve = field(default_factory=Curve)
    evaluated: dict[int, Partition] = field(default_factory=dict)
    end: End | None = None

    def followed_by(self, later: Trained) -> Trained:
        """Both, one after the other."""
        mine, other = self.curve, later.curve
        curve = Curve([*mine.losses, *other.losses], [*mine.norms, *other.norms], [*mine.outputs, *other.outputs], other.final)
        return Trained([*self.steps, *later.steps], curve, self.evaluated | later.evaluated, later.end)


@dataclass(frozen=True)
class State:
    """What a call that ends by an error must leave as it was."""

    tensors: dict[str, torch.Tensor]
    gradients: list[bool]
    streams: tuple[Any, ...]

    @classmethod
    def of(cls, model: nn.Module) -> State:
        """The state now, copied beside the world's count."""
        with on_host():
            return cls(state_of(model), [p.grad is not None for p in model.parameters()], (torch.get_rng_state(), random.getstate()))

    def same(self, other: State) -> bool:
        """Whether nothing differs, to the bit."""
        return (
            self.gradients == other.gradients
            and torch.equal(self.streams[0], other.streams[0])
            and self.streams[1] == other.streams[1]
            and self.tensors.keys() == other.tensors.keys()
            and all(torch.equal(tensor, other.tensors[name]) for name, tensor in self.tensors.items())
        )


@dataclass
class Session:
    """A model in training: what a checkpoint saves.

    Attributes:
        subject: whose model it is.
        optimizer: of its parameters.
        mbs: its runtime.
        step: the next step.
    """

    subject: Subject
    optimizer: torch.optim.Optimizer
    mbs: ElasticMBS
    step: int = 0

    def close(self) -> None:
        """Lets go of all but the model and the optimizer's state: what is still held after that is held by mistake."""
        self.optimizer.zero_grad()
        del self.mbs


def open_session(subject: Subject, scenario: Scenario, world: MemoryLimit, notes: Notes, seed: int) -> tuple[Session, Mortal | None]:
    """The runtime and the optimizer of a run."""
    sensor = world.sensor
    mortal = None
    if scenario.dead is not None:
        mortal = Mortal(sensor or sensor_for(world.device)[0])
        sensor = mortal
    options: dict[str, Any] = {"policy": scenario.policy, "monitor_interval": 0.0, "wait_for_memory": scenario.wait, **subject.options}
    mbs = ElasticMBS(subject.model, on_event=notes, **grouped({"sensor": sensor, "seed": seed, **options}))
    return Session(subject, subject.optimizer(subject.model.parameters()), mbs), mortal


def train(
    session: Session,
    scenario: Scenario,
    world: MemoryLimit,
    room: Room,
    notes: Notes,
    *,
    steps: int,
    seed: int,
    mortal: Mortal | None = None,
    tell: Callable[[Step], object] = lambda step: None,
    after: Callable[[Session, Trained], object] = lambda session, trained: None,
    inside: Callable[[int], object] | None = None,
) -> Trained:
    """Trains from the session's step to the last one, in the weather of the scenario.

    Args:
        session: model, optimizer and runtime.
        scenario: its script and options.
        world: open.
        room: what its shares are in bytes.
        notes: the sink that the runtime was given.
        steps: in all.
        seed: of the script.
        mortal: the sensor, where the scenario has it die.
        tell: told of each step.
        after: called after each step, outside the world's count of it.
        inside: called in each backward with the step's number.
    """
    subject, model, mbs = session.subject, session.subject.model, session.mbs
    stage = Stage(world, room, lambda step: scenario.script(step, steps, seed), lambda text: notes.mark("move", text), moves=scenario.play != "two")
    watched = stage.wrap(subject.loss_fn if inside is None else _hooked(subject.loss_fn, lambda: inside(session.step)))
    trained, probe = Trained(), Probe(model)
    if session.step == 0:
        begin_streams(seed)
    error: RecoveryError | None = None
    restored, seconds = None, 0.0
    with mbs:
        for step in range(session.step, steps):
            notes.begin(step)
            began = notes.now()
            stage.begin(step)
            if mortal is not None and scenario.dead is not None:
                mortal.dead = scenario.dead(step, steps)
            batch = _fetch(subject, step)
            world.reset_peak()
            state = State.of(model) if scenario.ends_by is not None else None
            called = notes.now()
            try:
                result = mbs.backward(watched, batch)
            except RecoveryError as failed:
                error, seconds = failed.with_traceback(None), notes.now() - called
                notes.mark("error", f"{type(failed).__name__}: {failed}")
                with on_host():
                    restored = None if state is None else state.same(State.of(model))
                del batch, state
                break
            with on_host():
                trained.curve.losses.append(float(result))
                trained.curve.norms.append(norm_of(model))
            mbs.optimizer_step(session.optimizer)
            session.optimizer.zero_grad()
            stage.finish()
            peak = world.peak()
            view = view_of(subject, batch)
            samples, elements = view.length, view.elements
            del view, batch
            if scenario.evaluates(step, steps):
                following = _fetch(subject, step + 1)
                with probe:
                    figures, lengths = mbs.eval(lambda piece: probe.run(watched, piece, view_of(subject, piece).length), following)
                with on_host():
                    trained.curve.outputs.append(flat(figures))
                trained.evaluated[step] = list(itertools.pairwise([0, *itertools.accumulate(lengths)]))
                notes.mark("eval", f"evaluated {sum(lengths)} samples")
                del following, figures
            trained.steps.append(
                Step(
                    step=step,
                    at=began,
                    seconds=notes.now() - began,
                    capacity=stage.capacity,
                    others=stage.others,
                    live=world.live(),
                    peak=peak,
                    samples=samples,
                    elements=elements,
                    size=result.micro_batch_size,
                    partition=[list(piece) for piece in result.partition],
                    ooms=notes.ooms,
                    replayed=result.replayed_samples,
                    loss=trained.curve.losses[-1],
                    norm=trained.curve.norms[-1],
                    time_lost=notes.lost,
                    lowest=stage.lowest,
                    skipped=[list(piece) for piece in result.skipped],
                )
            )
            del result
            session.step = step + 1
            tell(trained.steps[-1])
            after(session, trained)
    session.close()
    del mbs
    gc.collect()
    expected = trained.steps[0].live if trained.steps else world.live()
    text = None if error is None else f"{type(error).__name__}: {str(error).splitlines()[0]}"
    trained.end = End(world.live(), expected, world.failures(), text, restored, seconds)
    with on_host():
        trained.curve.final = state_of(model)
    return trained


def _fetch(subject: Subject, step: int) -> Any:
    try:
        return batch_of(subject, step)
    except Exception as error:
        if classify(error) is None:
            raise
        raise NoRoomForBatchError(f"the batch of step {step} itself did not fit, which is made outside the runtime, so nothing was shown") from error


def _hooked(loss_fn: Callable[[Any], Any], inside: Callable[[], object]) -> Callable[[Any], Any]:
    @functools.wraps(loss_fn)  # sizes are learned by name
    def loss_of(piece: Any) -> Any:
        loss = loss_fn(piece)
        loss.register_hook(lambda _: inside())
        return loss

    return loss_of
