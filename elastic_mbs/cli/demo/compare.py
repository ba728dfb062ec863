"""The two runs: one under a limit that moves, one without any limit."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from elastic_mbs import StepResult
from elastic_mbs.cli.demo.gpt import GPT, GPTConfig, make_model, token_loss
from elastic_mbs.cli.demo.run import train, train_plainly
from elastic_mbs.cli.demo.tenant import Script, TenantMove, limited, write_script
from elastic_mbs.cli.demo.text import Batch, Loader, read_documents
from elastic_mbs.errors import UsageError
from elastic_mbs.events import CallDone, Event, format_bytes
from elastic_mbs.memory import DeviceMeter, MemoryBudget

CPU_MODEL = GPTConfig(context=128, width=64, heads=4, layers=3)
CUDA_MODEL = GPTConfig(context=255, width=128, heads=4, layers=4)


class Rounding(NamedTuple):
    """Largest relative differences of the losses and the final weights that count as rounding."""

    loss: float
    weight: float


# Rounding differs because sums are taken in another order. Measured over 200 steps and two seeds:
# up to 5e-15 of the loss and 2e-13 of a weight in float64, 5e-6 and 2e-4 in float32. The smallest
# mistake, one token of one step left out of the weights, makes 1e-4 of that step's loss and 2e-5 of
# a weight; a whole lost document 2e-2 and 3e-3. Over thousands of steps rounding grows past any
# limit.
ROUNDING = {
    torch.float64: Rounding(loss=1e-12, weight=1e-9),
    torch.float32: Rounding(loss=1e-5, weight=1e-3),
}


@dataclass(frozen=True)
class Options:
    """Options of the demo."""

    steps: int
    seed: int  # of the weights and of the choice of text
    budget: int | None  # bytes; None for 30 % of what the whole batch needs
    batch: int  # documents per step
    text: Path | None  # file or folder; None for the standard library
    device: torch.device
    dtype: torch.dtype
    log: Path | None = None  # where the run with elastic_mbs is logged


@dataclass(frozen=True)
class Setting:
    """Start of both runs: model, documents, needs, device."""

    options: Options
    model: GPT
    loader: Loader
    one: int  # bytes that a step needs with one document at a time, optimizer state included
    whole: int  # the same with the whole batch at once
    budget: int


class Notes:
    """Record of a run of `steps` steps that is printed as it grows.

    The run and its co-tenant have `budget` bytes together.
    """

    def __init__(self, steps: int, budget: int) -> None:
        self.results: list[StepResult] = []
        self.events: list[Event] = []
        self.moves: list[tuple[float, TenantMove]] = []  # with their times, in unix seconds
        self._expected, self._budget = steps, budget

    def steps_of(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches; a step is over when the next batch is asked for."""
        for batch in batches:
            began = time.perf_counter()
            yield batch
            result, took = self.results[-1], time.perf_counter() - began
            pieces = (
                f"micro-batch {result.micro_batch_size:2} × {batch['tokens'].shape[1]:3} tokens"
            )
            print(
                f"step {len(self.results):2}/{self._expected}  loss {float(result):.4f}  "
                f"{took:4.1f} s  {pieces}",
                flush=True,
            )

    def event(self, event: Event) -> None:
        self.events.append(event)
        if not isinstance(event, CallDone):
            print(f"    {event.line()}", flush=True)

    def moved(self, move: TenantMove) -> None:
        self.moves.append((time.time(), move))
        left = f"{format_bytes(move.left)} of {format_bytes(self._budget)}"
        print(
            f"  * {move.what}, in {move.phase} of micro-batch {move.micro_batch} of step "
            f"{move.step + 1}: {left} left for us",
            flush=True,
        )


