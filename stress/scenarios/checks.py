"""What is asserted of a run: pure functions from its record to complaints, in words with numbers.

Bounds on failures are what the controller promises (DESIGN.md, "Controller"): it halves until a piece fits, tries one size in between, and grows only
by what was measured. Allocators strike less predictably than counts, so their bounds are looser; what must be exact is exact everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from elastic_mbs.events import format_bytes

from ..record import Run, Step
from .scripts import margin_of

Check = Callable[[Run], list[str]]

COUNTED = frozenset({"budget", "shim"})
"""Kinds that fail at an exact count of bytes, and whose sensor reads that count."""

SLACK = {"budget": 0, "shim": 0, "rlimit": 2**20, "cuda": 0}
"""Bytes by which a run may hold more at its end than at rest: a process limit counts the interpreter's own memory, too."""


def went_on_to(steps: int) -> Check:
    """Every step was made, and nothing was raised."""

    def check(run: Run) -> list[str]:
        error = run.end.error if run.end is not None else "no end was recorded"
        if error is not None:
            return [f"training ended at step {len(run.steps)} of {steps} by an error: {error}"]
        if [step.step for step in run.steps] != list(range(steps)):
            return [f"{len(run.steps)} steps of {steps} were recorded"]
        return []

    return check


def exact(run: Run) -> list[str]:
    """Losses, gradient norms, parameters, buffers and outputs are those of a run without limits."""
    found = run.differences
    if found is None:
        return ["it was not compared with a run without limits"]
    rows = (
        ("a step's loss", found.loss, found.tolerance_loss, "the same pieces"),
        ("a gradient's norm", found.norm, found.tolerance_weight, "the same pieces"),
        ("a parameter or buffer at the end", found.weight, found.tolerance_weight, "the same pieces"),
        ("an output of the evaluation", found.outputs, found.tolerance_weight, "the same pieces"),
        ("a step's loss", found.whole_loss, found.tolerance_loss, "whole batches"),
        ("a parameter at the end", found.whole_weight, found.tolerance_weight, "whole batches"),
    )
    return [
        f"{what} differs by {value:.1e} from training on {over}; rounding explains {limit:.0e} in {run.dtype}"
        for what, value, limit, over in rows
        if value is not None and not value <= limit
    ]


def covers_every_sample(run: Run) -> list[str]:
    """The committed pieces of each step, and what was left out because nothing in it counts, cover its batch once, without a gap."""
    complaints = []
    for step in run.steps:
        ranges = sorted([*step.partition, *step.skipped])
        starts, stops = [start for start, _ in ranges], [stop for _, stop in ranges]
        if [*starts, step.samples] != [0, *stops] or any(stop <= start for start, stop in ranges):
            left_out = f" and {step.skipped} left out" if step.skipped else ""
            complaints.append(f"the pieces of step {step.step} do not cover its {step.samples} samples once: {step.partition}{left_out}")
    return complaints


def nothing_held(run: Run) -> list[str]:
    """What is live at the end is what is live at rest."""
    if run.end is None:
        return []
    expected = max(run.end.expected, run.needs.rest) if run.kind == "shim" else run.end.expected  # what libraries keep may come in a later step
    more = run.end.held - expected
    if more > SLACK.get(run.kind, 0):
        return [f"{format_bytes(more)} more are held at the end ({run.end.held} bytes) than after the first step ({expected} bytes)"]
    return []


def nothing_happened(run: Run) -> list[str]:
    """No failure, no word from the runtime but its growth at the start, and at the end the batch runs in one piece."""
    usual = {"grow", "move", "eval", "checkpoint"}
    complaints = [f"step {mark.step}: {mark.what}: {mark.text}" for mark in run.marks if mark.what not in usual]
    if run.steps and run.steps[-1].pieces > 1:
        complaints.append(f"there is room for the batch, but it still runs in {run.steps[-1].pieces} pieces at the end")
    return complaints


def something_happened(run: Run) -> list[str]:
    """At least one failure, without which nothing would be shown."""
    return [] if run.ooms else ["memory never ran out, so nothing was shown"]


