"""Long training while memory comes and goes: does anything rise?

Memory, threads, files and the time of a step have to stay flat. All three ways in, evaluations,
guarded optimizer steps and checkpoints take part, runtimes are made and closed, and some gradients
are checked. A failed attempt may hold nothing when its event is told, and whenever all memory has
returned the micro-batch has to grow back to the whole batch.

Exit codes: 0 flat and exact, 2 bad input, 3 a figure rises, the size stays small, memory is held,
or a result is wrong, 4 an unexpected error, 5 a hang.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import median
from typing import Any

import psutil
import torch
from torch import nn

from elastic_mbs import ElasticMBS, Policy
from elastic_mbs.batch.pieces import partition
from elastic_mbs.events import format_bytes

from ..console import PASSED, WRONG, Progress, write_figures
from ..flat_options import grouped
from ..limits import ChildError, Emit, MemoryLimit, check_kind, open_limit, run_child
from ..options import duration, seed, whole, writable
from ..reference.by_hand import accumulate, view_of
from ..reference.state import demand, hooks_on
from ..scenarios.model_check import check
from .hammer import bad_end
from .training import Training

LEAST = 8  # samples of the second half that a trend needs
STUCK = 600.0  # seconds beyond its time after which a run counts as hung
# Memory by turns, as shares of the whole batch's need beyond the smallest piece.
SHARES = (0.1, 0.3, 0.6, 1.0, 1.5)
# Mean number of steps between two checks of a gradient. It is drawn: a fixed one could always hit
# the same way in.
CHECKED_EVERY = 20
# Fewest steps of a runtime with each way in: from the second call on it uses what the first has
# learned.
TURNS = 4
KEPT_RATIOS = 9  # pairs of times; the sample takes their median
# Memory between two steps, in needs of the whole batch: less than after all has come back, or
# readings would not change.
AMPLE = 4
# Calls until the micro-batch is as large as the batch again: five doublings, each with its
# patience.
BACK_WITHIN = 40
BACK_SECONDS = 30.0  # allowed in any case: readings of memory come by the clock


def soak(emit: Emit, *, kind: str, seconds: float, seed: int, model: str, samples: int) -> None:
    """Train for `seconds`, and emit a sample with the counts so far about `samples` times."""
    with open_limit(kind) as limit:
        running = Soak(limit, model, seed)
        running.prepare()
        began = time.monotonic()
        made = 0
        while (now := time.monotonic() - began) < seconds or made < 2 * LEAST:
            made += 1
            running.train(began + now + seconds / samples)
            sample = measured(
                time.monotonic() - began, limit.live(), running.real.model, median(running.ratios)
            )
            emit(
                {
                    "sample": asdict(sample),
                    **running.counts.as_json(),
                    "back_within": running.slowest,
                }
            )


class Soak(Training):
    """A training whose memory comes and goes."""

    def __init__(self, limit: MemoryLimit, model: str, seed: int) -> None:
        super().__init__(limit, model, seed)
        # Times of a step of the runtime, relative to the step by hand.
        self.ratios: deque[float] = deque(maxlen=KEPT_RATIOS)
        self.slowest = 0  # most calls until the micro-batch was back
        self._learned: dict[str, object] = {}
        self._check_at = 0
        self._share = 1.0

    def train(self, until: float) -> None:
        """Train until a moment with runtimes made here, at least a few steps with each way in.

        Then all memory comes back.
        """
        policy = Policy(patience=2, min_gain=0.0, cooldown=0.0)
        quiet = {"policy": policy, "monitor_interval": 0.0}
        # It begins with the whole batch, whatever memory there is.
        hopeful = {**quiet, "micro_batch_size": self.largest}
        with self.runtimes(
            {**quiet, "monitor_interval": self.rng.choice((0.0, 0.05))}, quiet, hopeful
        ) as (mbs, doors):
            if self._learned:
                mbs.load_state_dict(self._learned)
            turn = 0
            while turn < TURNS * len(doors) or time.monotonic() < until:
                self._step(mbs, doors[turn % len(doors)])
                if turn % 5 == 4:
                    self.short(
                        lambda: mbs.evaluate(
                            lambda piece: [self.real.loss_fn(piece)],
                            self.real.batch(self.counts.steps),
                        ),
                        self._moving,
                    )
                turn += 1
            self.limit.resize(None)
            self.come_back(mbs)
            self._learned = mbs.state_dict()
        self._time_a_step()
        gc.collect()

    def _step(self, mbs: ElasticMBS, door: Callable[[Any], Any]) -> None:
        """Make one training step; every few steps, change the memory and check the step."""
        number = self.counts.steps
        if number % self.rng.choice((1, 2, 5)) == 0:
            self._share = self.rng.choice(SHARES)
        checked = number >= self._check_at
        if checked:
            self._check_at = number + self.rng.randint(1, 2 * CHECKED_EVERY - 1)
        self.step(mbs, door, self._moving, checked=checked, guarded=number % 2 == 1)

    @contextmanager
    def _moving(self) -> Iterator[None]:
        held = self.limit.live()
        self.limit.resize(held + self.range.of(self._share) + self.range.slack)
        try:
            yield
        finally:
            self.limit.resize(held + AMPLE * self.range.whole)

    def come_back(self, mbs: ElasticMBS) -> None:
        """Return all memory, and wait for the micro-batch to grow back.

        The number of calls and the time that this takes are bounded.
        """
        if self.real.options.get("grow") is False:
            return
        fewest = -(-self.length // self.largest)
        began = time.monotonic()
        calls = 0
        pieces = self.length + 1
        while pieces > fewest:
            late = calls >= BACK_WITHIN and time.monotonic() - began > BACK_SECONDS
            back = (
                f"there is memory for the whole batch again, but after {calls} calls it still "
                f"runs in {pieces} pieces"
            )
            demand(not late, f"after step {self.counts.steps}: {back}")
            pieces = len(mbs.backward(self.real.loss_fn, self.real.batch(0)).partition)
            calls = calls + 1
            self.real.model.zero_grad()
        self.slowest = max(self.slowest, calls)

    def _time_a_step(self) -> None:
        """Time a step of the runtime beside the same step by hand.

        Each is first in turn, so that the machine's drift cancels.
        """
        subject = self.real
        batch = self.real.batch(0)
        size = max(1, self.length // 4)
        pieces = partition(0, self.length, size)
        with ElasticMBS(
            subject.model,
            **grouped(
                {**subject.options, "micro_batch_size": size, "grow": False, "monitor_interval": 0}
                | {"verify": "off"}
            ),
        ) as mbs:
            ways: dict[str, Callable[[], object]] = {
                "ours": lambda: mbs.backward(subject.loss_fn, batch),
                "hand": lambda: accumulate(subject, view_of(subject, batch), pieces),
            }
            took: dict[str, list[float]] = {name: [] for name in ways}
            for turn in range(5):
                for name in sorted(ways, reverse=turn % 2 == 0):
                    start = time.process_time()
                    ways[name]()
                    took[name].append(time.process_time() - start)
                    subject.model.zero_grad()
        self.ratios.append(min(took["ours"][2:]) / max(1e-9, min(took["hand"][2:])))


@dataclass(frozen=True)
class Sample:
    """A measurement, with every runtime closed and every gradient gone."""

    at: float  # seconds since the start
    live: int  # bytes of tensors, as the memory limit counts them
    resident: int  # bytes of the process that are in memory
    data: int  # bytes of its data segments; 0 where the system does not tell
    threads: int
    files: int  # open descriptors
    objects: int  # objects that Python's garbage collector follows
    hooks: int  # hooks on the modules and leaves of the model
    # time of a step without an event, relative to a loop by hand with the same pieces
    ratio: float


def measured(at: float, live: int, model: nn.Module, ratio: float) -> Sample:
    gc.collect()
    process = psutil.Process()
    hooks = hooks_on(model, model.parameters())
    files = process.num_fds() if hasattr(process, "num_fds") else 0
    memory = process.memory_info()
    return Sample(
        at,
        live,
        memory.rss,
        getattr(memory, "data", 0),
        process.num_threads(),
        files,
        len(gc.get_objects()),
        hooks,
        ratio,
    )


MIB = 1 << 20
# Allowed rise of each figure over the second half: in its own unit, or as a part of its median,
# whichever is larger.
LIMITS: dict[str, tuple[float, float]] = {
    "live": (0.0, 0.0),
    "resident": (8 * MIB, 0.02),
    "data": (8 * MIB, 0.02),
    "threads": (0.5, 0.0),
    "files": (0.5, 0.0),
    "objects": (200.0, 0.01),
    "hooks": (0.0, 0.0),
    "ratio": (0.05, 0.0),
}


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the median of the slopes between all pairs of points (Theil–Sen).

    Up to 29 % of the points may be far off without changing it.
    """
    slopes = [
        (y2 - y1) / (x2 - x1)
        for (x1, y1), (x2, y2) in combinations(zip(xs, ys, strict=True), 2)
        if x2 != x1
    ]
    return median(slopes) if slopes else 0.0


