"""The training itself: every door, evaluations, guarded steps and checkpoints, while memory comes and goes; and what is measured in between."""

from __future__ import annotations

import gc
import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from elastic_mbs import ElasticMBS, MicroBatchFloorError, Policy, StepResult, elastic_step
from elastic_mbs.controller.partition import partition
from elastic_mbs.memory.budget import on_host

from ..endurance.holding import Holding
from ..endurance.trend import LEAST, Sample
from ..flat_options import grouped
from ..limits import MemoryLimit, open_limit
from ..models.factory import make
from ..models.subject import Subject
from ..reference.by_hand import accumulate, by_loop, view_of
from ..reference.state import Streams, WrongOutcomeError, error_of, tolerance_of

SHARES = (0.1, 0.3, 0.6, 1.0, 1.5)
"""Of what the whole batch needs beyond the smallest piece: what the memory is, by turns."""

CHECKED_EVERY = 20
"""Steps between two checks of a gradient, on average: drawn, or they could fall on one door alone."""

TURNS = 4
"""Steps that each runtime makes with each door at least: from the second call on it works on what the first has learned."""

AMPLE = 4
"""So many times what the whole batch takes is room for a reference beside it."""

BACK_WITHIN = 40
"""Calls within which the micro-batch has to be as large as the batch again, once there is memory for it: five doublings, each with its patience."""

BACK_SECONDS = 30.0
"""Seconds that it may take in any case: readings of memory come by the clock."""

KEPT_RATIOS = 9
"""Of so many the median is the sample's."""

Emit = Callable[[dict[str, Any]], None]


def soak(emit: Emit, *, kind: str, seconds: float, seed: int, model: str, samples: int, clock: Callable[[], float] = time.monotonic) -> None:
    """Trains for so long, and emits a sample about `samples` times.

    Args:
        emit: gets a message for each sample, with the counts so far.
        kind: of the world.
        seconds: how long.
        seed: of model, batches, and the comings and goings of memory.
        model: as `stress.models.factory.find` takes it.
        samples: how many, about.
        clock: gives the time in seconds.

    Raises:
        WrongOutcomeError: a gradient is not exact, a failed attempt is still held, or the micro-batch does not come back with the memory.
    """
    torch.set_num_threads(1)
    with open_limit(kind) as world:
        _Soak(emit, world, make(model, seed, world.device), random.Random(seed), clock).run(seconds, samples)


