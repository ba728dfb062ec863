"""A model in training under a memory limit; each step is compared with a twin trained by hand."""

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

from elastic_mbs import (
    ElasticMBS,
    Event,
    OptimizerOutOfMemory,
    OutOfMemory,
    RecoveryError,
    StepResult,
    elastic_step,
)
from elastic_mbs.errors import UsageError
from elastic_mbs.testing import InjectOOM

from ..console import Tally, listed
from ..doors import by_loop
from ..flat_options import grouped
from ..limits import MemoryLimit, ShimLimit
from ..limits.fence import MINIMUM
from ..models.factory import make
from ..reference.by_hand import accumulate, check_covered, view_of
from ..reference.state import State, demand, error_of, same_state, tolerance_of
from ..scenarios.measure import smallest

# Bytes that a process limit leaves to Python and to torch's own bookkeeping. An allocator of
# tensors has them elsewhere.
SLACK = 1 << 20
# Bytes of losses, states of random generators and the like that a call may hold.
BOOKKEEPING = 16384

Door = Callable[[Any], StepResult]
Moving = Callable[[], AbstractContextManager[object]]  # makes a block in which memory is short


@dataclass(frozen=True)
class Range:
    """Bytes of a room for the smallest piece and for the whole batch."""

    least: int  # need of the smallest piece beyond the memory held between two steps
    whole: int  # need of the whole batch beyond that memory
    # room beside `NOTHING_MORE`, where the interpreter's own memory counts as well
    slack: int = 0
    blocks: bool = False  # the memory limit knows `BLOCKS`

    def of(self, share: float) -> int:
        return max(0, self.least + int((self.whole - self.least) * share))


@dataclass
class Counts(Tally):
    steps: int = 0
    # refused allocations by the limit's count; out-of-memory errors where the limit has no count
    failures: int = 0
    ooms: int = 0  # out-of-memory errors of the events, the optimizer's included
    checked: int = 0  # steps whose gradient, loss, buffers and random streams were compared
    worst: float = 0.0  # largest relative difference of a gradient
    optimizer: int = 0  # guarded optimizer steps that were compared
    phases: Counter[str] = field(default_factory=Counter)  # failures by phase
    modes: Counter[str] = field(default_factory=Counter)  # replays by mode
    # typed errors that ended a call and left everything as it was
    refused: Counter[str] = field(default_factory=Counter)

    def line(self) -> str:
        return (
            f"{self.failures} failures in {self.steps} steps, {self.ooms} out-of-memory errors "
            f"told of ({listed(self.phases)}), "
            f"{self.refused.total()} calls refused, {self.checked} gradients checked, worst "
            f"{self.worst:.1e}"
        )


