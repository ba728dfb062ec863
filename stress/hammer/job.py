"""One round: a model in training whose allocations fail at random places, every step held against a loop by hand."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from elastic_mbs import ElasticMBS, Event, OptimizerOutOfMemory, OutOfMemory, Policy, RecoveryError, StepResult, elastic_step
from elastic_mbs.errors import UsageError
from elastic_mbs.testing import InjectOOM

from ..endurance.blows import Blows, Range, draw
from ..endurance.holding import Holding
from ..flat_options import grouped
from ..limits import Emit, MemoryLimit, open_limit
from ..models.factory import make
from ..models.subject import Subject
from ..reference.by_hand import accumulate, by_loop, view_of
from ..reference.state import Streams, WrongOutcomeError, error_of, same_state, tolerance_of
from ..scenarios.needs import smallest
from .counts import Counts

TURNS = 6
"""Steps that one runtime makes: from the second on it works on what the first has learned."""

SLACK = 1 << 20
"""Bytes that a process limit leaves to Python and to torch's own bookkeeping, which an allocator of tensors has elsewhere."""


def hammer(emit: Emit, *, kind: str, model: str, seed: int, failures: int, steps: int) -> None:
    """Trains until so many allocations have failed, or so many steps are made, and emits `{"counts": …}` after each step.

    Args:
        emit: gets the counts so far.
        kind: of the world.
        model: as `stress.models.factory.find` takes it.
        seed: of model, batches, and where memory moves.
        failures: at which it ends.
        steps: after which it ends all the same.

    Raises:
        WrongOutcomeError: a step's gradient, buffers, random streams or parameters are not what they have to be.
        UsageError: the model's memory does not depend on its micro-batch, so that nothing can be shown on it.
    """
    torch.set_num_threads(1)
    real, twin = make(model, seed), make(model, seed)
    torch.manual_seed(seed)
    with open_limit(kind) as world:
        _Round(emit, world, real, twin, random.Random(seed)).run(failures, steps)


