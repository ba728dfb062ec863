"""Checks of a run: pure functions from its record to complaints, in words with numbers.

Bounds on failures are the controller's promises (docs/design.md): it halves until a piece fits,
tries one size in between, and grows only by what was measured. Allocators strike less predictably
than counts, so their bounds are looser; results are exact everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from elastic_mbs.events import format_bytes

from ..record import Run, Step
from .scripts import FLAP, dead, margin_of

Check = Callable[[Run], Iterator[str]]

# Kinds that fail at an exact count of bytes, and whose sensor reads that count.
COUNTED = frozenset({"budget", "shim"})
# Bytes that may be held more at the end than at rest: a process limit counts the interpreter's own
# memory, too.
SLACK = {"rlimit": 2**20}
FLOOR_SECONDS = 10.0  # within which a call has to find out that not even one sample fits


def went_on_to(run: Run, steps: int) -> Iterator[str]:
    """Check that every step was made, and nothing was raised."""
    error = "no end was recorded" if run.end is None else run.end.error
    if error is not None:
        yield f"training ended at step {len(run.steps)} of {steps} by an error: {error}"
    elif [step.step for step in run.steps] != list(range(steps)):
        yield f"{len(run.steps)} steps of {steps} were recorded"


def exact(run: Run) -> Iterator[str]:
    """Check that losses, norms, parameters, buffers and outputs are those without limits."""
    found = run.differences
    if found is None:
        yield "it was not compared with a run without limits"
        return
    rows = (
        ("a step's loss", found.loss, found.tolerance_loss, "the same pieces"),
        ("a gradient's norm", found.norm, found.tolerance_weight, "the same pieces"),
        (
            "a parameter or buffer at the end",
            found.weight,
            found.tolerance_weight,
            "the same pieces",
        ),
        ("an output of the evaluation", found.outputs, found.tolerance_weight, "the same pieces"),
        ("a step's loss", found.whole_loss, found.tolerance_loss, "whole batches"),
        ("a parameter at the end", found.whole_weight, found.tolerance_weight, "whole batches"),
    )
    for what, value, limit, over in rows:
        if value is not None and not value <= limit:  # a comparison with NaN is false
            yield (
                f"{what} differs by {value:.1e} from training on {over}; rounding explains "
                f"{limit:.0e} in {run.dtype}"
            )


def covers_every_sample(run: Run) -> Iterator[str]:
    """Check that each step's committed pieces cover its batch once, without a gap."""
    for step in run.steps:
        ranges = sorted(step.partition)
        starts, stops = [start for start, _ in ranges], [stop for _, stop in ranges]
        if [*starts, step.samples] != [0, *stops] or any(stop <= start for start, stop in ranges):
            yield (
                f"the pieces of step {step.step} do not cover its {step.samples} samples once: "
                f"{step.partition}"
            )


def nothing_held(run: Run) -> Iterator[str]:
    """Check that no more is live at the end than at rest."""
    if run.end is None:
        return
    # Libraries may allocate for good in a later step.
    expected = max(run.end.expected, run.needs.rest) if run.kind == "shim" else run.end.expected
    more = run.end.held - expected
    if more > SLACK.get(run.kind, 0):
        yield (
            f"{format_bytes(more)} more are held at the end ({run.end.held} bytes) than after the "
            f"first step ({expected} bytes)"
        )


def nothing_happened(run: Run) -> Iterator[str]:
    """Check that nothing happened but growth at the start.

    At the end the batch runs in one piece.
    """
    for mark in run.marks:
        if mark.what not in {"grow", "move", "eval", "checkpoint"}:
            yield f"step {mark.step}: {mark.what}: {mark.text}"
    if run.steps and run.steps[-1].pieces > 1:
        yield (
            f"there is room for the batch, but it still runs in {run.steps[-1].pieces} pieces at "
            "the end"
        )


def something_happened(run: Run) -> Iterator[str]:
    """Check that there was a failure, without which nothing would be shown."""
    if not run.ooms:
        yield "memory never ran out, so nothing was shown"