class Training:
    """A model in training, its twin, and the measurements of both."""

    def __init__(self, limit: MemoryLimit, model: str, seed: int) -> None:
        torch.set_num_threads(1)
        self.limit = limit
        self.real = make(model, seed, limit.device)
        self.twin = make(model, seed, limit.device)
        self.rng = random.Random(seed)
        self.optimizers = [
            subject.optimizer(subject.model.parameters()) for subject in (self.real, self.twin)
        ]
        self.tolerance = tolerance_of(self.real.model)
        self.length = view_of(self.real, self.real.batch(0)).length
        self.largest = min(
            self.length, self.real.options.get("max_micro_batch_size") or self.length
        )
        self.counts = Counts()
        # Bytes held beside gradients before a call, the most beyond them since, and when that was.
        self._before = 0
        self._most = 0
        self._when = ""
        torch.manual_seed(seed)

    def prepare(self) -> None:
        """Measure the need of the whole batch and of the smallest piece, in the twin.

        Raises a UsageError where they do not differ.
        """
        self.limit.warm(self._piece, range(smallest(self.real), self.length + 1))
        needs = []
        kept = []
        for size in (self.length, self.length, smallest(self.twin)):
            held = self.limit.live()
            self.limit.reset_peak()
            with InjectOOM() as counting:
                self._piece(size)
            needs.append((self.limit.peak() - held, counting.count))
            kept.append(self.limit.live() - held)
        self.kept = max(0, *kept)  # held by the model itself, of its last piece
        (whole, self.operations), (least, _) = needs[1:]
        if whole <= least:
            raise UsageError(
                f"--model {self.real.name}: its whole batch takes no more memory than its "
                "smallest piece, so nothing could be shown"
            )
        by_allocator = self.limit.kind != "rlimit"
        # Breaking up a GPU's memory takes all of it, which a step cannot spare in the middle.
        self.range = Range(
            least,
            whole,
            0 if by_allocator else SLACK,
            by_allocator and self.limit.device.type == "cpu",
        )
        gc.collect()
        gc.freeze()  # imported objects need not be looked at each time

    def _piece(self, size: int) -> None:
        accumulate(self.twin, view_of(self.twin, self.twin.batch(0)), [(0, size)])
        self.twin.model.zero_grad()

    @contextmanager
    def runtimes(self, *options: dict[str, Any]) -> Iterator[tuple[ElasticMBS, list[Door]]]:
        """Yield runtimes with their ways in: `backward`, the decorator and the loop.

        Each has its own options, or the last ones given.
        """
        model = self.real.model
        loss_fn = self.real.loss_fn
        common = {
            "outputs": None,
            "wait_for_memory": 0,
            "verify": "off",  # every run of the step is counted
            **self.real.options,
            "sensor": self.limit.sensor,
            "on_event": self._note,
        }
        first, second, third = (
            grouped({**common, **options[min(i, len(options) - 1)]}) for i in range(3)
        )
        with ElasticMBS(model, **first) as mbs, ElasticMBS(model, **third) as other:
            decorated = elastic_step(model, **second)(loss_fn)
            yield mbs, [partial(mbs.backward, loss_fn), decorated, partial(by_loop, other, loss_fn)]
            decorated.mbs.close()

    def _note(self, event: Event) -> None:
        if isinstance(event, OutOfMemory):
            if event.mode != "isolate":  # "isolate" sets gradients aside by design
                self._look(f"failed {event.phase}")
            self.counts.modes[event.mode] += 1
        if isinstance(event, OutOfMemory | OptimizerOutOfMemory):
            self.counts.ooms += 1
            self.counts.phases[event.phase if isinstance(event, OutOfMemory) else "optimizer"] += 1

    # ------------------------------------------------------------------ memory that is held

    def _look(self, when: str) -> None:
        """Note the memory held after a failed attempt or a call, when no other backward has run."""
        more = self._beside_gradients() - self._before
        if more > self._most:
            self._most = more
            self._when = when

    def _beside_gradients(self) -> int:
        """Return the bytes held by this process, as the limit counts them, without gradients."""
        least = MINIMUM if isinstance(self.limit, ShimLimit) else 1
        grads = [leaf.grad for leaf in self.real.model.parameters() if leaf.grad is not None]
        storages = [
            (grad._values() if grad.is_sparse else grad).untyped_storage() for grad in grads
        ]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return self.limit.live() - sum(size for size in sizes.values() if size >= least)

    # ------------------------------------------------------------------ a step

    def short(self, call: Callable[[], Any], moving: Moving) -> tuple[Any, RecoveryError | None]:
        """Make a call while memory is short."""
        before = self.limit.failures()
        told = self.counts.ooms
        try:
            with moving():
                return call(), None
        except RecoveryError as error:
            self.counts.refused[type(error).__name__] += 1
            return None, error.with_traceback(None)
        finally:
            after = self.limit.failures()
            self.counts.failures += (
                self.counts.ooms - told if before is None or after is None else after - before
            )

    def step(
        self,
        mbs: ElasticMBS,
        door: Door,
        moving: Moving,
        *,
        checked: bool = True,
        guarded: bool = True,
    ) -> None:
        """Make one training step.

        Raises a WrongOutcomeError where a result is wrong, or a failed attempt is held.
        """
        number = self.counts.steps
        where = f"step {self.counts.steps}: "
        self.counts.steps += 1
        batch = self.real.batch(number)
        start = self.state()
        if checked:
            self.follow()
        self._before = self._beside_gradients()
        self._most = 0
        result, error = self.short(lambda: door(batch), moving)
        self._look("call")
        if self.limit.kind != "rlimit":  # "rlimit" counts the interpreter's memory as well
            still = (
                f"{self._most} bytes of it were still held after the {self._when}, beside gradients"
            )
            demand(self._most <= self.kept + BOOKKEEPING, f"{where}{still}")
        if error is not None:
            self.check_refused(start, f"{where}{type(error).__name__}: ")
            return
        if checked:
            self.check(number, result, start, where)
        del result, start
        if guarded:
            self.optimize(mbs, moving, where, checked=checked)
        else:
            self.optimizers[0].step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def optimize(
        self, mbs: ElasticMBS, moving: Moving, where: str, *, checked: bool = True
    ) -> None:
        """Make one guarded optimizer step, and compare it with a plain one where `checked`."""
        mine, other = self.optimizers
        if checked:
            other.load_state_dict(copy.deepcopy(mine.state_dict()))
            for leaf, theirs in zip(self.twin.leaves(), self.real.leaves(), strict=True):
                leaf.grad = None if theirs.grad is None else theirs.grad.detach().clone()
        _, error = self.short(lambda: mbs.optimizer_step(mine), moving)
        if not checked:
            return
        self.counts.optimizer += 1
        if error is None:
            other.step()
        off = error_of(
            [leaf.detach() for leaf in self.real.leaves()],
            [leaf.detach() for leaf in self.twin.leaves()],
        )
        how = "a plain step" if error is None else f"before, after {type(error).__name__}"
        demand(
            off <= (self.tolerance if error is None else 0.0),
            f"{where}parameters differ by {off:.3g} from those of {how}",
        )
        if error is not None:
            demand(
                same_state(mine.state_dict(), other.state_dict()),
                f"{where}the optimizer's state is not as {how}",
            )

    # ------------------------------------------------------------------ checks

    def state(self) -> State:
        return State.of(self.real.leaves(), self.real.model)

    def follow(self) -> None:
        """Make the twin equal to the model, so that differences do not add up."""
        with torch.no_grad():
            for leaf, theirs in zip(self.twin.leaves(), self.real.leaves(), strict=True):
                leaf.copy_(theirs)
            for own, module in zip(
                self.twin.model.modules(), self.real.model.modules(), strict=True
            ):
                own._buffers.update(
                    {
                        name: None if buffer is None else buffer.detach().clone()
                        for name, buffer in module._buffers.items()
                    }
                )

    def check_refused(self, start: State, where: str) -> None:
        """Check that everything is as it was before a call that was refused."""
        start.demand_kept(self.state(), where=where)

    def check(self, number: int, result: StepResult, start: State, where: str) -> None:
        """Check that everything is as in the twin after the same pieces by hand."""
        view = view_of(self.twin, self.twin.batch(number))
        now = self.state()
        check_covered(result.partition, view.length, where)
        start.streams.restore()
        loss = accumulate(self.twin, view, result.partition)
        wanted = State.of(self.twin.leaves(), self.twin.model)
        now.streams.restore()
        off = error_of(now.grads, wanted.grads)
        self.counts.checked += 1
        self.counts.worst = max(self.counts.worst, off)
        over = f"over the pieces {result.partition}"
        demand(off <= self.tolerance, f"{where}gradient off by {off:.3g} {over}")
        demand(
            abs(float(result) - loss) <= self.tolerance * max(1.0, abs(loss)),
            f"{where}the loss is {float(result)!r}, not {loss!r}, {over}",
        )
        now.demand_rest_of(wanted, self.tolerance, where)
