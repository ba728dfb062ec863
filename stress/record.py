"""What a run under stress was like: one record for each process of a scenario, as plain data that JSON can hold.

```
Document ── versions, seed
   └─ Run ── one per scenario, kind of limit, and process
        ├─ Needs         what the model takes, measured without a limit
        ├─ Step …        one per optimizer step: memory, sizes, failures, loss
        ├─ Mark …        what happened between and inside steps, each with its time
        ├─ Differences   from a run without limits and without this package
        └─ End           what was left behind
```

Times are in seconds since the run began, memory in bytes. Numbers that JSON does not have are the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

SCHEMA = "elastic-mbs/stress/1"


class _Plain:
    """To and from what JSON holds."""

    def to_json(self) -> dict[str, Any]:
        """This, as dicts, lists, numbers and strings."""
        plain: dict[str, Any] = _spell(asdict(self))  # type: ignore[call-overload]  # every subclass is a dataclass
        return plain

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Self:
        """What `to_json` gave. Fields that are not known are left alone, so that a reader may be older than the file."""
        names = {each.name for each in fields(cls)}  # type: ignore[arg-type]  # every subclass is a dataclass
        return cls(**{name: _unspell(value) for name, value in plain.items() if name in names})


@dataclass(frozen=True)
class Needs(_Plain):
    """Bytes that training takes at its peak, the model's own included, measured in the world of the run before there is a limit.

    Attributes:
        samples: of the batch.
        rest: held between two steps: parameters, buffers and the optimizer's state.
        sizes: micro-batch sizes that were measured, in samples, rising; the last is the whole batch.
        peaks: for each of them the peak of a step that adds to gradients which are there.
        optimizer: peak of the optimizer's first step, which creates its state.
        held: what is held after that step, with the gradients still there.
        seconds: a step of the whole batch.
        floor: peak of what goes on beside the pieces, which no smaller one would help: making a batch, and the copies of the optimizer step, where
            both are on the device. No peak is below it.
    """

    samples: int
    rest: int
    sizes: list[int]
    peaks: list[int]
    optimizer: int = 0
    held: int = 0
    seconds: float = 0.0
    floor: int = 0

    @property
    def one(self) -> int:
        """Peak with the smallest size measured."""
        return self.peaks[0]

    @property
    def whole(self) -> int:
        """Peak with the whole batch."""
        return self.peaks[-1]

    def at(self, size: float) -> int:
        """Bytes that a micro-batch of `size` samples takes: between two measured sizes a line, which is an upper bound, because peaks are convex.

        Above the whole batch the last line goes on. Below the smallest size, down to none at 0 samples, what is beside `rest` falls in proportion.
        """
        if size <= self.sizes[0]:
            return round(self.rest + (self.peaks[0] - self.rest) * max(0.0, size) / self.sizes[0])
        pairs = list(zip(self.sizes, self.peaks, strict=True))
        if len(pairs) == 1:
            return round(self.rest + (self.peaks[0] - self.rest) * size / self.sizes[0])
        above = next((i for i, (known, _) in enumerate(pairs) if known >= size), len(pairs) - 1)
        (low, below), (high, peak) = pairs[above - 1], pairs[above]
        return round(below + (peak - below) * (size - low) / (high - low))

    def foreseen(self) -> Needs:
        """The same where a larger size takes less than smaller ones tell, by another algorithm for large batches: nobody can know that before."""
        peaks = self.peaks[:2]
        for i in range(2, len(self.peaks)):
            slope = (peaks[-1] - peaks[-2]) / (self.sizes[i - 1] - self.sizes[i - 2])
            peaks.append(max(self.peaks[i], round(peaks[-1] + slope * (self.sizes[i] - self.sizes[i - 1]))))
        return replace(self, peaks=peaks)

    def fits(self, available: float) -> int:
        """The largest size, in samples, that takes no more than `available` bytes; 0 if none does."""
        return max((size for size in range(1, self.samples + 1) if self.at(size) <= available), default=0)


@dataclass(frozen=True)
class Step(_Plain):
    """One optimizer step.

    Attributes:
        step: counted from 0.
        at: when it began.
        seconds: how long it took, the optimizer's step included.
        capacity: bytes that there were for all when it ended; None without a limit.
        others: bytes that the script had the co-tenant hold then.
        live: bytes held by us after it, with gradients and batch let go of.
        peak: most bytes held by us in it.
        samples: of its batch.
        elements: numbers in one sample, which tells long inputs from short ones.
        size: micro-batch size in force when its call ended, in samples.
        partition: the committed pieces, as pairs (start, stop).
        ooms: out-of-memory errors survived in it, those of the optimizer included.
        replayed: samples that were run again.
        loss: of the whole batch.
        norm: of the gradient, over all parameters.
        time_lost: seconds in attempts that failed.
        lowest: bytes that capacity less others fell to in it, where that moved in its middle; None where it did not.
        skipped: ranges that were left out because nothing in them counts, as pairs (start, stop).
    """

    step: int
    at: float
    seconds: float
    capacity: int | None
    others: int
    live: int
    peak: int
    samples: int
    elements: int
    size: int
    partition: list[list[int]]
    ooms: int
    replayed: int
    loss: float
    norm: float
    time_lost: float
    lowest: int | None = None
    skipped: list[list[int]] = field(default_factory=list)

    @property
    def pieces(self) -> int:
        """Micro-batches that committed."""
        return len(self.partition)

    @property
    def available(self) -> float:
        """Bytes that were left to us at its end."""
        return math.inf if self.capacity is None else self.capacity - self.others


@dataclass(frozen=True)
class Mark(_Plain):
    """Something that happened.

    Attributes:
        at: when.
        step: in which step.
        what: "oom", "optimizer", "grow", "shrink", "move" (of the limit or the co-tenant), "sensor_lost", "sensor_back", "waiting", "eval",
            "checkpoint", "killed", "resumed", "error".
        text: the same in words.
        before: micro-batch size before, where it changed.
        after: micro-batch size after.
    """

    at: float
    step: int
    what: str
    text: str
    before: int | None = None
    after: int | None = None


@dataclass(frozen=True)
class Differences(_Plain):
    """Largest relative differences, from hand-written accumulation over the same pieces and, for a separable model, from whole batches.

    Attributes:
        loss: of a step's loss.
        norm: of a step's gradient norm.
        weight: of a parameter or buffer at the end, relative to the largest entry of its tensor.
        outputs: of what evaluation gave; None where nothing was evaluated.
        whole_loss: of a step's loss, from the whole batch's; None for a model that is not separable.
        whole_weight: of a parameter, from training on whole batches; None likewise.
        tolerance_loss: what counts as rounding in a loss, a norm or an output.
        tolerance_weight: what counts as rounding in a weight.
    """

    loss: float
    norm: float
    weight: float
    tolerance_loss: float
    tolerance_weight: float
    outputs: float | None = None
    whole_loss: float | None = None
    whole_weight: float | None = None

    @property
    def largest(self) -> float:
        """The largest of all; not a number where one of them is none, which `max` would pass over."""
        found = [value for value in (self.loss, self.norm, self.weight, self.outputs, self.whole_loss, self.whole_weight) if value is not None]
        return math.nan if any(map(math.isnan, found)) else max(found)


@dataclass(frozen=True)
class End(_Plain):
    """How a run ended.

    Attributes:
        held: bytes still held when model, optimizer and runtime were at rest, with gradients emptied.
        expected: bytes that they should hold then.
        failures: allocations that the world has refused, in all; None where nobody counts them.
        error: class and first line of the error that ended training; None where all steps were made.
        restored: after an error: whether parameters, buffers, gradients and random streams were as at the start of the call; None without one.
        seconds: from that call's start to the error.
    """

    held: int
    expected: int
    failures: int | None
    error: str | None = None
    restored: bool | None = None
    seconds: float = 0.0


@dataclass
class Run(_Plain):
    """One process of a scenario.

    Attributes:
        scenario: its name.
        kind: "budget", "shim", "rlimit" or "cuda".
        model: name of what was trained.
        dtype: of its parameters.
        seed: of model, batches, script and controller.
        process: 0, or 1 for the second of two.
        began: time of the host's monotonic clock at which it began, in seconds: the same clock for all processes.
        seconds: how long it took, calibration and reference runs included.
        passed: whether nothing was wrong.
        complaints: what was wrong, in words with numbers.
        unshown: why nothing could be shown on this model, although nothing was wrong; empty where something was.
        expandable: whether the allocator's segments were expandable, on CUDA: memory does not stay fragmented then.
    """

    scenario: str
    kind: str
    model: str
    dtype: str
    seed: int
    needs: Needs
    steps: list[Step] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    end: End | None = None
    differences: Differences | None = None
    process: int = 0
    began: float = 0.0
    seconds: float = 0.0
    passed: bool = False
    complaints: list[str] = field(default_factory=list)
    unshown: str = ""
    expandable: bool = False

    @property
    def title(self) -> str:
        """Scenario, and which process of it where there are two."""
        return self.scenario if self.process == 0 else f"{self.scenario} ({self.process + 1})"

    @property
    def shown(self) -> bool:
        """Whether it is a proof: nothing was wrong, and what the scenario is about took place."""
        return self.passed and not self.unshown

    @property
    def ooms(self) -> int:
        """Out-of-memory errors survived."""
        return sum(step.ooms for step in self.steps)

    @property
    def replayed(self) -> float:
        """Samples that were run again, as a fraction of those that were trained on."""
        return sum(step.replayed for step in self.steps) / max(1, sum(step.samples for step in self.steps))

    @property
    def sizes(self) -> list[int]:
        """Micro-batch sizes at the ends of steps, each once, rising."""
        return sorted({step.size for step in self.steps})

    @property
    def time_lost(self) -> float:
        """Seconds in attempts that failed."""
        return sum(step.time_lost for step in self.steps)

    def totals(self) -> dict[str, Any]:
        """The figures of a table's row."""
        return {
            "steps": len(self.steps),
            "ooms": self.ooms,
            "failures": None if self.end is None else self.end.failures,
            "replayed": self.replayed,
            "sizes": self.sizes,
            "largest_difference": None if self.differences is None else self.differences.largest,
            "time_lost": self.time_lost,
            "seconds": self.seconds,
        }

    def to_json(self) -> dict[str, Any]:
        """This with its totals, as dicts, lists, numbers and strings."""
        return super().to_json() | {"totals": _spell(self.totals())}

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Self:
        """What `to_json` gave."""
        run = super().from_json(plain)
        run.needs = Needs.from_json(plain["needs"])
        run.steps = [Step.from_json(step) for step in plain["steps"]]
        run.marks = [Mark.from_json(mark) for mark in plain["marks"]]
        run.end = None if plain["end"] is None else End.from_json(plain["end"])
        run.differences = None if plain["differences"] is None else Differences.from_json(plain["differences"])
        return run


