"""Scenarios carried out, in this process or in others, and verdicts on their records."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

import torch

from elastic_mbs.errors import UsageError

from ..limits import (
    ON_GPU,
    Child,
    ChildError,
    Confined,
    Fence,
    Line,
    in_child,
    run_child,
    run_children,
)
from ..models.subject import words
from ..record import Mark, Needs, Run, Step
from . import checks
from .catalogue import Order
from .run import Tell, room_of, run, unexpected

# Part of the whole batch's need that must depend on the micro-batch; below it, smaller ones do not
# help.
FLAT = 0.1


def perform(order: Order, tell: Tell) -> list[Run]:
    """Carry an order out and judge its record; two records where it has two processes.

    `tell` gets each step of the first process. Raises a UsageError as `run` does.
    """
    try:
        if order.entry.together:  # on one device, which is made as large as both together may need
            return judge(
                two_on(Confined() if order.kind in ON_GPU else Fence.create(), order, tell), order
            )
        play = _kill if order.entry.killed else _in_child if in_child(order.kind) else run
        return judge([play(order, tell)], order)
    except UsageError:
        raise
    except ChildError as error:
        return [failed(order, words(error))]
    except (Exception, SystemExit) as error:
        # It is of the user's factory, loss or batches: the other scenarios are not concerned.
        return [failed(order, unexpected(error))]


def failed(order: Order, complaint: str = "the process ended without a record") -> Run:
    """Return the record of a run that has left none."""
    return Run(
        order.scenario,
        order.kind,
        order.model,
        "",
        order.seed,
        Needs(0, 0, [1], [0]),
        process=order.process,
        complaints=[complaint],
    )


# ---------------------------------------------------------------------- processes


def carry_out(line: Line, order: Order) -> None:
    """Carry an order out in a child.

    Emits a `Step` after each step, the `Run` at the end, and in between the moments at which it
    waits
    for another process.
    """
    torch.set_num_threads(1)

    def meet(moment: str, known: Any) -> Any:
        if not order.entry.together:
            return None
        line((moment, known))
        return line.receive()

    def tell(step: Step) -> None:
        line(step)
        # A process that is through before the other has begun would show nothing.
        if step.step == 0:
            meet("trains", None)

    line(run(order, tell, meet))


def _in_child(order: Order, tell: Tell) -> Run:
    for message in run_child(order.kind, carry_out, {"order": order}, deadline=order.deadline):
        if isinstance(message, Run):
            return message
        tell(message)
    return failed(order)


def _kill(order: Order, tell: Tell) -> Run:
    """Run two processes, one after the other.

    The first kills itself in the middle of a backward, the second goes on from the checkpoint.
    """
    dies = order.steps * 5 // 8
    with tempfile.TemporaryDirectory(prefix="elastic-mbs-stress-") as folder:
        try:
            _in_child(replace(order, folder=folder, dies=dies), tell)
            return failed(order, f"it was to be killed in step {dies}, but went on to its end")
        except ChildError as error:
            if error.how != "crash by SIGKILL":
                raise
        record = _in_child(replace(order, folder=folder), tell)
    resumed = next((i for i, mark in enumerate(record.marks) if mark.what == "resumed"), None)
    if resumed is not None:
        record.marks.insert(
            resumed,
            Mark(record.marks[resumed].at, dies, "killed", f"SIGKILL in a backward of step {dies}"),
        )
    return record


def two_on(device: Confined | Fence, order: Order, tell: Tell) -> list[Run]:
    """Run two processes at the same time.

    The device gets its size when both models are there, and loses it for the references, which are
    not
    made for it.
    """
    fence = device if isinstance(device, Fence) else None
    orders = [replace(order, process=process) for process in (0, 1)]
    children = [
        Child(order.kind, carry_out, {"order": each}, deadline=order.deadline, fence=fence)
        for each in orders
    ]
    records = [failed(each) for each in orders]
    waiting: dict[int, Any] = {}
    with device:
        for index, message in run_children(children):
            if isinstance(message, Run):
                records[index] = message
            elif isinstance(message, Step):
                if index == 0:
                    tell(message)
            else:
                moment, waiting[index] = message
                if len(waiting) < len(children):
                    continue
                size: int | None = None
                if moment == "made":
                    size = room_of(order, waiting[0][0]).capacity(
                        order.entry.script(0, order.steps, order.seed)
                    )
                    device.leave(size, held=sum(held for _, held in waiting.values()))
                elif moment == "trained":
                    device.leave(None)
                waiting.clear()
                for child in children:
                    child.send(size)
    return records


# ---------------------------------------------------------------------- verdicts


def judge(runs: list[Run], order: Order) -> list[Run]:
    """Make every check of the scenario, and note complaints on the records."""
    ended = [each for each in runs if each.end is not None]
    for each in ended:
        each.complaints += [
            complaint for check in order.entry.all_checks(order.steps) for complaint in check(each)
        ]
    if len(ended) == len(runs) > 1:
        runs[0].complaints += checks.fair(runs)
    for each in runs:
        differences = set(checks.exact(each))
        # Complaints that nothing excuses.
        grave = {*checks.covers_every_sample(each), *checks.nothing_held(each)}
        if not order.own or not all("whole batches" in complaint for complaint in differences):
            # Else the same pieces give the same curve: only rounding is left, which some training
            # makes larger.
            grave |= differences
        excuses = {
            complaint: _excuse(order, each, complaint)
            for complaint in each.complaints
            if complaint not in grave
        }
        each.unshown = next(filter(None, excuses.values()), "")
        each.complaints = [complaint for complaint in each.complaints if not excuses.get(complaint)]
        each.passed = not each.complaints
    return runs


def _excuse(order: Order, each: Run, complaint: str) -> str:
    """Return why a complaint is no fault of the training, or "".

    The scenario was not written for the user's model, or had too few steps.
    """
    if order.own and each.needs.samples and not complaint.startswith("unexpected error"):
        excused = ["so nothing was shown", "was not measured", "whole batches"]
        if each.end is not None and (each.end.error or "").startswith("MicroBatchFloorError"):
            excused.append("MicroBatchFloorError")
        small = _too_small(each.needs)
        if small or any(text in complaint for text in excused):
            return small or complaint
    if (
        order.own
        and complaint.startswith("unexpected error: OptimizerStepError")
        and each.scenario == "optimizer_first_step"
    ):
        return complaint  # the room of that scenario is right for its own model's state only
    late = order.steps < order.entry.quick and each.end is not None and each.end.error is None
    if late and any(complaint in check(each) for check in order.entry.checks):
        return (
            f"{order.steps} steps are too few for it ({order.entry.quick} are enough): {complaint}"
        )
    return ""


def _too_small(needs: Needs) -> str:
    """Return why smaller micro-batches do not help the user's model, or ""."""
    depends = (needs.whole - needs.one) / max(1, needs.whole)
    if depends >= FLAT:
        return ""
    if needs.samples >= 2 * needs.sizes[0]:
        return f"its whole batch takes only {depends:.1%} more than its smallest micro-batch"
    return (
        "its batch is a single sample"
        if needs.samples == 1
        else f"its batch of {needs.samples} cannot be cut into pieces of {needs.sizes[0]}"
    )
