"""Carries scenarios out, in this process or in others, and judges their records."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastic_mbs.errors import UsageError

from ..limits import UNLIMITED, Child, ChildError, Confined, Crashed, Fence, in_child, run_child, run_children
from ..models.subject import words
from ..record import Mark, Needs, Run, Step
from . import checks, job
from .meeting import Meeting
from .order import Order
from .session import run as run_here
from .session import unexpected
from .weather import Room, margin_of

Tell = Callable[[Step], object]


def perform(order: Order, tell: Tell) -> list[Run]:
    """Carries an order out and judges it.

    Args:
        order: what to run; `process`, `folder`, `dies` and `needs` are set here where the scenario wants them.
        tell: told of each step of the (first) process.

    Returns:
        The record; two where the scenario has two processes.

    Raises:
        UsageError: the model cannot be trained like this, or the budget is below it.
    """
    play = {"train": _train, "kill": _kill, "two": _two}[order.entry.play]
    try:
        return judge(play(order, tell), order)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # of the user's factory, loss or batches: the other scenarios have nothing to do with it
        return [failed(order, unexpected(error))]


def judge(runs: list[Run], order: Order) -> list[Run]:
    """Asks everything that is asserted of the records, and notes what is wrong on them."""
    for run in runs:
        if run.end is not None:
            run.complaints += [complaint for check in order.entry.everything(order.steps) for complaint in check(run)]
    if len(runs) > 1 and all(run.end is not None for run in runs):
        runs[0].complaints += checks.fair(runs)
    for run in runs:
        if OWN in order.model:
            _excuse(run)
        if order.steps < order.entry.quick:
            _allow_for_few_steps(run, order)
        run.passed = not run.complaints
    return runs


def _grave(run: Run) -> set[str]:
    """Complaints that nothing excuses."""
    return {*checks.exact(run), *checks.covers_every_sample(run), *checks.nothing_held(run)}


def _allow_for_few_steps(run: Run, order: Order) -> None:
    """In fewer steps than the bounded set has, memory comes back too late to grow into it: that is said, but not held against the training."""
    if run.end is None:
        return
    late = {complaint for check in order.entry.checks for complaint in check(run)} - _grave(run)
    light = [complaint for complaint in run.complaints if complaint in late]
    if light and run.end.error is None:
        run.complaints = [complaint for complaint in run.complaints if complaint not in late]
        run.unshown = f"{order.steps} steps are too few for it ({order.entry.quick} are enough): {light[0]}"


OWN = ":"
"""Stands in the name of a model that is the user's own."""
FLAT = 0.1
"""Part of what the whole batch takes that must depend on the micro-batch, or smaller ones help nobody."""


def _excuse(run: Run) -> None:
    """What a scenario could not show on a model that it was not written for is no fault of the training: said, but not held against it."""
    if not run.needs.samples:  # a process that has left no record
        return
    depends = (run.needs.whole - run.needs.one) / max(1, run.needs.whole)
    differences = checks.exact(run)
    grave = _grave(run)
    if all("whole batches" in complaint for complaint in differences):
        grave -= {*differences}  # the same pieces give the same curve: what is left is rounding, which some training makes larger with each step
    floor = run.end is not None and (run.end.error or "").startswith("MicroBatchFloorError")

    def is_light(complaint: str) -> bool:
        if complaint in grave:
            return False
        if complaint.startswith("unexpected error"):  # its room is right for its own model's state only
            return run.scenario == "optimizer_first_step" and "OptimizerStepError" in complaint
        words = ("so nothing was shown", "was not measured", "whole batches", *(("MicroBatchFloorError",) if floor else ()))
        return depends < FLAT or any(word in complaint for word in words)

    light = [complaint for complaint in run.complaints if is_light(complaint)]
    if light:
        run.complaints = [complaint for complaint in run.complaints if complaint not in light]
        least = run.needs.sizes[0]
        alone = "its batch is a single sample" if run.needs.samples == 1 else f"its batch of {run.needs.samples} cannot be cut into pieces of {least}"
        flat = alone if run.needs.samples < 2 * least else f"its whole batch takes only {depends:.1%} more than its smallest micro-batch"
        run.unshown = flat if depends < FLAT else light[0]


def _train(order: Order, tell: Tell) -> list[Run]:
    return [_in_child(order, tell)] if in_child(order.kind) else [run_here(order, job.open_for(order), tell)]


def _in_child(order: Order, tell: Tell) -> Run:
    try:
        for message in run_child(order.kind, job.main, order.to_json(), deadline=order.deadline):
            if "step" in message:
                tell(Step.from_json(message["step"]))
            if "run" in message:
                return Run.from_json(message["run"])
    except ChildError as error:
        return failed(order, words(error))
    return failed(order, "the process ended without a record")


