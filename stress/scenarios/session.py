"""Runs an order in this process: measures, trains under the script, and compares with a run without limits."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

from elastic_mbs.errors import UsageError
from elastic_mbs.events import format_bytes

from ..limits import CudaLimit, MemoryLimit, in_child, switch_onednn_off
from ..models.factory import make
from ..models.subject import one_line
from ..record import Differences, Needs, Run, Step
from .checkpoint import Checkpoint
from .facts import separable, whole
from .needs import ON_HOST, longest_batch, measure, measure_by_trial, smallest, warm
from .notes import Notes
from .order import Order
from .reference import SHAKEN, Curve, relative, rounding_of, shake, train_by_hand, weight_difference
from .train import Mortal, NoRoomForBatchError, Session, Trained, open_session, train
from .weather import Room, margin_of

Tell = Callable[[Step], object]


def nobody(step: Step) -> None:
    """Is told of steps and does nothing."""


def run(
    order: Order,
    world: MemoryLimit,
    tell: Tell = nobody,
    trained_all: Callable[[], object] = lambda: None,
    opened: Callable[[], object] = lambda: None,
) -> Run:
    """Carries an order out. What is trained is made before there is a limit: a real job's model is there before its co-tenant comes.

    Args:
        order: what to run.
        world: of its kind, not open yet.
        tell: told of each step.
        trained_all: called between training and comparison.
        opened: called when what is trained has been made.

    Raises:
        UsageError: the model cannot be trained like this, or the budget is below it.
    """
    began = time.perf_counter()
    with world:
        room = room_of(order, world)
        record = _about(order, world, room.needs)
        gc.collect()  # what was measured with is gone
        largest = None if order.entry.largest is None else largest_block(order, room.needs)
        notes = Notes()
        session, mortal = open_session(make(order.model, order.seed, world.device), order.entry, world, notes, order.seed + 7919 * order.process)
        opened()
        if largest is not None:
            world.fragment(largest)
        trained = _train(order, world, room, record, tell, notes, session, mortal)
        del session
        record.expandable = isinstance(world, CudaLimit) and world.expandable()
    trained_all()
    if trained is not None:
        with contextlib.ExitStack() as undo:
            if in_child(order.kind):
                undo.callback(switch_onednn_off())  # as while it trained: other kernels round otherwise, and in float32 that adds up
            _compare(order, trained, record)
    record.seconds = time.perf_counter() - began
    return record


def _about(order: Order, world: MemoryLimit, needs: Needs) -> Run:
    """A record without steps."""
    subject = make(order.model, order.seed, world.device)
    return Run(order.scenario, order.kind, subject.name, rounding_of(subject.model)[0], order.seed, needs, process=order.process)


def room_of(order: Order, world: MemoryLimit) -> Room:
    """What the model needs in this world, and what a share of it is.

    Raises:
        UsageError: the budget is below what the smallest micro-batch takes.
    """
    needs = needs_of(order, world)
    unit, margin = float(needs.samples), margin_of(order.kind)
    if order.budget is not None:
        unit = float(needs.fits(order.budget * (1 - margin)))
        if unit < needs.sizes[0]:
            raise UsageError(
                f"--budget: {format_bytes(order.budget)} are below the model: its smallest micro-batch ({needs.sizes[0]}) takes "
                f"{format_bytes(needs.one)}, and {margin:.0%} stay free; give at least {round(needs.one / (1 - margin)) + 1}"
            )
    return Room(needs, unit, copies=2 if order.entry.play == "two" else 1, margin=margin)


_known: dict[tuple[object, ...], Needs] = {}


def needs_of(order: Order, world: MemoryLimit) -> Needs:
    """What the model takes in this world; measured once in a process, unless the order says."""
    if order.needs is not None:
        return Needs.from_json(order.needs)
    key = (order.kind, order.model, order.seed, order.device, order.steps)
    if key not in _known:
        subject = make(order.model, order.seed, world.device)
        needs = measure(world, subject, order.steps)
        if order.kind == "rlimit":  # the kernel keeps no peak of what is mapped, and a size that runs for the first time under pressure may crash
            world.warm(partial(warm, world, subject, order.steps), range(min(smallest(subject), needs.samples), needs.samples + 1))
            needs = measure_by_trial(world, make(order.model, order.seed, world.device), needs, order.steps)
        _known[key] = needs
    return _known[key]


def largest_block(order: Order, needs: Needs) -> int:
    """Bytes of the largest block that can be had, where memory is fragmented: a share of the activations, but no parameter is larger.

    Nor is a part of a batch, where batches are on the device.
    """
    subject = make(order.model, order.seed, order.device, there="cpu")
    whole = [tensor.nbytes for tensor in subject.model.parameters()]
    if order.kind in ON_HOST:
        whole += [leaf.nbytes for leaf in tree_leaves(longest_batch(subject, order.steps)[0]) if isinstance(leaf, torch.Tensor)]
    return max(*whole, round((order.entry.largest or 1.0) * (needs.whole - needs.rest)))


def _train(
    order: Order, world: MemoryLimit, room: Room, record: Run, tell: Tell, notes: Notes, session: Session, mortal: Mortal | None
) -> Trained | None:
    """Trains, resuming where there is a checkpoint. An error that training does not promise is noted on the record."""
    notes.start()
    record.began, record.marks = notes.began, notes.marks
    keeper = None if order.folder is None else Checkpoint(Path(order.folder))
    before = keeper.load(session, notes) if keeper is not None else Trained()
    try:
        trained = train(
            session,
            order.entry,
            world,
            room,
            notes,
            steps=order.steps,
            seed=order.seed,
            mortal=mortal,
            tell=tell,
            after=_nothing if keeper is None else partial(keeper.save, notes=notes, before=before),
            inside=None if order.dies is None else partial(_die_in, order.dies),
        )
    except NoRoomForBatchError as error:
        record.complaints.append(str(error))
        return None
    except (Exception, SystemExit) as error:
        record.complaints.append(unexpected(error))
        return None
    record.end = trained.end
    trained = before.followed_by(trained)
    record.steps = trained.steps
    return trained


def unexpected(error: BaseException) -> str:
    """A complaint about an error that nobody has promised, with the place where it was raised."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"unexpected error: {one_line(error)} ({Path(where.filename).name}:{where.lineno})"