@dataclass(frozen=True)
class Outcome:
    """Both runs."""

    notes: Notes  # of the run with elastic_mbs
    reference: list[float]  # losses of the run without limits
    # largest difference of a weight at the end, relative to the largest weight of its tensor
    weight: float
    seconds: float  # of the run with elastic_mbs
    reference_seconds: float
    rounding: Rounding

    @property
    def differences(self) -> list[float]:
        """Relative difference of the loss, by step."""
        return [
            abs(float(result) - loss) / abs(loss)
            for result, loss in zip(self.notes.results, self.reference, strict=True)
        ]

    @property
    def equal(self) -> bool:
        """True if the runs differ by rounding only; False where a figure is not a number."""
        return (
            all(difference <= self.rounding.loss for difference in self.differences)
            and self.weight <= self.rounding.weight
        )

    @property
    def ooms(self) -> int:
        """Out-of-memory errors survived."""
        return sum(result.ooms for result in self.notes.results)


def prepare(options: Options) -> Setting:
    """Read the text, make the model, and measure its needs."""
    config = CUDA_MODEL if options.device.type == "cuda" else CPU_MODEL
    documents = read_documents(
        options.text,
        count=options.steps * options.batch,
        longest=config.context + 1,
        seed=options.seed,
    )
    loader = Loader(documents, options.batch, options.seed)
    model = make_model(config, seed=options.seed, dtype=options.dtype)
    one, whole = (
        measure(model, batch, options.device)
        for batch in (loader.longest(1), loader.longest(options.batch))
    )
    budget = options.budget if options.budget is not None else max(3 * one, round(0.3 * whole))
    if budget < 3 * one:
        raise UsageError(
            f"a budget of {format_bytes(budget)} is too small for the demo: one document at a "
            f"time needs {format_bytes(one)}, "
            f"and a co-tenant has to fit in as well; give at least --budget {3 * one}"
        )
    return Setting(options, model, loader, one, whole, budget)


def measure(model: nn.Module, batch: Batch, device: torch.device) -> int:
    """Return the bytes that a step on `batch` needs.

    The allocator counts them on CUDA, a budget that is never reached on a CPU.
    """
    model = copy.deepcopy(model).to(device)
    batch = {key: tensor.to(device) for key, tensor in batch.items()}
    with MemoryBudget("1000TiB", [model]) as budget:
        meter = DeviceMeter(device) if device.type == "cuda" else budget
        for _ in range(2):  # the second time there are gradients to add to
            torch.cuda.empty_cache()
            meter.reset_peak()
            token_loss(batch, model).backward()
        usage = meter.usage()
    assert usage is not None
    # with the optimizer's state
    return usage.peak_reserved + 2 * sum(parameter.nbytes for parameter in model.parameters())


def run_both(setting: Setting, notes: Notes) -> Outcome:
    """Run both, one after the other, from the same weights and on the same batches."""
    options = setting.options
    model = copy.deepcopy(setting.model).to(options.device)
    moves = write_script(options.steps, setting.budget, floor=round(1.25 * setting.one))
    began = time.perf_counter()
    with limited(setting.budget, options.device) as leave:

        def make(move: TenantMove) -> None:
            notes.moved(move)
            leave(move.left)

        script = Script(moves, lambda: len(notes.results), make)
        model.blocks[-1].register_forward_hook(script.forward)
        train(model, notes.steps_of(setting.loader), notes.event, notes.results.append, options.log)
    between = time.perf_counter()
    twin = copy.deepcopy(setting.model).to(options.device)
    reference: list[float] = []
    train_plainly(
        twin,
        (
            {key: tensor.to(options.device) for key, tensor in batch.items()}
            for batch in setting.loader
        ),
        reference.append,
    )
    done = time.perf_counter()
    weight = largest_difference(model, twin)
    return Outcome(
        notes, reference, weight, between - began, done - between, ROUNDING[options.dtype]
    )


def largest_difference(model: nn.Module, other: nn.Module) -> float:
    """Return the largest difference of a weight, relative to the largest of its tensor."""
    return max(
        float((mine - its).detach().abs().max() / its.detach().abs().max())
        for mine, its in zip(model.parameters(), other.parameters(), strict=True)
    )