def failed(order: Order, complaint: str) -> Run:
    """The record of a run that has left none."""
    return Run(order.scenario, order.kind, order.model, "", order.seed, Needs(0, 0, [1], [0]), process=order.process, complaints=[complaint])


def _kill(order: Order, tell: Tell) -> list[Run]:
    """Two processes, one after the other: the first kills itself in the middle of a backward, the second goes on from the checkpoint."""
    dies = order.steps * 5 // 8
    with tempfile.TemporaryDirectory(prefix="elastic-mbs-stress-") as folder:
        doomed = replace(order, folder=folder, dies=dies)
        try:
            for message in run_child(order.kind, job.main, doomed.to_json(), deadline=order.deadline):
                if "step" in message:
                    tell(Step.from_json(message["step"]))
            return [failed(order, f"it was to be killed in step {dies}, but went on to its end")]
        except Crashed as error:
            if error.signal != "SIGKILL":
                return [failed(order, words(error))]
        except ChildError as error:
            return [failed(order, words(error))]
        run = _in_child(replace(order, folder=folder), tell)
    resumed = next((mark for mark in run.marks if mark.what == "resumed"), None)
    if resumed is not None:
        at = run.marks.index(resumed)
        run.marks.insert(at, Mark(resumed.at, dies, "killed", f"SIGKILL in a backward of step {dies}"))
    return [run]


def _two(order: Order, tell: Tell) -> list[Run]:
    """Two processes at the same time on one device, which is made as large as both together may need."""
    return _two_on_cuda(order, tell, Confined()) if order.kind == "cuda" else _two_in_a_fence(order, tell)


def _two_on_cuda(order: Order, tell: Tell, device: Confined) -> list[Run]:
    """On a GPU a ballast process takes all but what both may have, once both have what libraries keep for good."""
    needs: dict[int, Needs] = {}
    two = _Two(order, tell)
    with tempfile.TemporaryDirectory(prefix="elastic-mbs-stress-") as folder:
        meeting = Meeting(Path(folder))
        orders = [replace(order, process=process, meeting=folder) for process in (0, 1)]
        try:
            with device:
                for index, message in run_children([Child(order.kind, job.main, each.to_json(), deadline=order.deadline) for each in orders]):
                    if "needs" in message:
                        needs[index] = Needs.from_json(message["needs"])
                        if len(needs) == len(orders):
                            room = Room(needs[0], needs[0].samples, copies=2, margin=margin_of(order.kind))
                            device.leave(room.capacity(order.entry.script(0, order.steps, order.seed)))
                            meeting.say("begin")
                    if two.hear(index, message):
                        device.leave(None)  # for the references
                        meeting.say("compare")
        except ChildError as error:
            return [failed(order, words(error))]
    return two.records()


class _Two:
    """What two processes on one device have told."""

    def __init__(self, order: Order, tell: Tell) -> None:
        self._order, self._tell = order, tell
        self._training = {0, 1}
        self._found: list[Run | None] = [None, None]

    def hear(self, index: int, message: Mapping[str, Any]) -> bool:
        """Takes in what one has told; returns whether both have now trained."""
        if "step" in message and index == 0:
            self._tell(Step.from_json(message["step"]))
        if "run" in message:
            self._found[index] = Run.from_json(message["run"])
        if "trained" not in message:
            return False
        self._training.discard(index)
        return not self._training

    def records(self) -> list[Run]:
        """Of both; a failed one for a process that has left none."""
        lost = "the process ended without a record"
        return [failed(replace(self._order, process=i), lost) if run is None else run for i, run in enumerate(self._found)]


def _two_in_a_fence(order: Order, tell: Tell) -> list[Run]:
    try:
        needs = next(Needs.from_json(message["needs"]) for message in run_child(order.kind, job.measure, order.to_json(), deadline=order.deadline))
        capacity = Room(needs, needs.samples, copies=2).capacity(order.entry.script(0, order.steps, order.seed))
        two, opening = _Two(order, tell), {0, 1}
        with tempfile.TemporaryDirectory(prefix="elastic-mbs-stress-") as folder, Fence.create() as fence:
            meeting = Meeting(Path(folder))
            orders = [replace(order, process=process, needs=needs.to_json(), meeting=folder) for process in (0, 1)]
            children = [Child(order.kind, job.main, each.to_json(), deadline=order.deadline, fence=fence) for each in orders]
            for index, message in run_children(children):
                if "opened" in message:
                    opening.discard(index)
                    if not opening:
                        fence.budget = capacity
                        meeting.say("begin")
                if two.hear(index, message):
                    fence.budget = UNLIMITED  # for the references
                    meeting.say("compare")
    except ChildError as error:
        return [failed(order, words(error))]
    return two.records()
