"""A model in training under a memory limit, each step held against a twin that accumulates by hand."""

from __future__ import annotations

import copy
import gc
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from elastic_mbs import ElasticMBS, Event, OptimizerOutOfMemory, OutOfMemory, RecoveryError, StepResult, elastic_step
from elastic_mbs.errors import UsageError
from elastic_mbs.testing import InjectOOM

from ..flat_options import grouped
from ..limits import MemoryLimit
from ..models.factory import make
from ..reference.by_hand import accumulate, by_loop, check_covered, view_of
from ..reference.state import WrongOutcomeError, error_of, same_state, tolerance_of
from ..scenarios.measure import smallest
from ..streams import Streams
from ..tally import Tally, listed
from .blows import Range
from .holding import Holding

SLACK = 1 << 20
"""Bytes that a process limit leaves to Python and to torch's own bookkeeping, which an allocator of tensors has elsewhere."""

Door = Callable[[Any], StepResult]
Moving = Callable[[], AbstractContextManager[object]]
"""Makes a block in which memory is short."""


@dataclass
class Counts(Tally):
    """Sums over steps."""

    steps: int = 0
    failures: int = 0  # allocations that were refused, by the limit's count; where there is none, out-of-memory errors of the events
    ooms: int = 0  # out-of-memory errors of the events, those of the optimizer among them
    checked: int = 0  # steps whose gradient, loss, buffers and random streams were compared
    worst: float = 0.0  # largest relative difference of a gradient
    optimizer: int = 0  # guarded optimizer steps that were compared
    phases: Counter[str] = field(default_factory=Counter)  # what ran out of memory
    modes: Counter[str] = field(default_factory=Counter)  # how it was replayed
    refused: Counter[str] = field(default_factory=Counter)  # typed errors that ended a call with everything as before it

    def line(self) -> str:
        return (
            f"{self.failures} failures in {self.steps} steps, {self.ooms} out-of-memory errors told of ({listed(self.phases)}), "
            f"{sum(self.refused.values())} calls refused, {self.checked} gradients checked, worst {self.worst:.1e}"
        )


