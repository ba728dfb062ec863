"""A case from its start to its end.

Each step is compared with a loop by hand, nothing may stay alive, and the events have to add up.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from elastic_mbs import ElasticMBS, MemoryBudget, Policy, RecoveryError, StepResult, elastic_step
from elastic_mbs.events import CallDone, CallFailed, Event, OptimizerOutOfMemory, OutOfMemory
from elastic_mbs.testing import InjectOOM

from ..console import Tally
from ..doors import by_loop
from ..flat_options import grouped
from ..limits.cuda import refusals
from ..models.plan import Plan
from ..models.setup import CONTAINERS, count_of, make_batch, set_up
from ..reference.samples import Samples, mapped
from ..reference.state import State, demand, error_of, hooks_on, same_state, same_tensors
from ..streams import Streams
from .checks import SCALE, accumulate, check_partition, check_result
from .faults import SENSORS, AlienError, Faults

PLENTY = "1TiB"


@dataclass
class Outcome(Tally):
    calls: int = 0  # training calls
    faults: int = 0  # faults that were planned
    struck: int = 0  # operations that were made to fail
    refused: int = 0  # operations among these that a GPU's own allocator refused
    limits_hit: int = 0  # times that a memory limit was passed
    splits: int = 0  # failures after which the micro-batch was made smaller
    # failures after which a piece was replayed for a part of the leaves, because the others had its
    # gradient already
    partial: int = 0
    errors: Counter[str] = field(default_factory=Counter)  # typed errors that ended a call
    modes: Counter[str] = field(default_factory=Counter)  # replays by mode
    phases: Counter[str] = field(default_factory=Counter)  # failures by phase
    worst: float = 0.0  # largest relative error of a gradient


def run_trial(plan: Plan) -> Outcome:
    """Run a case.

    Raises a WrongOutcomeError where an outcome is not allowed. An error that the faults do not
    explain
    passes through.
    """
    with Streams.now(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of parts that a case is made of
        before = refusals()
        outcome = _Trial(plan).run()
        outcome.refused = refusals() - before
        return outcome


class _Trial:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.outcome = Outcome(faults=len(plan.faults))
        self.real = set_up(plan)
        self.budget = MemoryBudget(
            PLENTY, track=(self.real.model, self.real.guests, self.real.flat), device=plan.device
        )
        self.events: list[Event] = []
        self.scaler = torch.amp.GradScaler(plan.device, init_scale=SCALE) if plan.scaler else None
        self.forwards = 0  # forwards of the call
        self.results: Counter[str] = Counter()  # sums over the results of finished calls

    def run(self) -> Outcome:
        plan = self.plan
        self._measure()
        with self.budget if plan.sensor == "budget" else nullcontext():
            step, mbs = self._runtime()
        try:
            for number in range(plan.steps):
                self._step(mbs, step, number)
        finally:
            mbs.close()
        self._check_events(mbs)  # a GPU's calls are told of once their seconds are known
        demand(
            hooks_on(self.real.model, self.real.leaves()) == 0,
            "a closed runtime has left a hook on the model",
        )
        del mbs, step
        self._check_alive()
        return self.outcome

    def _measure(self) -> None:
        """Measure the operations and the memory that a batch takes."""
        batch = make_batch(self.plan, 0)
        twin = self.real.twin()
        budget = MemoryBudget(PLENTY, track=(twin.model, twin.guests), device=self.plan.device)
        before = budget.live
        with Streams.now(), budget, InjectOOM() as counting:
            accumulate(twin, batch, [(0, self.plan.samples)])
        self.operations = counting.count
        self.need = budget.peak - before

    def _runtime(self) -> tuple[Callable[[Any], StepResult], ElasticMBS]:
        plan = self.plan
        real = self.real
        options = grouped(
            {
                "micro_batch_size": plan.size or "auto",
                "min_micro_batch_size": plan.minimum,
                "max_micro_batch_size": plan.maximum or None,
                "align": plan.align,
                "grow": plan.grow,
                "reduction": plan.reduction,
                "count": count_of(plan),
                "dims": CONTAINERS[plan.container].dims,
                "accumulate_dtype": torch.float32 if plan.half else None,
                "outputs": None if plan.outputs == "none" else plan.outputs,
                "scaler": self.scaler,
                "backward": torch.Tensor.backward if plan.backward else None,
                "replay": plan.replay,
                "sensor": SENSORS[plan.sensor](),
                "monitor_interval": 0,
                "wait_for_memory": 0,
                "on_event": self.events.append,
                "policy": Policy(patience=1, cooldown=0.0),
                "seed": plan.seed,
                "verify": "off",  # every run of the step is counted
            }
        )

        def loss_fn(piece: Any) -> Any:
            self.forwards += 1
            for at, factor in plan.moves:
                if at == self.forwards:
                    self._limit(factor)
            return real.loss_fn(piece)

        if plan.door == 2:
            step = elastic_step(real.model, **options)(loss_fn)
            return step, step.mbs
        mbs = ElasticMBS(real.model, **options)
        if plan.door == 1:
            return (lambda batch: mbs.backward(loss_fn, batch)), mbs
        return (lambda batch: by_loop(mbs, loss_fn, batch)), mbs

    def _limit(self, factor: float) -> None:
        self.budget.limit = PLENTY if factor == 0 else max(1, self.held + int(factor * self.need))

    # ------------------------------------------------------------------ a step

    def _guarded(
        self, place: str, number: int, operations: int, where: str, call: Callable[[], Any]
    ) -> tuple[Any, Exception | None, int]:
        """Make a call under the faults of its place.

        Returns its result, the error that ended it, and how many failures were made.
        """
        faults = Faults(
            [fault for fault in self.plan.faults if (fault.step, fault.place) == (number, place)],
            operations,
            self.plan.device,
        )
        hits, result = self.budget.ooms, None
        error: Exception | None = None
        with self.budget, faults:
            try:
                result = call()
            except (RecoveryError, AlienError) as caught:
                error = caught.with_traceback(None)
        made = len(faults.hits) + self.budget.ooms - hits
        self.outcome.struck += len(faults.hits)
        self.outcome.limits_hit += self.budget.ooms - hits
        if error is None:
            demand(faults.alien is None, f"{where}an error that is no lack of memory was swallowed")
        else:
            self.outcome.errors[type(error).__name__] += 1
            demand(bool(made), f"{where}{type(error).__name__} although nothing failed: {error}")
            demand(
                not isinstance(error, AlienError) or error is faults.alien,
                f"{where}another error than the one that was raised came out",
            )
        return result, error, made

    def _step(self, mbs: ElasticMBS, step: Callable[[Any], StepResult], number: int) -> None:
        plan = self.plan
        real = self.real
        where = f"step {number}: "
        batch = make_batch(plan, number)
        pristine = mapped(batch, torch.clone)
        before = real.twin()
        start = State.of(real.leaves(), real.model)
        self.forwards = 0
        self.held = self.budget.live
        if plan.limits:
            self._limit(plan.limits[number % len(plan.limits)])
        operations = self.operations * max(1, -(-plan.samples // (plan.size or 4)))
        result, error, made = self._guarded("call", number, operations, where, lambda: step(batch))
        self.budget.limit = PLENTY
        self.outcome.calls += 1
        if error is not None:
            notes = "\n".join(getattr(error, "__notes__", []))
            start.demand_kept(
                State.of(real.leaves(), real.model), notes, f"{where}{type(error).__name__}: "
            )
            if "zero_grad()" in notes:
                real.optimizer.zero_grad()
            return
        demand(
            same_tensors(start.parameters, real.leaves()), f"{where}a parameter changed in backward"
        )
        check_partition(plan, result, pristine, where)
        self.outcome.worst = max(
            self.outcome.worst, check_result(before, start, real, result, pristine, where)
        )
        demand(
            result.ooms <= made,
            f"{where}{result.ooms} failures are told of, and only {made} operations failed",
        )
        restarts = sum(
            isinstance(event, OutOfMemory) and event.mode == "step" for event in self.events
        )
        attempts = f"{self.forwards} attempts for {plan.samples} samples and {made} failures"
        demand(self.forwards <= plan.samples * (1 + restarts) + made, f"{where}{attempts}")
        self.results.update(
            calls=1,
            samples=plan.samples,
            pieces=len(result.partition),
            ooms=result.ooms,
            replayed=result.replayed_samples,
        )
        del result, before
        if plan.evaluate:
            self._evaluate(mbs, pristine, number)
        self._optimize(mbs, number)

    def _evaluate(self, mbs: ElasticMBS, batch: Any, number: int) -> None:
        real = self.real
        where = f"evaluation after step {number}: "
        real.model.eval()
        before = State.of(real.leaves(), real.model)
        with torch.no_grad():
            view = Samples(batch, {"dims": CONTAINERS[self.plan.container].dims})
            wanted = real.scores(view.piece(0, view.length))
        found, error, _ = self._guarded(
            "eval",
            number,
            max(1, self.operations // 3),
            where,
            lambda: mbs.evaluate(real.scores, batch, outputs="device"),
        )
        before.demand_kept(State.of(real.leaves(), real.model), where=where)
        real.model.train()
        if error is None:
            rounding = 2e-2 if self.plan.half else 1e-11
            same = found.shape == wanted.shape and torch.allclose(
                found.to(wanted.device), wanted, rtol=rounding, atol=rounding
            )
            demand(same, f"{where}the outputs are wrong")

    def _optimize(self, mbs: ElasticMBS, number: int) -> None:
        plan = self.plan
        real = self.real
        where = f"optimizer after step {number}: "
        leaves = [leaf for leaf in real.leaves() if leaf.grad is not None]
        if self.scaler is not None and plan.clip:
            self.scaler.unscale_(real.optimizer)
        if plan.clip:
            torch.nn.utils.clip_grad_norm_(
                [leaf for leaf in leaves if leaf.grad is not None and not leaf.grad.is_sparse], 0.5
            )
        twin = real.twin()
        before = [leaf.detach().clone() for leaf in real.leaves()]
        if self.scaler is not None and not plan.clip:
            for leaf in twin.leaves():
                leaf.grad = None if leaf.grad is None else leaf.grad / SCALE
        twin.optimizer.step()
        if plan.guarded:
            _, error, _ = self._guarded(
                "optimizer",
                number,
                8 * len(leaves),
                where,
                lambda: mbs.optimizer_step(real.optimizer),
            )
            if error is not None:
                demand(
                    same_tensors(before, real.leaves()),
                    f"{where}parameters are not as before after {type(error).__name__}",
                )
                with self.budget:
                    mbs.optimizer_step(real.optimizer)
        else:
            with self.budget:
                real.optimizer.step() if self.scaler is None else self.scaler.step(real.optimizer)
        if self.scaler is not None:
            self.scaler.update(SCALE)
        off = error_of(
            [leaf.detach() for leaf in real.leaves()], [leaf.detach() for leaf in twin.leaves()]
        )
        demand(off <= 1e-15, f"{where}parameters off by {off:.3g} from a plain step")
        demand(
            same_state(real.optimizer.state_dict(), twin.optimizer.state_dict()),
            f"{where}the optimizer's state differs from a plain step's",
        )
        if not plan.keep:
            real.optimizer.zero_grad()

    # ------------------------------------------------------------------ the end

    def _check_events(self, mbs: ElasticMBS) -> None:
        out = self.outcome
        events = self.events
        stats = mbs.stats
        results = self.results
        failures = [event for event in events if isinstance(event, OutOfMemory)]
        out.modes.update(event.mode for event in failures)
        out.phases.update(event.phase for event in failures)
        out.phases.update(
            "optimizer" for event in events if isinstance(event, OptimizerOutOfMemory)
        )
        out.partial += sum(event.committed > 0 for event in failures)
        out.splits += sum(event.size_after < event.size_before for event in failures)
        ended = [event for event in events if isinstance(event, CallDone | CallFailed)]
        done = [event for event in ended if isinstance(event, CallDone)]
        trained = [event for event in done if event.mode == "train"]
        # The error comes in the place of the event. Another can end a recovery before its event.
        told = len(failures) + out.errors["ReplayUnsafeError"]
        untold = sum(event.ooms for event in ended) - told
        sums = {
            "finished calls": (len(trained), stats.calls, results["calls"]),
            "samples": (stats.samples, results["samples"]),
            "pieces": (stats.pieces, results["pieces"]),
            "out-of-memory errors of finished calls": (
                sum(event.ooms for event in trained),
                results["ooms"],
            ),
            "replayed samples": (
                sum(event.replayed_samples for event in trained),
                results["replayed"],
            ),
            "out-of-memory errors in stats": (stats.ooms, sum(event.ooms for event in done)),
        }
        for what, numbers in sums.items():
            demand(len(set(numbers)) == 1, f"{what} do not add up: {numbers}")
        demand(
            0 <= untold <= out.errors["AlienError"],
            f"{told} out-of-memory events, and {untold} more errors were counted",
        )

    def _check_alive(self) -> None:
        real = self.real
        for leaf in real.leaves():
            leaf.grad = None
        real.flat.clear()
        real.optimizer = torch.optim.SGD(real.leaves(), lr=0.1)
        self.events.clear()
        self.scaler = None
        tensors: list[Tensor] = [*real.model.parameters(), *real.model.buffers(), *real.guests]
        rest = sum(
            {
                tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
                for tensor in tensors
            }.values()
        )
        if self.budget.live != rest:
            gc.collect()  # cycles of checkpointing and custom functions are torch's
        # Autograd's thread of a GPU lets go of its last node when it has its turn.
        for _ in range(100 if self.plan.device != "cpu" else 0):
            if self.budget.live == rest:
                break
            time.sleep(0.05)
        demand(
            self.budget.live == rest, f"{self.budget.live - rest} bytes are still alive at the end"
        )
