"""The two runs: one under a limit that moves, one without any limit."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from elastic_mbs.cli.demo.gpt import GPT, GPTConfig, make_model, token_loss
from elastic_mbs.cli.demo.notes import Notes
from elastic_mbs.cli.demo.run import train, train_plainly
from elastic_mbs.cli.demo.tenant import Move, Script, limited, write_script
from elastic_mbs.cli.demo.text import Batch, Loader, read_documents
from elastic_mbs.errors import UsageError
from elastic_mbs.events import format_bytes
from elastic_mbs.memory import CudaMeter, MemoryBudget, sensor_for

CPU_MODEL = GPTConfig(context=128, width=64, heads=4, layers=3)
CUDA_MODEL = GPTConfig(context=255, width=128, heads=4, layers=4)


class Rounding(NamedTuple):
    """Largest relative difference between the runs that counts as rounding: of the loss in any step, and of the weights at the end."""

    loss: float
    weight: float


# Rounding differs because sums are taken in another order, and training carries it on. Measured over 200 steps and two seeds: up to 5e-15 of the loss
# and 2e-13 of a weight in float64, 5e-6 and 2e-4 in float32. The smallest mistake there can be, one token of one step left out of the weights, makes
# 1e-4 of that step's loss and 2e-5 of a weight. In float64 anything between the two would do; in float32 only the loss tells them apart, and a whole
# lost document (2e-2 and 3e-3) shows in both. Over thousands of steps rounding grows past any limit.
ROUNDING = {torch.float64: Rounding(loss=1e-12, weight=1e-9), torch.float32: Rounding(loss=1e-5, weight=1e-3)}


@dataclass(frozen=True)
class Options:
    """What to run."""

    steps: int
    seed: int  # of the weights and of the choice of text
    budget: int | None  # bytes; None for 30 % of what the whole batch needs
    batch: int  # documents per step
    text: Path | None  # file or folder; None for the standard library
    device: torch.device
    dtype: torch.dtype
    log: Path | None = None  # where the run with elastic_mbs is logged


class Needs(NamedTuple):
    """Bytes that a step needs, optimizer state included."""

    one: int  # with one document at a time
    whole: int  # with the whole batch at once


@dataclass(frozen=True)
class Setting:
    """What both runs start from."""

    options: Options
    model: GPT
    loader: Loader
    needs: Needs
    budget: int


@dataclass(frozen=True)
class Outcome:
    """Both runs."""

    notes: Notes  # of the run with elastic_mbs
    reference: list[float]  # losses of the run without limits
    weight: float  # largest difference of a weight at the end, relative to the largest weight of its tensor
    seconds: float  # of the run with elastic_mbs
    reference_seconds: float
    rounding: Rounding

    @property
    def differences(self) -> list[float]:
        """Relative difference of the loss, by step."""
        return [abs(step.loss - loss) / abs(loss) for step, loss in zip(self.notes.steps, self.reference, strict=True)]

    @property
    def equal(self) -> bool:
        """Whether the runs differ by no more than rounding; false where anything is not a number."""
        return all(difference <= self.rounding.loss for difference in self.differences) and self.weight <= self.rounding.weight

    @property
    def ooms(self) -> int:
        """Out-of-memory errors survived."""
        return sum(step.result.ooms for step in self.notes.steps)


def prepare(options: Options) -> Setting:
    """Reads the text, makes the model, and measures what it needs."""
    config = CUDA_MODEL if options.device.type == "cuda" else CPU_MODEL
    documents = read_documents(options.text, count=options.steps * options.batch, longest=config.context + 1, seed=options.seed)
    loader = Loader(documents, options.batch, options.seed)
    model = make_model(config, seed=options.seed, dtype=options.dtype)
    needs = measure(model, loader.longest(), options.device)
    budget = options.budget if options.budget is not None else max(3 * needs.one, round(0.3 * needs.whole))
    if budget < 3 * needs.one:
        raise UsageError(
            f"a budget of {format_bytes(budget)} is too small for the demo: one document at a time needs {format_bytes(needs.one)}, "
            f"and a co-tenant has to fit in as well; give at least --budget {3 * needs.one}"
        )
    return Setting(options, model, loader, needs, budget)


def measure(model: nn.Module, batch: Batch, device: torch.device) -> Needs:
    """What a step on `batch` needs, by the allocator's account on CUDA, and on a CPU by that of a budget which is never reached."""
    model = copy.deepcopy(model).to(device)
    optimizer_state = 2 * sum(parameter.nbytes for parameter in model.parameters())
    peaks = []
    with MemoryBudget("1000TiB", [model]) as budget:
        meter = CudaMeter(device) if device.type == "cuda" else budget
        for size in (1, len(batch["tokens"])):
            piece = {key: tensor[:size].to(device) for key, tensor in batch.items()}
            token_loss(piece, model).backward()  # so that there are gradients to add to
            torch.cuda.empty_cache()
            meter.reset_peak()
            token_loss(piece, model).backward()
            usage = meter.usage()
            peaks.append(usage.peak_reserved + optimizer_state if usage is not None else 0)
    return Needs(*peaks)


def run_both(setting: Setting, notes: Notes) -> Outcome:
    """Both runs, one after the other, from the same weights and on the same batches."""
    options = setting.options
    model = copy.deepcopy(setting.model).to(options.device)
    moves = write_script(options.steps, setting.budget, floor=round(1.25 * setting.needs.one))
    began = time.perf_counter()
    with limited(setting.budget, options.device) as leave:
        sensor, meter = sensor_for(options.device)

        def make(move: Move) -> None:
            notes.moved(move)
            leave(move.left)

        script = Script(moves, make)
        model.blocks[-1].register_forward_hook(script.forward)
        model.register_forward_hook(lambda *_: notes.memory(meter.usage(), sensor.read()))
        train(model, notes.steps_of(setting.loader, script.begin_step), notes.event, notes.result, options.log)
    between = time.perf_counter()
    twin = copy.deepcopy(setting.model).to(options.device)
    reference: list[float] = []
    train_plainly(twin, ({key: tensor.to(options.device) for key, tensor in batch.items()} for batch in setting.loader), reference.append)
    done = time.perf_counter()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    weight = max(float((mine - other).detach().abs().max() / other.detach().abs().max()) for mine, other in pairs)
    return Outcome(notes, reference, weight, between - began, done - between, ROUNDING[options.dtype])