def _nothing(session: Session, trained: Trained) -> None:
    return


def _die_in(dies: int, step: int) -> None:
    if step == dies:
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))


def _compare(order: Order, trained: Trained, record: Run) -> None:
    """Notes the differences on the record, and what the user can do where there are some without a reason in the random numbers."""
    try:
        record.differences = found = compare(order, trained)
    except (Exception, SystemExit) as error:
        record.complaints.append(f"the run without limits, which it is compared with, has failed: {one_line(error)}")
        return
    if _off(found) and found.whole_loss is None and "replay" not in make(order.model, order.seed, order.device).options:
        record.complaints.append(
            "its gradient depends on how a batch is split: if that is not for random numbers or BatchNorm, its samples depend on each other inside a "
            'piece, which takes the option {"replay": "isolate"} (a dict as the factory\'s last entry)'
        )


def compare(order: Order, trained: Trained) -> Differences:
    """Largest differences from training without limits: over the same pieces, and on whole batches where the model is separable."""
    subject = make(order.model, order.seed, order.device)
    limits = rounding_of(subject.model)[1]
    mine = trained.curve
    other = train_by_hand(subject, [step.partition for step in trained.steps], order.seed, trained.evaluated)
    found = Differences(
        loss=relative(mine.losses, other.losses),
        norm=relative(mine.norms, other.norms),
        weight=weight_difference(mine.final, other.final),
        outputs=_outputs(mine, other),
        tolerance_loss=limits.loss,
        tolerance_weight=limits.weight,
    )
    if _off(found) and (":" in order.model or order.device != "cpu"):  # a user's, or float32; the built-in ones in float64 make no rounding larger
        found = _unexplained(order, trained, other, found)
    if not separable(order.model, order.seed, order.device):
        return found
    unlimited = whole(order.model, order.seed, order.device, len(trained.steps))
    return replace(found, whole_loss=relative(mine.losses, unlimited.losses), whole_weight=weight_difference(mine.final, unlimited.final))


def _off(found: Differences) -> bool:
    """Whether rounding does not explain the differences from the same pieces."""
    return not (found.loss <= found.tolerance_loss and max(found.norm, found.weight, found.outputs or 0.0) <= found.tolerance_weight)


def _unexplained(order: Order, trained: Trained, other: Curve, found: Differences) -> Differences:
    """What is left of the differences where training makes a rounding larger with each step; in its first steps that is all of them."""
    subject, mine = make(order.model, order.seed, order.device), trained.curve
    shake(subject.model)
    shaken = train_by_hand(subject, [step.partition for step in trained.steps], order.seed, trained.evaluated)
    off, own = ({name: weight_difference(each.final, other.final, [name]) for name in other.final} for each in (trained.curve, shaken))
    names = [name for name in other.final if off[name] > SHAKEN * own[name]]
    outputs = _outputs(mine, other)
    if outputs is not None and outputs <= SHAKEN * (_outputs(shaken, other) or 0.0):
        outputs = 0.0
    return replace(
        found,
        loss=relative(mine.losses, other.losses, shaken.losses),
        norm=relative(mine.norms, other.norms, shaken.norms),
        weight=weight_difference(mine.final, other.final, names),
        outputs=outputs,
    )


def _outputs(mine: Curve, other: Curve) -> float | None:
    """None where the model gave nothing that could be compared."""
    pairs = list(zip(mine.outputs, other.outputs, strict=True))
    return max((relative(a, b) for a, b in pairs if a or b), default=None)
