"""Measure the worth of replaying only the missing part of a backward.

A failure in backward can strike after some leaves have committed. The engine then starts the batch
over. It loses the pieces that had committed, and the gradients that the failed piece had committed.
A replay for the other leaves alone (`backward(inputs=…)`) would keep both.

Each run trains a small model for 200 steps under a `MemoryBudget`. A co-tenant comes at step 60 and
leaves at step 140, between two steps or at a random operation of step 60. Its visit lowers the
limit to a fraction of the need: the peak of a full-batch step with parameters, gradients and
optimizer state. Where a run cannot go on under that limit, the fraction is of the activations: the
need less these three.

    OMP_NUM_THREADS=1 python -m benchmarks.partial_replay     # all, into benchmarks/results
    OMP_NUM_THREADS=1 python -m benchmarks.partial_replay --models Llama LSTM --json out.json
    OMP_NUM_THREADS=1 python -m benchmarks.partial_replay --visit 3 15 22

The last command leaves out most of the steps in which nothing happens; its losses are fractions of
200 steps all the same.

It needs transformers for six of the models. Losses are in batches: the samples of the pieces before
the failed one, and the part of the failed piece's work that a replay for the missing leaves would
save (`_Savings`). Their sum, divided by the 200 batches of the run, is the fraction of time that
restarts cost. It is an upper bound: a batch that starts over can fail again, and with dropout or
BatchNorm a replay in part is not exact.

The result in benchmarks/results was measured with an earlier engine, which replayed in part. Each
run with such a failure was made a second time with restarts, and the result has both counts of
computed samples. The present engine computes as many as the second, in each of the 208 runs.
docs/internals/autograd.md, "Partial replay", has the conclusion.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from benchmarks.partial_replay_models import MODELS, Subject
from elastic_mbs import ElasticMBS, MemoryOptions, Policy
from elastic_mbs.dispatch import VersionedMode, run
from elastic_mbs.errors import ElasticMBSError
from elastic_mbs.events import Event, OutOfMemory
from elastic_mbs.memory import MemoryBudget

STEPS = 200
"""Steps of a run, of whose time a loss is a fraction."""
VISIT = (60, 140, STEPS)
"""Steps at which the co-tenant comes and leaves, and after which a run ends."""
FRACTIONS = (0.30, 0.40, 0.50, 0.60, 0.70, 0.80, 0.90, 0.95)
ARRIVALS = ("between steps", "within a step")
BOUND = 0.005
UNLIMITED = 1 << 40
RESULT = Path(__file__).parent / "results" / "partial_replay.json"


# ---------------------------------------------------------------------- records


@dataclass
class Failure:
    """An out-of-memory error, with the batches that its restart loses against a replay in part."""

    step: int
    phase: str
    mode: str
    start: int
    stop: int
    committed: int
    lost: float = 0.0


@dataclass
class Run:
    """A run of 200 steps, or as far as it came."""

    fraction: float
    of: str
    arrival: str
    limit: int = 0
    failures: list[Failure] = field(default_factory=list)
    steps: int = 0
    computed: int = 0
    cpu_seconds: float = 0.0
    ended_by: str = ""

    @property
    def restarts(self) -> list[Failure]:
        """Failures after a first commit, which start the batch over."""
        return [each for each in self.failures if each.committed and each.mode == "step"]

    @property
    def lost(self) -> float:
        """Fraction of the run's work that restarts lose."""
        return sum(each.lost for each in self.failures) / STEPS


@dataclass
class Result:
    """The runs of one model."""

    model: str
    samples: int
    leaves: int
    need: int
    static: int
    runs: list[Run]


# ---------------------------------------------------------------------- one model