def broken_up(run: Run) -> Iterator[str]:
    """Check that there was a failure, unless the allocator can mend fragmented memory.

    Training then has to come through, and need not fail.
    """
    return iter(()) if run.expandable else something_happened(run)


def cut_up(run: Run) -> Iterator[str]:
    """Check that no step's batch went through whole, without which it has fitted."""
    whole = [
        step.step for step in run.steps if step.pieces == 1 and step.samples > run.needs.sizes[0]
    ]
    if whole:
        yield f"the whole batch went through at once in step {whole[0]}, so nothing was shown"


def bounded(run: Run) -> Iterator[str]:
    """Check that changes of memory explain all failures; see `allowed_ooms`."""
    found = run.count("oom")
    allowed = allowed_ooms(run)
    # An end before the first step is a complaint of its own.
    if run.steps and found > allowed:
        yield f"{found} out-of-memory errors, where the moves of memory explain {allowed}"


def bounded_by_halvings(run: Run) -> Iterator[str]:
    """Check that the halvings to the smallest size that ran explain all failures, but for two.

    By free bytes nothing is predicted where no block of them is large enough.
    """
    found = run.count("oom")
    if not run.steps:
        return
    smallest = min(step.longest for step in run.steps)
    allowed = math.ceil(math.log2(run.steps[0].samples / smallest)) + 2
    if found > (allowed if run.kind in COUNTED else 2 * allowed + 3):
        yield f"{found} out-of-memory errors, where the halvings to {smallest} explain {allowed}"


def allowed_ooms(run: Run) -> int:
    """Return the number of failures that the controller may need.

    Each shape class (elements per sample, in powers of two) learns for itself. Two failures are
    allowed at the start. Where memory falls below a size that ran, the halvings to a size that fits
    are allowed, and one more: for a size in between, or for a size that ran once more because the
    fall was too small to see. Each return of memory allows one, for a growth.
    """
    classes: dict[int, list[Step]] = {}
    for step in run.steps:
        classes.setdefault(step.elements.bit_length(), []).append(step)
    allowed = 0
    for steps in classes.values():
        allowed += 2
        ran = steps[0].samples
        before = math.inf
        for step in steps:
            lowest = min(step.available, math.inf if step.lowest is None else step.lowest)
            fits = max(1, run.needs.fits(lowest))
            if lowest < before and ran > fits:
                allowed += math.ceil(math.log2(ran / fits)) + 1
            if step.available > before:
                allowed += 1
            before = step.available
            ran = step.longest
    return allowed if run.kind in COUNTED else 2 * allowed + 3


def grown_back(run: Run) -> Iterator[str]:
    """Check that the run ended with as few pieces as the memory that is back allows."""
    if not run.steps:
        return
    last = run.steps[-1]
    needs = run.needs.foreseen()
    # Need of steps beyond the measurements by hand (an allocator's cache, say): the runtime sees it
    # and has to leave room for it.
    beyond = max(
        [
            0,
            *(
                step.peak - needs.at(step.longest)
                for step in run.steps
                if step.partition and not step.ooms
            ),
        ]
    )
    fits = (
        needs.fits(last.available * (1 - margin_of(run.kind)) + 1 - beyond)
        if math.isfinite(last.available)
        else last.samples
    )
    if fits >= 1 and last.pieces > math.ceil(last.samples / fits):
        there = f"memory for {fits} of {last.samples} samples is there at the end"
        yield (
            f"{there}, but they run in {last.pieces} pieces of up to {last.size} instead of "
            f"{math.ceil(last.samples / fits)}"
        )


def ended_at_the_floor(run: Run) -> Iterator[str]:
    """Check that training ended by the floor error, soon after the start of the call.

    Everything has to be as it was.
    """
    end = run.end
    if end is None or end.error is None:
        yield "not even one sample fits, but no error was raised"
        return
    if not end.error.startswith("MicroBatchFloorError"):
        yield f"not even one sample fits, but training ended by {end.error}"
    if end.seconds > FLOOR_SECONDS:
        yield f"the error came after {end.seconds:.1f} s; {FLOOR_SECONDS:g} s are enough to know"
    if end.restored is not True:
        yield "parameters, buffers, gradients or random streams were not as before the call"