def trends(samples: Sequence[Sample]) -> Iterator[tuple[str, float, float]]:
    """Yield each figure's name, its rise over the second half of the samples, and the allowed rise.

    The rise follows from the slope.
    """
    half = samples[len(samples) // 2 :]
    xs = [sample.at for sample in half]
    for name, (least, share) in LIMITS.items():
        ys = [float(getattr(sample, name)) for sample in half]
        yield name, slope(xs, ys) * (xs[-1] - xs[0]), max(least, share * median(ys))


def complaints(samples: Sequence[Sample]) -> list[str]:
    """Return the figures that are not flat, in words; or that the run is too short to tell."""
    if len(samples) // 2 < LEAST:
        return [f"{len(samples)} samples are too few for a trend: it takes {2 * LEAST}; run longer"]
    minutes = (samples[-1].at - samples[len(samples) // 2].at) / 60
    how = f"in the last {minutes:.1f} min"
    found = [
        f"{name} has risen by {rise:.4g} {how}, and {limit:.4g} is allowed"
        for name, rise, limit in trends(samples)
        if rise > limit
    ]
    hooks = max(sample.hooks for sample in samples)
    return [*found, f"{hooks} hooks were left on the model by closed runtimes"] if hooks else found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--minutes", type=duration("minutes"), default=30.0, help="how long (default 30)"
    )
    parser.add_argument(
        "--kind",
        choices=("budget", "shim"),
        default="budget",
        help="what fails: counted tensors, or the allocator itself",
    )
    parser.add_argument(
        "--model",
        default="heads",
        help="built-in by name, or your own as path.py:factory (default heads)",
    )
    parser.add_argument(
        "--samples",
        type=whole(2 * LEAST),
        default=120,
        help="how often to measure, at most (default 120)",
    )
    parser.add_argument(
        "--seed",
        type=seed,
        default=0,
        help="of model, batches, and the comings and goings of memory (default 0)",
    )
    parser.add_argument(
        "--json",
        type=writable,
        metavar="FILE",
        help="write the samples and the verdict to this file",
    )


def main(options: argparse.Namespace) -> int:
    check_kind(options.kind)
    check(options.model, options.seed, "cpu")
    arguments = {name: getattr(options, name) for name in ("kind", "seed", "model", "samples")} | {
        "seconds": options.minutes * 60
    }
    what = (
        f"limit {options.kind}, model {options.model}, seed {options.seed}, torch "
        f"{torch.__version__}"
    )
    print(f"soak for {options.minutes:g} min, {what}", flush=True)
    samples: list[Sample] = []
    last: dict[str, Any] = {}
    progress = Progress(piped=60.0, live=60.0)
    try:
        for message in run_child(
            options.kind, soak, arguments, deadline=arguments["seconds"] + STUCK
        ):
            samples.append(Sample(**message.pop("sample")))
            last = message
            progress.tell(_line(samples[-1], last))
    except ChildError as error:
        code, found = bad_end(error)
    else:
        found = complaints(samples)
        code = WRONG if found else PASSED
        print(f"{_line(samples[-1], last)}\n{_table(samples)}")
    for each in found:
        print(each)
    print("passed: flat and exact" if code == PASSED else "failed", flush=True)
    figures = {
        "schema": "elastic-mbs/soak/1",
        **arguments,
        "exit_code": code,
        "complaints": found,
        **last,
    }
    write_figures(options.json, {**figures, "measured": [asdict(sample) for sample in samples]})
    return code


def _line(sample: Sample, counts: dict[str, Any]) -> str:
    return (
        f"{sample.at / 60:5.1f} min  {counts['steps']} steps  {counts['ooms']} ooms  "
        f"{sum(counts['refused'].values())} refused  "
        f"live {format_bytes(sample.live)}  resident {format_bytes(sample.resident)}  threads "
        f"{sample.threads}  files {sample.files}  "
        f"objects {sample.objects}  step ×{sample.ratio:.3f}  worst error {counts['worst']:.1e} "
        f"of {counts['checked']} checked"
    )


def _table(samples: list[Sample]) -> str:
    middle, last = samples[len(samples) // 2], samples[-1]
    rows = [f"{'over the second half':24} {'first':>14} {'last':>14} {'trend':>12} {'allowed':>12}"]
    for name, rise, limit in trends(samples):
        rows.append(
            f"{name:24} {getattr(middle, name):14.6g} {getattr(last, name):14.6g} {rise:12.4g} "
            f"{limit:12.4g}"
        )
    return "\n".join(rows)