def cut_up(run: Run) -> list[str]:
    """No step's batch went through whole, without which it has fitted."""
    whole = [step.step for step in run.steps if step.pieces == 1 and step.samples > run.needs.sizes[0]]
    return [f"the whole batch went through at once in step {whole[0]}, so nothing was shown"] if whole else []


def broken_up(run: Run) -> list[str]:
    """At least one failure, except where the allocator can mend broken memory: there training has to come through, and need not fail."""
    return [] if run.expandable else something_happened(run)


def bounded(run: Run) -> list[str]:
    """No more failures than the changes of memory explain; see `allowed_ooms`."""
    if not run.steps:  # what has ended it is a complaint of its own
        return []
    allowed = allowed_ooms(run)
    found = sum(mark.what == "oom" for mark in run.marks)
    if found > allowed:
        return [f"{found} out-of-memory errors, where the moves of memory explain {allowed}"]
    return []


def allowed_ooms(run: Run) -> int:
    """Failures that the controller may need.

    At the start one while probing and one for a size in between. For each time that memory falls, from its high to its low, the halvings from what
    was running to what fits, and one for a size in between. For each return one, for a growth that smaller sizes have promised. Each shape class
    learns for itself.
    """
    allowed = 0
    for steps in classes(run.steps):
        allowed += 2
        top, halved, before = steps[0].samples, 0, math.inf
        for step in steps:
            lowest = min(step.available, math.inf if step.lowest is None else step.lowest)
            fits = max(1, run.needs.fits(lowest))
            if lowest < before and top > fits:
                halved = max(halved, math.ceil(math.log2(top / fits)) + 1)
            if step.available > before:  # the fall is over
                allowed, halved, top = allowed + halved + 1, 0, 0
            before, top = step.available, max(top, step.longest)
        allowed += halved
    return allowed if run.kind in COUNTED else 2 * allowed + 3


def classes(steps: Iterable[Step]) -> list[list[Step]]:
    """The steps by shape class: elements per sample, in powers of two."""
    found: dict[int, list[Step]] = {}
    for step in steps:
        found.setdefault(step.elements.bit_length(), []).append(step)
    return list(found.values())


def grown_back(run: Run) -> list[str]:
    """At the end as few pieces as fit into the memory that is there again."""
    if not run.steps:
        return []
    last = run.steps[-1]
    needs = run.needs.foreseen()
    # What steps took beyond what was measured by hand (an allocator's cache, say): the runtime sees it and has to leave room for it.
    quiet = [step for step in run.steps if step.partition and not step.ooms]
    beyond = max([0, *(step.peak - needs.at(step.longest) for step in quiet)])
    fits = needs.fits(last.available * (1 - margin_of(run.kind)) + 1 - beyond) if math.isfinite(last.available) else last.samples
    if fits < 1 or last.pieces <= math.ceil(last.samples / fits):
        return []
    return [
        f"memory for {fits} of {last.samples} samples is there at the end, but they run in {last.pieces} pieces of up to {last.size}"
        f" instead of {math.ceil(last.samples / fits)}"
    ]


def ended_at_the_floor(within: float) -> Check:
    """Training ended by the floor error, `within` seconds from the start of the call, and left everything as it was."""

    def check(run: Run) -> list[str]:
        end = run.end
        if end is None or end.error is None:
            return ["not even one sample fits, but no error was raised"]
        complaints = []
        if not end.error.startswith("MicroBatchFloorError"):
            complaints.append(f"not even one sample fits, but training ended by {end.error}")
        if end.seconds > within:
            complaints.append(f"the error came after {end.seconds:.1f} s; {within:g} s are enough to know")
        if end.restored is not True:
            complaints.append("parameters, buffers, gradients or random streams were not as at the start of the call")
        return complaints

    return check