def count(runs: Sequence[Run]) -> str:
    """How many passed, in words. Those that showed nothing are not among them: nothing was wrong, and nothing was proved."""
    failed, unshown = sum(not run.passed for run in runs), sum(run.passed and not run.shown for run in runs)
    said = f"{sum(run.shown for run in runs)} of {len(runs)} passed"
    return said + (f", {unshown} showed nothing" if unshown else "") + (f", {failed} FAILED" if failed else "")


def document(runs: Sequence[Run], seed: int) -> dict[str, Any]:
    """All runs of one command, as JSON holds them."""
    import torch

    import elastic_mbs

    return {
        "schema": SCHEMA,
        "versions": {"elastic_mbs": elastic_mbs.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "seed": seed,
        "passed": all(run.passed for run in runs),
        "runs": [run.to_json() for run in runs],
    }


def write_json(runs: Sequence[Run], seed: int, path: Path) -> None:
    """Writes the document.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(json.dumps(document(runs, seed), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> list[Run]:
    """The runs of a document.

    Raises:
        OSError: there is no such file.
        ValueError: it is no document of this schema.
    """
    plain = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(plain, dict) or plain.get("schema") != SCHEMA:
        raise ValueError(f"{path} is no record of the stress tool ({SCHEMA})")
    return [Run.from_json(run) for run in plain["runs"]]


_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _spell(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _spell(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spell(item) for item in value]
    return value


def _unspell(value: Any) -> Any:
    return _WORDS.get(value, value) if isinstance(value, str) else value