class _Round:
    def __init__(self, emit: Emit, world: MemoryLimit, real: Subject, twin: Subject, rng: random.Random) -> None:
        self._emit, self._world, self._real, self._twin, self._rng = emit, world, real, twin, rng
        self._optimizers = [subject.optimizer(subject.model.parameters()) for subject in (real, twin)]
        self._tolerance = tolerance_of(real.model)
        self._length = view_of(real, real.batch(0)).length
        self._largest = min(self._length, real.options.get("max_micro_batch_size") or self._length)
        self._counts = Counts()
        self._holding = Holding(world, real.model)

    def run(self, failures: int, steps: int) -> None:
        """Strikes until it is enough."""
        self._world.warm(self._piece, range(smallest(self._real), self._length + 1))
        self._calibrate()
        gc.collect()
        gc.freeze()  # what has been imported by now need not be looked at each time
        while self._counts.steps < steps and self._counts.failures < failures:
            self._turns(failures, steps)

    def _piece(self, size: int) -> None:
        accumulate(self._twin, view_of(self._twin, self._twin.batch(0)), [(0, size)])
        self._twin.model.zero_grad()

    def _calibrate(self) -> None:
        """What the whole batch takes, and what the smallest piece, in the twin."""
        needs, kept = [], []
        for size in (self._length, self._length, smallest(self._twin)):
            held = self._world.live()
            self._world.reset_peak()
            with InjectOOM() as counting:
                self._piece(size)
            needs.append((self._world.peak() - held, counting.count))
            kept.append(self._world.live() - held)
        self._kept = max(0, *kept)  # by the model itself, of its last piece
        (whole, self._operations), (least, _) = needs[1:]
        if whole <= least:
            raise UsageError(f"--model {self._real.name}: its whole batch takes no more memory than its smallest piece, so nothing could be shown")
        self._range = Range(least, whole, 0 if self._world.kind != "rlimit" else SLACK, self._world.kind != "rlimit")

    # ------------------------------------------------------------------ training

    def _turns(self, failures: int, steps: int) -> None:
        """A few steps with a runtime of their own, through one door."""
        rng, real = self._rng, self._real
        hopeful = rng.random() < 0.5
        options: dict[str, Any] = {
            "micro_batch_size": self._largest if hopeful else "auto",
            "policy": Policy(patience=1, min_gain=0.0, cooldown=0.0),
            "outputs": None,
            "monitor_interval": 0.0,
            "wait_for_memory": 0,
            "seed": rng.getrandbits(31),
            **real.options,
            "sensor": self._world.sensor,
            "on_event": self._note,
        }
        which = rng.randrange(3)
        with ElasticMBS(real.model, **grouped(options)) as mbs:
            door: Callable[[Any], StepResult] = partial(mbs.backward, real.loss_fn) if which == 0 else partial(by_loop, mbs, real.loss_fn)
            decorated = elastic_step(real.model, **grouped(options))(real.loss_fn) if which == 1 else None
            for _ in range(TURNS):
                if self._counts.steps < steps and self._counts.failures < failures:
                    self._step(mbs, door if decorated is None else decorated)
                    self._emit({"counts": self._counts.as_json()})
            if decorated is not None:
                decorated.mbs.close()

    def _note(self, event: Event) -> None:
        self._holding(event)
        if isinstance(event, OutOfMemory):
            self._counts.ooms += 1
            self._counts.phases[event.phase] += 1
            self._counts.modes[event.mode] += 1
        elif isinstance(event, OptimizerOutOfMemory):
            self._counts.ooms += 1
            self._counts.phases["optimizer"] += 1

    def _struck(self, call: Callable[[], StepResult | None]) -> tuple[StepResult | None, RecoveryError | None]:
        """A call while memory moves."""
        before, told = self._world.failures(), self._counts.ooms
        try:
            with Blows(self._world, self._range, draw(self._rng, self._operations, blocks=self._range.blocks)):
                return call(), None
        except RecoveryError as error:
            self._counts.refused[type(error).__name__] += 1
            return None, error.with_traceback(None)
        finally:
            after = self._world.failures()
            self._counts.failures += self._counts.ooms - told if before is None or after is None else after - before

    def _step(self, mbs: ElasticMBS, door: Callable[[Any], StepResult]) -> None:
        number = self._counts.steps
        self._counts.steps += 1
        batch = self._real.batch(number)
        self._follow()
        start = Streams.now()
        self._holding.begin()
        result, error = self._struck(lambda: door(batch))
        where = f"step {number}"
        self._check_held(where)
        if error is not None or result is None:
            self._check_refused(start, f"{where}, {type(error).__name__}")
            return
        self._check(number, result, start, where)
        del result
        self._optimize(mbs, where)

    def _optimize(self, mbs: ElasticMBS, where: str) -> None:
        mine, other = self._optimizers
        other.load_state_dict(copy.deepcopy(mine.state_dict()))
        for a, b in zip(self._twin.model.parameters(), self._real.model.parameters(), strict=True):
            a.grad = None if b.grad is None else b.grad.detach().clone()
        _, error = self._struck(lambda: mbs.optimizer_step(mine))
        if error is None:
            other.step()
        self._counts.optimizer += 1
        pairs = [(a.detach(), b.detach()) for a, b in zip(self._real.model.parameters(), self._twin.model.parameters(), strict=True)]
        off = error_of([a for a, _ in pairs], [b for _, b in pairs])
        if off > (0.0 if error is not None else self._tolerance):
            how = "a plain step" if error is None else f"before, after {type(error).__name__}"
            raise WrongOutcomeError(f"{where}: parameters differ by {off:.3g} from those of {how}")
        if error is not None and not same_state(mine.state_dict(), other.state_dict()):
            raise WrongOutcomeError(f"{where}: the optimizer's state is not as before after {type(error).__name__}")
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    # ------------------------------------------------------------------ checks

    def _follow(self) -> None:
        """The twin becomes equal to the model, so that differences do not add up."""
        with torch.no_grad():
            for mine, theirs in zip(self._twin.model.parameters(), self._real.model.parameters(), strict=True):
                mine.copy_(theirs)
            for own, module in zip(self._twin.model.modules(), self._real.model.modules(), strict=True):
                for name, buffer in module._buffers.items():
                    own._buffers[name] = None if buffer is None else buffer.detach().clone()

    def _buffers(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self._real.model.buffers(), self._twin.model.buffers(), strict=True))

    def _check_held(self, where: str) -> None:
        """What is held after each failure, and after the call, is what was held before it and the gradients."""
        self._holding.look("call")
        self._holding.check(self._kept, where)

    def _check_refused(self, start: Streams, where: str) -> None:
        if any(leaf.grad is not None for leaf in self._real.model.parameters()):
            raise WrongOutcomeError(f"{where}: a gradient that was empty is not empty")
        if any(not torch.equal(a, b) for a, b in self._buffers()):
            raise WrongOutcomeError(f"{where}: buffers are not as before")
        if not start.same(Streams.now()):
            raise WrongOutcomeError(f"{where}: random streams are not as before")

    def _check(self, number: int, result: StepResult, start: Streams, where: str) -> None:
        ranges = sorted([*result.partition, *result.skipped])
        if [begin for begin, _ in ranges] + [self._length_of(number)] != [0, *(stop for _, stop in ranges)]:
            raise WrongOutcomeError(f"{where}: the pieces {ranges} do not cover the batch once")
        after = Streams.now()
        start.restore()
        loss = accumulate(self._twin, view_of(self._twin, self._twin.batch(number)), result.partition)
        streams = Streams.now()
        after.restore()
        leaves = [list(subject.model.parameters()) for subject in (self._real, self._twin)]
        off = error_of(*([leaf.grad for leaf in each] for each in leaves))
        self._counts.checked += 1
        self._counts.worst = max(self._counts.worst, off)
        over = f"over the pieces {result.partition}"
        if off > self._tolerance:
            raise WrongOutcomeError(f"{where}: gradient off by {off:.3g} {over}")
        if abs(float(result) - loss) > self._tolerance * max(1.0, abs(loss)):
            raise WrongOutcomeError(f"{where}: the loss is {float(result)!r}, not {loss!r}, {over}")
        if any(not torch.allclose(a, b, rtol=self._tolerance, atol=1e-12) for a, b in self._buffers()):
            raise WrongOutcomeError(f"{where}: buffers differ from a run without failures {over}")
        if not after.same(streams):
            raise WrongOutcomeError(f"{where}: random streams are not where a run without failures leaves them {over}")

    def _length_of(self, number: int) -> int:
        return view_of(self._twin, self._twin.batch(number)).length
