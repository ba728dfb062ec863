"""Records of a run under stress, one for each process of a scenario.

Times are in seconds since the run began, memory in bytes. A file of records has a `Run` for each
scenario, kind of limit and process: `Needs`, `Step`s, `Mark`s, `Differences` and `End`.
"""

from __future__ import annotations

import json
import math
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import elastic_mbs

SCHEMA = "elastic-mbs/stress/1"


@dataclass(frozen=True)
class Needs:
    """Bytes that training takes at its peak, the model's own included.

    Measured under the kind of limit of the run, before there is a limit.
    """

    samples: int  # samples of the batch
    rest: int  # held between two steps: parameters, buffers and the optimizer's state
    # Micro-batch sizes that were measured, in samples, rising; the last is the whole batch.
    sizes: list[int]
    peaks: list[int]  # peak of a step of each size that adds to existing gradients
    optimizer: int = 0  # peak of the optimizer's first step, which creates its state
    held: int = 0  # held after that step, with the gradients still there
    # Peak of all work besides the pieces: making a batch, the copies of the optimizer step. No peak
    # is below it.
    floor: int = 0
    singly: int = 0  # peak of the first steps, made one parameter at a time

    @property
    def one(self) -> int:
        return self.peaks[0]

    @property
    def whole(self) -> int:
        return self.peaks[-1]

    def at(self, size: float) -> int:
        """Return the bytes that a micro-batch of `size` samples takes.

        Between measured sizes it is a line, which is an upper bound, as peaks are convex.
        """
        sizes, peaks = self.sizes, self.peaks
        if size <= sizes[0] or len(sizes) == 1:
            return round(self.rest + (peaks[0] - self.rest) * max(0.0, size) / sizes[0])
        above = next((i for i, known in enumerate(sizes) if known >= size), len(sizes) - 1)
        slope = (peaks[above] - peaks[above - 1]) / (sizes[above] - sizes[above - 1])
        return round(peaks[above - 1] + slope * (size - sizes[above - 1]))

    def foreseen(self) -> Needs:
        """Return these needs without a drop that cannot be predicted.

        A larger size may take less than smaller ones suggest, by another algorithm for large
        batches.
        """
        peaks = self.peaks[:2]
        for i in range(2, len(self.peaks)):
            slope = (peaks[-1] - peaks[-2]) / (self.sizes[i - 1] - self.sizes[i - 2])
            peaks.append(
                max(self.peaks[i], round(peaks[-1] + slope * (self.sizes[i] - self.sizes[i - 1])))
            )
        return replace(self, peaks=peaks)

    def fits(self, available: float) -> int:
        """Return the largest size, in samples, that fits in `available` bytes; 0 if none does."""
        return max(
            (size for size in range(1, self.samples + 1) if self.at(size) <= available), default=0
        )


@dataclass(frozen=True)
class Step:
    """An optimizer step."""

    step: int  # number, from 0
    at: float
    capacity: int | None  # bytes for all processes when it ended; None without a limit
    others: int  # bytes that the script had the co-tenant hold then
    peak: int  # most bytes held by us in it
    samples: int
    elements: int  # numbers in one sample, which distinguish long inputs from short ones
    size: int  # micro-batch size in force when its call ended, in samples
    partition: list[list[int]]  # the committed pieces, as pairs (start, stop)
    replayed: int  # samples that were run again
    loss: float
    norm: float  # norm of the gradient, over all parameters
    seconds: float = 0.0  # duration, the optimizer's step included
    live: int = 0  # bytes held by us after it, with gradients and batch freed
    ooms: int = 0  # errors survived in it, those of the optimizer included
    time_lost: float = 0.0  # seconds in attempts that failed
    lowest: int | None = None  # lowest capacity less others, where that moved in its middle

    @property
    def pieces(self) -> int:
        return len(self.partition)

    @property
    def available(self) -> float:
        return math.inf if self.capacity is None else self.capacity - self.others

    @property
    def longest(self) -> int:
        return max((stop - start for start, stop in self.partition), default=0)


@dataclass(frozen=True)
class Mark:
    at: float
    step: int
    # "oom", "optimizer", "grow", "shrink", "move" (of the limit or the co-tenant), "sensor_lost",
    # "sensor_back", "waiting", "warned", "eval", "checkpoint", "killed", "resumed" or "error".
    what: str
    text: str
    before: int | None = None  # micro-batch size, where it changed
    after: int | None = None