def froze_while_blind(run: Run) -> Iterator[str]:
    """Check that nothing grew while the sensor was dead, and that its end and return were told."""
    blind = {step.step for step in run.steps if dead(step.step, len(run.steps))}
    grown = [mark for mark in run.marks if mark.what == "grow"]
    said = [mark.what for mark in run.marks if mark.what in {"sensor_lost", "sensor_back"}]
    for mark in grown:
        if mark.step in blind:
            yield f"step {mark.step}: it grew without a sensor: {mark.text}"
    if said != ["sensor_lost", "sensor_back"]:
        yield (
            f"the sensor was lost once and came back once, but what was said is {said or 'nothing'}"
        )
    if not any(mark.step > max(blind, default=0) for mark in grown):
        yield "nothing grew after the sensor was back, although memory was"


def calm(run: Run) -> Iterator[str]:
    """Check that the failing steps are at most the returns of memory, and one.

    One failure for each return is no storm: a growth whose failure costs less than it saved is
    worth
    it.
    """
    returns = len(run.steps) // FLAP
    # one when memory first goes
    found = len({mark.step for mark in run.marks if mark.what == "oom"})
    allowed = 1 + returns
    if found > (allowed if run.kind in COUNTED else 2 * allowed):
        yield (
            f"{found} steps ran out of memory where it came back {returns} times, which allows "
            f"{allowed}"
        )


def optimizer_struck(run: Run) -> Iterator[str]:
    """Check that the optimizer's step was short of memory, and still went through."""
    if run.needs.optimizer <= 0 or not run.steps or run.steps[0].capacity is None:
        yield "the optimizer's first step was not measured"
    elif not run.count("optimizer"):
        yield "the optimizer's first step never ran out of memory, so nothing was shown"


def evaluated(run: Run) -> Iterator[str]:
    """Check that there were evaluations between the steps, and that they were compared."""
    if not run.count("eval") or (run.differences is not None and run.differences.outputs is None):
        yield "nothing was evaluated between the steps"


def resumed(run: Run) -> Iterator[str]:
    """Check that the run was killed, went on from its checkpoint, and knew its size at once."""
    missing = [what for what in ("killed", "resumed") if not run.count(what)]
    if missing:
        yield f"it was to be killed and resumed; {' and '.join(missing)} never happened"
        return
    start = next(mark for mark in reversed(run.marks) if mark.what == "resumed")
    before, after = run.steps[: start.step], run.steps[start.step :]
    if not before or not after:
        yield f"there are {len(before)} steps before the checkpoint and {len(after)} after it"
        return
    known, first = before[-1], after[0]
    if first.pieces > known.pieces or first.size < known.size:
        then, now = (f"{step.pieces} pieces of up to {step.size}" for step in (known, first))
        yield f"it had to learn its size again: {then} before, {now} after"
    if any(
        mark.what == "oom" and mark.step >= start.step and mark.at > start.at for mark in run.marks
    ):
        yield "memory ran out after it was resumed, although it had not changed"


def fair(runs: Sequence[Run]) -> Iterator[str]:
    """Check that neither of two processes on one device starves, while both run.

    Neither may be pushed below a third of what it could have next to an equal.
    """
    both = (
        min(run.began + run.steps[-1].at for run in runs) if all(run.steps for run in runs) else 0.0
    )
    for run in runs:
        together = [step for step in run.steps if run.began + step.at <= both]
        if not together:
            yield f"process {run.process + 1} never ran while the other did"
            continue
        late = together[-max(3, len(together) // 4) :]
        size = sum(step.longest for step in late) / len(late)
        share = run.needs.fits((late[-1].capacity or 0) / len(runs))
        if size < share / 3:
            yield (
                f"process {run.process + 1} ends at micro-batches of {size:.1f}, below a third of "
                f"its share of {share}"
            )