def froze_while_blind(dead: Callable[[int, int], bool]) -> Check:
    """Nothing grew while the sensor was dead; that it died and came back was said."""

    def check(run: Run) -> list[str]:
        blind = {step.step for step in run.steps if dead(step.step, len(run.steps))}
        said = [mark.what for mark in run.marks if mark.what in {"sensor_lost", "sensor_back"}]
        complaints = [f"step {mark.step}: it grew without a sensor: {mark.text}" for mark in run.marks if mark.what == "grow" and mark.step in blind]
        if said != ["sensor_lost", "sensor_back"]:
            complaints.append(f"the sensor was lost once and came back once, but what was said is {said or 'nothing'}")
        if not any(mark.what == "grow" and mark.step > max(blind, default=0) for mark in run.marks):
            complaints.append("nothing grew after the sensor was back, although memory was")
        return complaints

    return check


def calm(cooldown: float) -> Check:
    """Failures stay rare where memory comes back again and again: each failed growth doubles the policy's cooldown."""

    def check(run: Run) -> list[str]:
        if not run.steps:
            return []
        seconds = run.steps[-1].at + run.steps[-1].seconds
        allowed = 2 + math.ceil(1 + math.log2(1 + seconds / cooldown))
        found = sum(mark.what == "oom" for mark in run.marks)
        if found > (allowed if run.kind in COUNTED else 2 * allowed):
            explained = f"where a cooldown of {cooldown:g} s that doubles allows {allowed}"
            return [f"{found} out-of-memory errors in {seconds:.1f} s of flapping memory, {explained}"]
        return []

    return check


def optimizer_struck(run: Run) -> list[str]:
    """The optimizer's step ran out of memory, or had to make room, and went through all the same."""
    if run.needs.optimizer <= 0 or not run.steps or run.steps[0].capacity is None:
        return ["the optimizer's first step was not measured"]
    if not any(mark.what == "optimizer" for mark in run.marks):
        return ["the optimizer's first step never ran out of memory, so nothing was shown"]
    return []


def evaluated(run: Run) -> list[str]:
    """There were evaluations between the steps, and they gave something to compare."""
    if not any(mark.what == "eval" for mark in run.marks):
        return ["nothing was evaluated between the steps"]
    if run.differences is not None and run.differences.outputs is None:
        return ["the model's output has no row for each sample to compare, so nothing was shown of the evaluation"]
    return []


def resumed(run: Run) -> list[str]:
    """It was killed, went on from its checkpoint, and knew its size at once."""
    marks = {mark.what: mark for mark in run.marks}
    if "killed" not in marks or "resumed" not in marks:
        return [f"it was to be killed and resumed; {' and '.join(what for what in ('killed', 'resumed') if what not in marks)} never happened"]
    at = marks["resumed"].step
    before = [step for step in run.steps if step.step < at]
    after = [step for step in run.steps if step.step >= at]
    if not before or not after:
        return [f"there are {len(before)} steps before the checkpoint and {len(after)} after it"]
    complaints = []
    known, first = before[-1], after[0]
    if first.pieces > known.pieces or first.size < known.size:
        complaints.append(
            f"it had to learn its size again: {known.pieces} pieces of up to {known.size} before, {first.pieces} of up to {first.size} after"
        )
    if any(mark.what == "oom" and mark.step >= at and mark.at > marks["resumed"].at for mark in run.marks):
        complaints.append("memory ran out after it was resumed, although it had not changed")
    return complaints


def fair(runs: Sequence[Run]) -> list[str]:
    """Of two processes on one device none is pushed below a third of what it could have next to an equal, while both run."""
    complaints = []
    both = min(run.began + run.steps[-1].at for run in runs if run.steps) if all(run.steps for run in runs) else 0.0
    for run in runs:
        together = [step for step in run.steps if run.began + step.at <= both]
        if not together:
            complaints.append(f"process {run.process + 1} never ran while the other did")
            continue
        late = together[-max(3, len(together) // 4) :]
        size = sum(step.longest for step in late) / len(late)
        share = run.needs.fits((late[-1].capacity or 0) / len(runs))
        if size < share / 3:
            complaints.append(f"process {run.process + 1} ends at micro-batches of {size:.1f}, below a third of its share of {share}")
    return complaints