class _Soak:
    def __init__(self, emit: Emit, world: MemoryLimit, subject: Subject, rng: random.Random, clock: Callable[[], float]) -> None:
        self._emit, self._world, self._subject, self._rng, self._clock = emit, world, subject, rng, clock
        self._optimizer = subject.optimizer(subject.model.parameters())
        self._tolerance = tolerance_of(subject.model)
        self._length = view_of(subject, subject.batch(0)).length
        self._largest = min(self._length, subject.options.get("max_micro_batch_size") or self._length)
        self._learned: dict[str, object] = {}
        self._ratios: deque[float] = deque(maxlen=KEPT_RATIOS)
        self._steps = self._ooms = self._refused = self._checked = 0
        self._check_at = 0
        self._slowest = 0
        self._worst = 0.0
        self._holding = Holding(world, subject.model)
        self._kept = 0
        self._whole = self._least = 0
        self._capacity: int | None = None

    def run(self, seconds: float, samples: int) -> None:
        """Trains until the time is over."""
        self._world.warm(self._piece, range(1, self._length + 1))
        self._calibrate()
        gc.collect()
        gc.freeze()  # what has been imported by now need not be looked at each time
        began = self._clock()
        measured = 0
        while (now := self._clock() - began) < seconds or measured < 2 * LEAST:
            measured += 1
            self._between(began + now + seconds / samples)
            self._emit({"sample": asdict(self._measure(self._clock() - began)), **self._counts()})

    def _counts(self) -> dict[str, Any]:
        found = {"steps": self._steps, "ooms": self._ooms, "refused": self._refused, "checked": self._checked, "worst": self._worst}
        found["back_within"] = self._slowest
        return {**found, "failures": self._world.failures()}

    # ------------------------------------------------------------------ training

    def _piece(self, size: int) -> None:
        self._by_hand(self._subject.batch(0), [(0, size)])
        self._optimizer.zero_grad()

    def _calibrate(self) -> None:
        """How much the whole batch needs, and how much a piece that is nearly the smallest."""
        self._by_hand(self._subject.batch(0), [(0, self._length)])
        self._optimizer.step()
        self._optimizer.zero_grad()
        needs, kept = [], []
        for stop in (self._length, min(self._length, 3)):
            held = self._world.live()
            self._world.reset_peak()
            self._by_hand(self._subject.batch(0), [(0, stop)])
            needs.append(self._world.peak())
            self._optimizer.zero_grad()
            kept.append(self._world.live() - held)
        self._whole, self._least = needs
        self._kept = max(0, *kept)  # by the model itself, of its last piece

    def _between(self, until: float) -> None:
        """Trains with runtimes of its own, one for each door, until a moment; at least a few steps with each."""
        subject = self._subject
        options = {
            "outputs": None,
            "policy": Policy(patience=2, min_gain=0.0, cooldown=0.0, max_cooldown=0.0),
            **subject.options,
            "sensor": self._world.sensor,
            "monitor_interval": self._rng.choice((0.0, 0.05)),
            "wait_for_memory": 0,
            "on_event": self._holding,
        }
        hopeful = {"micro_batch_size": self._largest, **options, "monitor_interval": 0}  # begins with the whole batch, whatever there is
        with ElasticMBS(subject.model, **grouped(options)) as mbs, ElasticMBS(subject.model, **grouped(hopeful)) as other:
            if self._learned:
                mbs.load_state_dict(self._learned)
            decorated = elastic_step(subject.model, **grouped({**options, "monitor_interval": 0}))(subject.loss_fn)
            doors = (lambda batch: mbs.backward(subject.loss_fn, batch), decorated, lambda batch: by_loop(other, subject.loss_fn, batch))
            turn = 0
            while turn < TURNS * len(doors) or self._clock() < until:
                self._step(mbs, doors[turn % len(doors)])
                if turn % 5 == 4:
                    self._evaluate(mbs)
                turn += 1
            self._capacity = None
            self._world.resize(None)
            self._come_back(mbs)
            self._learned = mbs.state_dict()
            decorated.mbs.close()
        self._time_a_step()

    def _come_back(self, mbs: ElasticMBS) -> None:
        """All memory has returned; the micro-batch has to, within bounds."""
        subject = self._subject
        if subject.options.get("grow") is False:
            return
        fewest = -(-self._length // self._largest)
        began, calls, pieces = self._clock(), 0, self._length + 1
        while pieces > fewest:
            if calls >= BACK_WITHIN and self._clock() - began > BACK_SECONDS:
                raise WrongOutcomeError(
                    f"after step {self._steps}: there is memory for the whole batch again, but after {calls} calls it still runs in {pieces} pieces"
                )
            pieces, calls = len(mbs.backward(subject.loss_fn, subject.batch(0)).partition), calls + 1
            self._optimizer.zero_grad()
        self._slowest = max(self._slowest, calls)

    def _step(self, mbs: ElasticMBS, door: Callable[[Any], StepResult]) -> None:
        """One training step; every few of them the memory changes, and the gradient is checked."""
        if self._steps % self._rng.choice((1, 2, 5)) == 0:
            self._capacity = self._least + int((self._whole - self._least) * self._rng.choice(SHARES))
            self._world.resize(self._capacity)
        batch, start = self._subject.batch(self._steps), Streams.now()
        with on_host():
            buffers = [buffer.clone() for buffer in self._subject.model.buffers()]
        self._steps += 1
        self._holding.begin()
        try:
            result = door(batch)
        except MicroBatchFloorError:
            self._judge_held()
            self._refused += 1  # it does not fit at all just now; the next one may
            self._optimizer.zero_grad()
            return
        self._judge_held()
        self._ooms += result.ooms
        if self._steps >= self._check_at:
            self._check_at = self._steps + self._rng.randint(1, 2 * CHECKED_EVERY - 1)
            self._check(batch, result, start, buffers)
        if self._steps % 2:
            with suppress(MemoryError, torch.OutOfMemoryError):
                mbs.optimizer_step(self._optimizer)
        else:
            with self._unlimited():
                self._optimizer.step()
        self._optimizer.zero_grad()

    def _judge_held(self) -> None:
        self._holding.look("call")
        self._holding.check(self._kept, f"step {self._steps}")

    @contextmanager
    def _unlimited(self) -> Iterator[None]:
        """For what has no guard. Less than there is when all has come back: a reading made now must not make that look like no change."""
        self._world.resize(AMPLE * self._whole)
        yield
        self._world.resize(self._capacity)

    def _evaluate(self, mbs: ElasticMBS) -> None:
        with suppress(MicroBatchFloorError):
            mbs.eval(self._loss, self._subject.batch(self._steps))

    def _loss(self, piece: Any) -> list[Any]:
        return [self._subject.loss_fn(piece)]

    def _check(self, batch: Any, result: StepResult, start: Streams, begun: list[torch.Tensor]) -> None:
        """Holds the gradient against a loop written by hand, with the random numbers and the buffers that the step itself has begun with."""
        leaves, buffers = list(self._subject.model.parameters()), list(self._subject.model.buffers())
        ranges = sorted([*result.partition, *result.skipped])
        if [start for start, _ in ranges] + [view_of(self._subject, batch).length] != [0, *(stop for _, stop in ranges)]:
            raise WrongOutcomeError(f"step {self._steps}: the pieces {ranges} do not cover the batch once")
        with self._unlimited():
            got = [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
            before, after = [buffer.clone() for buffer in buffers], Streams.now()
            self._optimizer.zero_grad()
            with torch.no_grad():
                for buffer, value in zip(buffers, begun, strict=True):
                    buffer.copy_(value)
            start.restore()
            self._by_hand(batch, result.partition)
            after.restore()
            error = error_of(got, [leaf.grad for leaf in leaves])
            with torch.no_grad():
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)
        self._checked += 1
        self._worst = max(self._worst, error)
        if error > self._tolerance:
            raise WrongOutcomeError(f"step {self._steps}: gradient off by {error:.3g} over the pieces {result.partition}")

    def _by_hand(self, batch: Any, pieces: Any) -> None:
        accumulate(self._subject, view_of(self._subject, batch), pieces)

    # ------------------------------------------------------------------ measuring

    def _time_a_step(self) -> None:
        """A step of the runtime beside the same by hand, each in turn the first, so that the machine's own moods cancel."""
        subject, batch = self._subject, self._subject.batch(0)
        size = max(1, self._length // 4)
        pieces = partition(0, self._length, size)
        with ElasticMBS(subject.model, **grouped({**subject.options, "micro_batch_size": size, "grow": False, "monitor_interval": 0})) as mbs:
            ways: dict[str, Callable[[], object]] = {
                "ours": lambda: mbs.backward(subject.loss_fn, batch),
                "hand": lambda: self._by_hand(batch, pieces),
            }
            took: dict[str, list[float]] = {name: [] for name in ways}
            for turn in range(5):
                for name in sorted(ways, reverse=turn % 2 == 0):
                    start = time.process_time()
                    ways[name]()
                    took[name].append(time.process_time() - start)
                    self._optimizer.zero_grad()
            self._ratios.append(min(took["ours"][2:]) / max(1e-9, min(took["hand"][2:])))

    def _measure(self, at: float) -> Sample:
        gc.collect()
        process = psutil.Process()
        model = self._subject.model
        return Sample(
            at=at,
            live=self._world.live(),
            resident=process.memory_info().rss,
            data=_data_bytes(),
            threads=process.num_threads(),
            files=process.num_fds() if hasattr(process, "num_fds") else 0,
            objects=len(gc.get_objects()),
            hooks=sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
            + sum(len(leaf._post_accumulate_grad_hooks or ()) + len(leaf._backward_hooks or ()) for leaf in model.parameters()),
            ratio=median(self._ratios),
        )


def _data_bytes() -> int:
    status = Path(f"/proc/{os.getpid()}/status")
    if not status.is_file():
        return 0
    found = [line for line in status.read_text().splitlines() if line.startswith("VmData:")]
    return int(found[0].split()[1]) * 1024 if found else 0