class Training:
    """A model in training, its twin, and what is known of both."""

    def __init__(self, limit: MemoryLimit, model: str, seed: int) -> None:
        torch.set_num_threads(1)
        self.limit = limit
        self.real, self.twin = make(model, seed, limit.device), make(model, seed, limit.device)
        self.rng = random.Random(seed)
        self.optimizers = [subject.optimizer(subject.model.parameters()) for subject in (self.real, self.twin)]
        self.tolerance = tolerance_of(self.real.model)
        self.length = view_of(self.real, self.real.batch(0)).length
        self.largest = min(self.length, self.real.options.get("max_micro_batch_size") or self.length)
        self.counts = Counts()
        self.holding = Holding(limit, self.real.model)
        torch.manual_seed(seed)

    # ------------------------------------------------------------------ before the first step

    def prepare(self) -> None:
        """Measures what the whole batch takes, and what the smallest piece, in the twin.

        Raises:
            UsageError: there is no difference, so that nothing can be shown on this model.
        """
        self.limit.warm(self._piece, range(smallest(self.real), self.length + 1))
        needs, kept = [], []
        for size in (self.length, self.length, smallest(self.twin)):
            held = self.limit.live()
            self.limit.reset_peak()
            with InjectOOM() as counting:
                self._piece(size)
            needs.append((self.limit.peak() - held, counting.count))
            kept.append(self.limit.live() - held)
        self.kept = max(0, *kept)  # by the model itself, of its last piece
        (whole, self.operations), (least, _) = needs[1:]
        if whole <= least:
            raise UsageError(f"--model {self.real.name}: its whole batch takes no more memory than its smallest piece, so nothing could be shown")
        by_allocator = self.limit.kind != "rlimit"
        self.range = Range(least, whole, 0 if by_allocator else SLACK, by_allocator)
        gc.collect()
        gc.freeze()  # what has been imported by now need not be looked at each time

    def _piece(self, size: int) -> None:
        accumulate(self.twin, view_of(self.twin, self.twin.batch(0)), [(0, size)])
        self.twin.model.zero_grad()

    # ------------------------------------------------------------------ training

    @contextmanager
    def runtimes(self, *options: dict[str, Any]) -> Iterator[tuple[ElasticMBS, list[Door]]]:
        """A runtime for `backward`, one behind the decorator and one for the loop, each with its options or the last ones given."""
        model, loss_fn = self.real.model, self.real.loss_fn
        common = {"outputs": None, "wait_for_memory": 0, **self.real.options, "sensor": self.limit.sensor, "on_event": self._note}
        first, second, third = (grouped({**common, **options[min(i, len(options) - 1)]}) for i in range(3))
        with ElasticMBS(model, **first) as mbs, ElasticMBS(model, **third) as other:
            decorated = elastic_step(model, **second)(loss_fn)
            yield mbs, [partial(mbs.backward, loss_fn), decorated, partial(by_loop, other, loss_fn)]
            decorated.mbs.close()

    def _note(self, event: Event) -> None:
        self.holding(event)
        if isinstance(event, OutOfMemory):
            self.counts.modes[event.mode] += 1
        if isinstance(event, OutOfMemory | OptimizerOutOfMemory):
            self.counts.ooms += 1
            self.counts.phases[event.phase if isinstance(event, OutOfMemory) else "optimizer"] += 1

    def short(self, call: Callable[[], Any], moving: Moving) -> tuple[Any, RecoveryError | None]:
        """A call while memory is short."""
        before, told = self.limit.failures(), self.counts.ooms
        try:
            with moving():
                return call(), None
        except RecoveryError as error:
            self.counts.refused[type(error).__name__] += 1
            return None, error.with_traceback(None)
        finally:
            after = self.limit.failures()
            self.counts.failures += self.counts.ooms - told if before is None or after is None else after - before

    def step(self, mbs: ElasticMBS, door: Door, moving: Moving, *, checked: bool = True, guarded: bool = True) -> None:
        """One training step.

        Raises:
            WrongOutcomeError: gradient, loss, buffers, random streams or parameters are not what they have to be, or a failed attempt is held.
        """
        number, where = self.counts.steps, f"step {self.counts.steps}"
        self.counts.steps += 1
        batch = self.real.batch(number)
        if checked:
            self.follow()
        start = Streams.now()
        self.holding.begin()
        result, error = self.short(lambda: door(batch), moving)
        self.holding.look("call")
        self.holding.check(self.kept, where)
        if error is not None:
            self.check_refused(start, f"{where}, {type(error).__name__}", buffers=checked)
            return
        if checked:
            self.check(number, result, start, where)
        del result
        if guarded:
            self.optimize(mbs, moving, where, checked=checked)
        else:
            self.optimizers[0].step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def optimize(self, mbs: ElasticMBS, moving: Moving, where: str, *, checked: bool = True) -> None:
        """One guarded step of the optimizer."""
        mine, other = self.optimizers
        leaves = list(zip(self.real.model.parameters(), self.twin.model.parameters(), strict=True))
        if checked:
            other.load_state_dict(copy.deepcopy(mine.state_dict()))
            for a, b in leaves:
                b.grad = None if a.grad is None else a.grad.detach().clone()
        _, error = self.short(lambda: mbs.optimizer_step(mine), moving)
        if not checked:
            return
        if error is None:
            other.step()
        self.counts.optimizer += 1
        off = error_of([a.detach() for a, _ in leaves], [b.detach() for _, b in leaves])
        if off > (0.0 if error is not None else self.tolerance):
            how = "a plain step" if error is None else f"before, after {type(error).__name__}"
            raise WrongOutcomeError(f"{where}: parameters differ by {off:.3g} from those of {how}")
        if error is not None and not same_state(mine.state_dict(), other.state_dict()):
            raise WrongOutcomeError(f"{where}: the optimizer's state is not as before after {type(error).__name__}")

    # ------------------------------------------------------------------ checks

    def follow(self) -> None:
        """The twin becomes equal to the model, so that differences do not add up."""
        with torch.no_grad():
            for mine, theirs in zip(self.twin.model.parameters(), self.real.model.parameters(), strict=True):
                mine.copy_(theirs)
            for own, module in zip(self.twin.model.modules(), self.real.model.modules(), strict=True):
                for name, buffer in module._buffers.items():
                    own._buffers[name] = None if buffer is None else buffer.detach().clone()

    def _same_buffers(self, rtol: float = 0.0, atol: float = 0.0) -> bool:
        return all(torch.allclose(a, b, rtol, atol) for a, b in zip(self.real.model.buffers(), self.twin.model.buffers(), strict=True))

    def check_refused(self, start: Streams, where: str, *, buffers: bool = True) -> None:
        """Everything is as before a call that was refused."""
        if any(leaf.grad is not None for leaf in self.real.model.parameters()):
            raise WrongOutcomeError(f"{where}: a gradient that was empty is not empty")
        if buffers and not self._same_buffers():
            raise WrongOutcomeError(f"{where}: buffers are not as before")
        if not start.same(Streams.now()):
            raise WrongOutcomeError(f"{where}: random streams are not as before")

    def check(self, number: int, result: StepResult, start: Streams, where: str) -> None:
        """Everything is as the twin has it after the same pieces by hand."""
        view = view_of(self.twin, self.twin.batch(number))
        check_covered([*result.partition, *result.skipped], view.length, f"{where}: ")
        after = Streams.now()
        start.restore()
        loss = accumulate(self.twin, view, result.partition)
        streams = Streams.now()
        after.restore()
        off = error_of(*([leaf.grad for leaf in subject.model.parameters()] for subject in (self.real, self.twin)))
        self.counts.checked += 1
        self.counts.worst = max(self.counts.worst, off)
        over = f"over the pieces {result.partition}"
        if off > self.tolerance:
            raise WrongOutcomeError(f"{where}: gradient off by {off:.3g} {over}")
        if abs(float(result) - loss) > self.tolerance * max(1.0, abs(loss)):
            raise WrongOutcomeError(f"{where}: the loss is {float(result)!r}, not {loss!r}, {over}")
        if not self._same_buffers(self.tolerance, 1e-12):
            raise WrongOutcomeError(f"{where}: buffers differ from a run without failures {over}")
        if not after.same(streams):
            raise WrongOutcomeError(f"{where}: random streams are not where a run without failures leaves them {over}")