@dataclass(frozen=True)
class Differences:
    """Largest relative differences from accumulation by hand over the same pieces.

    For a separable model also from training on whole batches.
    """

    loss: float  # difference of a step's loss
    norm: float  # difference of the norm of a step's gradient
    # Difference of a parameter or buffer at the end, relative to its tensor's largest entry.
    weight: float
    tolerance_loss: float  # rounding allowed in a loss, a norm or an output
    tolerance_weight: float
    outputs: float | None = None  # difference of an evaluation
    whole_loss: float | None = None  # difference from the whole batch's loss
    whole_weight: float | None = None  # difference from training on whole batches

    @property
    def largest(self) -> float:
        """Largest of all differences; NaN where one is NaN, which `max` would pass over."""
        found = [
            value
            for value in (
                self.loss,
                self.norm,
                self.weight,
                self.outputs,
                self.whole_loss,
                self.whole_weight,
            )
            if value is not None
        ]
        return math.nan if any(map(math.isnan, found)) else max(found)


@dataclass(frozen=True)
class End:
    """End of a run."""

    # Bytes still held when model, optimizer and runtime were at rest, with gradients emptied.
    held: int
    expected: int  # bytes that they should hold then
    failures: int | None  # allocations that were refused; None where they are not counted
    error: str | None = None  # class and first line of the error that ended training
    # After an error: parameters, buffers, gradients and random streams were as at the start of the
    # call.
    restored: bool | None = None
    seconds: float = 0.0  # seconds from that call's start to the error


@dataclass
class Run:
    """A process of a scenario."""

    scenario: str
    kind: str
    model: str
    dtype: str  # type of its parameters
    seed: int  # seed of model, batches, script and controller
    needs: Needs
    steps: list[Step] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    end: End | None = None
    differences: Differences | None = None
    process: int = 0  # number of the process; 1 for the second of two
    began: float = 0.0  # start by the host's monotonic clock, the same for all processes
    seconds: float = 0.0  # duration, calibration and reference runs included
    passed: bool = False
    complaints: list[str] = field(default_factory=list)  # complaints, in words with numbers
    unshown: str = ""  # the reason why this model could show nothing, although nothing was wrong
    # On CUDA, the allocator's segments were expandable: memory does not stay fragmented then.
    expandable: bool = False

    @property
    def title(self) -> str:
        return self.scenario if self.process == 0 else f"{self.scenario} ({self.process + 1})"

    @property
    def verdict(self) -> str:
        """Verdict in a word.

        "ok" is a proof: nothing was wrong, and the event of the scenario took place.
        """
        return "FAILED" if not self.passed else "not shown" if self.unshown else "ok"

    def count(self, what: str) -> int:
        return sum(mark.what == what for mark in self.marks)

    @property
    def ooms(self) -> int:
        return sum(step.ooms for step in self.steps)

    @property
    def replayed(self) -> float:
        """Samples that were run again, as a fraction of the samples trained on."""
        return sum(step.replayed for step in self.steps) / max(
            1, sum(step.samples for step in self.steps)
        )

    @property
    def sizes(self) -> list[int]:
        return sorted({step.size for step in self.steps})

    @property
    def time_lost(self) -> float:
        return sum(step.time_lost for step in self.steps)

    def totals(self) -> dict[str, Any]:
        found = {
            name: getattr(self, name)
            for name in ("ooms", "replayed", "sizes", "time_lost", "seconds")
        }
        found |= {"steps": len(self.steps), "failures": self.end and self.end.failures}
        return found | {"largest_difference": self.differences and self.differences.largest}


def count(runs: Sequence[Run]) -> str:
    """Return how many passed, in words.

    Runs that showed nothing are not among them: nothing was wrong, and nothing was proved.
    """
    verdicts = Counter(run.verdict for run in runs)
    words = f"{verdicts['ok']} of {len(runs)} passed"
    words += f", {verdicts['not shown']} showed nothing" if verdicts["not shown"] else ""
    return words + (f", {verdicts['FAILED']} FAILED" if verdicts["FAILED"] else "")


def write_json(runs: Sequence[Run], seed: int, path: Path) -> None:
    """Write all runs of one command. Raises an OSError where the file cannot be written."""
    found = json.dumps([asdict(run) | {"totals": run.totals()} for run in runs])
    document = {
        "schema": SCHEMA,
        "versions": {
            "elastic_mbs": elastic_mbs.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "seed": seed,
        "passed": all(run.passed for run in runs),
        # Numbers that JSON does not have are written as "NaN", "Infinity" and "-Infinity".
        "runs": json.loads(found, parse_constant=str),
    }
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