class _Arrival(VersionedMode):
    """A count of operations, with a co-tenant that arrives before the one of a given number."""

    def __init__(self, at: int = -1, arrive: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.seen, self._at, self._arrive = 0, at, arrive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.seen == self._at and self._arrive is not None:
            self._arrive()
        self.seen += 1
        return run(func, args, kwargs)


class _Savings:
    """The part of a piece's work that is saved by leaving out the leaves that committed first."""

    def __init__(self, subject: Subject, repeats: int = 5) -> None:
        self._subject, self._repeats = subject, repeats
        self._known: dict[int, float] = {0: 0.0}
        self.order: list[Tensor] = []
        leaves = [leaf for leaf in subject.model.parameters() if leaf.requires_grad]
        hooks = [leaf.register_post_accumulate_grad_hook(self.order.append) for leaf in leaves]
        self._seconds(None)
        for hook in hooks:
            hook.remove()

    def of(self, committed: int) -> float:
        """Return the saved fraction of forward and backward, timed once for each number."""
        if committed not in self._known:
            missing = self.order[committed:]
            whole, part = (
                min(seconds)
                for seconds in zip(
                    *((self._seconds(None), self._seconds(missing)) for _ in range(self._repeats)),
                    strict=True,
                )
            )
            self._known[committed] = max(0.0, (whole - part) / whole)
        return self._known[committed]

    def _seconds(self, inputs: list[Tensor] | None) -> float:
        """Return the CPU time of a forward and backward; without `inputs` for all leaves."""
        began = time.process_time()
        loss = self._subject.loss_fn(self._subject.batch)
        if inputs is None or inputs:
            torch.autograd.backward(loss, inputs=inputs)
        took = time.process_time() - began
        self._subject.model.zero_grad()
        return took


class Bench:
    """A model with its need, on which runs are made."""

    def __init__(self, name: str, visit: tuple[int, int, int] = VISIT) -> None:
        self.name = name
        self.comes, self.leaves_at, self.steps = visit
        self.savings = _Savings(self._fresh()[0])
        subject, optimizer = self._fresh()
        self.samples, self.leaves = subject.samples, len(self.savings.order)
        self.static, self.need, self.operations = _needs(subject, optimizer)

    def result(self, fractions: Sequence[float], arrivals: Sequence[str]) -> Result:
        """Make a run for each fraction and arrival."""
        runs = [self._visit(fraction, arrival) for arrival in arrivals for fraction in fractions]
        return Result(self.name, self.samples, self.leaves, self.need, self.static, runs)

    def _fresh(self) -> tuple[Subject, torch.optim.Optimizer]:
        torch.manual_seed(0)
        subject = MODELS[self.name]()
        return subject, torch.optim.AdamW(subject.model.parameters(), lr=1e-4, fused=True)

    def _visit(self, fraction: float, arrival: str) -> Run:
        """Make a run by the first definition of the limit that lets it end."""
        run = Run(fraction, "need", arrival, int(fraction * self.need))
        if run.limit > self.static:
            self._train(run)
        if run.limit <= self.static or run.ended_by:
            free = int(fraction * (self.need - self.static))
            run = Run(fraction, "activations", arrival, self.static + free)
            self._train(run)
        return run

    def _train(self, run: Run) -> None:
        subject, optimizer = self._fresh()

        def loss_fn(piece: Any) -> Tensor:
            run.computed += len(next(iter(piece.values())))
            return subject.loss_fn(piece)

        def listen(event: Event) -> None:
            if isinstance(event, OutOfMemory):
                run.failures.append(_failure(run.steps, event))

        budget = MemoryBudget(int(1.25 * self.need), track=(subject.model, optimizer))
        options = MemoryOptions(wait_for_memory=0.0)
        began = time.process_time()
        with (
            budget,
            ElasticMBS(
                subject.model,
                policy=Policy(seed=0),
                memory=options,
                on_event=[listen],
            ) as mbs,
        ):
            try:
                for run.steps in range(self.steps):
                    with self._visitor(run, budget):
                        mbs.backward(loss_fn, subject.batch)
                    optimizer.step()
                    optimizer.zero_grad()
                run.steps = self.steps
            except (ElasticMBSError, torch.OutOfMemoryError) as error:
                run.ended_by = f"{type(error).__name__}: {error}"
        run.cpu_seconds = time.process_time() - began
        for failure in run.failures:
            failure.lost = self._lost(failure)

    @contextmanager
    def _visitor(self, run: Run, budget: MemoryBudget) -> Iterator[None]:
        """Let the co-tenant come and go, as the step of the run is one of its."""

        def arrive() -> None:
            budget.limit = run.limit

        if run.steps == self.leaves_at:
            budget.limit = int(1.25 * self.need)
        if run.steps != self.comes:
            yield
        elif run.arrival == ARRIVALS[0]:
            arrive()
            yield
        else:
            draw = random.Random(f"{self.name} {run.fraction}")
            with _Arrival(draw.randrange(self.operations), arrive):
                yield
            arrive()

    def _lost(self, failure: Failure) -> float:
        """Return the batches lost. It times work, which must not run under the budget."""
        if not failure.committed or failure.mode != "step":
            return 0.0
        piece = (failure.stop - failure.start) * self.savings.of(failure.committed)
        return (failure.start + piece) / self.samples


def _failure(step: int, event: OutOfMemory) -> Failure:
    return Failure(step, event.phase, event.mode, event.start, event.stop, event.committed)


def _needs(subject: Subject, optimizer: torch.optim.Optimizer) -> tuple[int, int, int]:
    """Return the bytes that stay, those of the peak of a step, and a step's operations."""
    with MemoryBudget(UNLIMITED, track=[subject.model]) as budget:
        for _ in range(3):
            budget.reset_peak()
            with _Arrival() as counter:
                subject.loss_fn(subject.batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    gradients = [leaf for leaf in subject.model.parameters() if leaf.requires_grad]
    states = [value for state in optimizer.state.values() for value in state.values()]
    stay = [*subject.model.parameters(), *subject.model.buffers(), *gradients, *states]
    return sum(tensor.nbytes for tensor in stay), budget.peak, counter.seen


# ---------------------------------------------------------------------- all models


HEADER = (
    "| model | stays | runs of need/activations | OOMs | in backward | after a commit "
    "| lost, mean | lost, worst run |"
)


def row(result: Result) -> str:
    """Return a model's line of the table."""
    runs, failures = result.runs, [each for run in result.runs for each in run.failures]
    late = [each for run in runs for each in run.restarts]
    of_need = sum(run.of == "need" for run in runs)
    backward = sum(each.phase == "backward" for each in failures)
    return (
        f"| {result.model} | {result.static / result.need:.0%} | {of_need}/{len(runs) - of_need} "
        f"| {len(failures)} | {backward} | {len(late)} "
        f"| {mean(run.lost for run in runs):.4%} | {max(run.lost for run in runs):.4%} |"
    )


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Return the figures of all runs together, for each arrival and for both."""
    out = {}
    for arrivals in (ARRIVALS, *((each,) for each in ARRIVALS)):
        runs = [run for result in results for run in result.runs if run.arrival in arrivals]
        if not runs:
            continue
        losses = [run.lost for run in runs]
        out[" or ".join(arrivals)] = {
            "runs": len(runs),
            "ended early": sum(bool(run.ended_by) for run in runs),
            "failures": sum(len(run.failures) for run in runs),
            "after a first commit": sum(len(run.restarts) for run in runs),
            "runs with one": sum(bool(run.restarts) for run in runs),
            "lost, mean": mean(losses),
            "lost, worst": max(losses),
            "lost, total in batches": sum(losses) * STEPS,
            "batches in all": STEPS * len(runs),
        }
    return out


def main() -> None:
    """Measure, print the table, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--fractions", nargs="+", type=float, default=FRACTIONS)
    parser.add_argument("--arrivals", nargs="+", choices=ARRIVALS, default=ARRIVALS)
    parser.add_argument("--visit", nargs=3, type=int, default=VISIT, metavar="STEP")
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    print(HEADER, "|" + " --- |" * (HEADER.count("|") - 1), sep="\n", flush=True)
    results = []
    for name in options.models:
        results.append(
            Bench(name, tuple(options.visit)).result(options.fractions, options.arrivals)
        )
        print(row(results[-1]), flush=True)
        written = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "bound": BOUND,
            "visit": options.visit,
            "summary": summary(results),
            "results": [asdict(result) for result in results],
        }
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    print(json.dumps(summary(results), indent=1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    main()
