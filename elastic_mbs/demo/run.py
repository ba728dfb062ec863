"""The two runs that the demo compares: `train` with elastic_mbs under a limit that moves, `train_plainly` without either.

`train` is all there is to using the library.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from elastic_mbs import ElasticMBS, Event, MemoryBudget, Policy, StepResult, UsageError, count_tokens
from elastic_mbs.demo.gpt import GPT, GPTConfig, make_model, token_loss
from elastic_mbs.demo.record import Record, Step
from elastic_mbs.demo.tenant import BudgetTenant, Tenant, write_script
from elastic_mbs.demo.text import Batch, make_batches
from elastic_mbs.events import format_bytes
from elastic_mbs.memory import sensor_for

POLICY = Policy(patience=2, cooldown=1.0, min_gain=0.0)
"""Less patient than the default (4 calls, 5 s, 0.5 % of time), because the whole demo takes a minute and growth is to be seen in it."""

TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-3}
"""Largest relative difference between the runs that counts as rounding."""

CPU_MODEL = GPTConfig(context=160, width=64, heads=4, layers=3)
CUDA_MODEL = GPTConfig(context=255, width=128, heads=4, layers=4)


def train(model: nn.Module, batches: Iterable[Batch], on_event: Callable[[Event], None], on_result: Callable[[StepResult], None]) -> None:
    """Trains with elastic_mbs: each batch as large as it is wanted, in whatever memory there is."""
    optimizer = make_optimizer(model)
    with ElasticMBS(model, count=count_tokens("labels"), policy=POLICY, monitor_interval=0.02, on_event=on_event) as mbs:
        for batch in batches:
            result = mbs.backward(token_loss, batch, model)  # was: loss = token_loss(batch, model); loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            on_result(result)


def train_plainly(model: nn.Module, batches: Iterable[Batch], on_loss: Callable[[float], None]) -> None:
    """The same in plain PyTorch: the whole batch at once, in as much memory as it takes."""
    optimizer = make_optimizer(model)
    for batch in batches:
        loss = token_loss(batch, model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        on_loss(loss.item())


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW; fused, so that a step takes no memory of its own."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        steps: optimizer steps.
        seed: of the weights and of the choice of text.
        budget: bytes, or None for 30 % of what the whole batch needs.
        batch: documents per step.
        text: file or folder, or None for the standard library.
        device: where to train.
        dtype: float64 or float32.
    """

    steps: int
    seed: int
    budget: int | None
    batch: int
    text: Path | None
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True)
class Needs:
    """Bytes that a step needs, optimizer state included.

    Attributes:
        one: with one document at a time.
        whole: with the whole batch at once.
    """

    one: int
    whole: int


@dataclass(frozen=True)
class Setting:
    """What both runs start from."""

    options: Options
    model: GPT
    batches: Sequence[Batch]
    needs: Needs
    budget: int


@dataclass(frozen=True)
class Outcome:
    """Both runs.

    Attributes:
        steps: the run with elastic_mbs, step by step.
        record: its notes.
        reference: losses of the run without limits.
        weights: largest difference of a weight at the end, relative to the largest weight of its tensor.
        seconds: time of the run with elastic_mbs.
        reference_seconds: time of the other.
        tolerance: largest relative difference that counts as rounding.
    """

    record: Record
    reference: list[float]
    weights: float
    seconds: float
    reference_seconds: float
    tolerance: float

    @property
    def steps(self) -> list[Step]:
        """The run with elastic_mbs, step by step."""
        return self.record.steps

    @property
    def differences(self) -> list[float]:
        """Relative difference of the loss, by step."""
        return [abs(step.loss - loss) / abs(loss) for step, loss in zip(self.steps, self.reference, strict=True)]

    @property
    def equal(self) -> bool:
        """Whether the runs differ by no more than rounding; false where anything is not a number."""
        return all(difference <= self.tolerance for difference in (*self.differences, self.weights))

    @property
    def ooms(self) -> int:
        """Out-of-memory errors survived."""
        return sum(step.result.ooms for step in self.steps if step.result is not None)


def prepare(options: Options) -> Setting:
    """Reads the text, makes the model, and sees what it needs.

    Raises:
        UsageError: the text cannot be used, or the budget leaves no room for one document.
    """
    config = CUDA_MODEL if options.device.type == "cuda" else CPU_MODEL
    batches = make_batches(options.text, steps=options.steps, batch=options.batch, longest=config.context + 1, seed=options.seed)
    model = make_model(config, seed=options.seed, dtype=options.dtype, device=options.device)
    longest = max(batches, key=lambda batch: batch["tokens"].shape[1])
    needs = Needs(measure(model, {key: tensor[:1] for key, tensor in longest.items()}), measure(model, longest))
    budget = options.budget if options.budget is not None else max(3 * needs.one, round(0.3 * needs.whole))
    if budget < 3 * needs.one:
        raise UsageError(
            f"a budget of {format_bytes(budget)} is too small for the demo: one document at a time needs {format_bytes(needs.one)}, and a co-tenant has to fit in as well; "
            f"give at least --budget {3 * needs.one}"
        )
    return Setting(options, model, batches, needs, budget)


def measure(model: nn.Module, batch: Batch) -> int:
    """Peak bytes of a step on `batch`: a budget that is never reached does the counting."""
    model = copy.deepcopy(model)
    device = next(model.parameters()).device
    with MemoryBudget("1000TiB", model, device=device) as meter:
        before = meter.live
        token_loss({key: tensor.to(device) for key, tensor in batch.items()}, model).backward()
        return meter.peak + 2 * before  # AdamW keeps two tensors for each parameter


def run(setting: Setting, *, on_step: Callable[[Step], object], on_event: Callable[[Event], object]) -> Outcome:
    """Both runs, one after the other, from the same weights and on the same batches."""
    options, budget = setting.options, setting.budget
    model, twin = copy.deepcopy(setting.model), copy.deepcopy(setting.model)
    began = time.perf_counter()
    with open_tenant(setting, model) as tenant, Record(model, *sensor_for(options.device), on_step=on_step, on_event=on_event) as record:
        train(model, record.steps_of(setting.batches, tenant.begin_step), record.note, record.result)
    between = time.perf_counter()
    reference: list[float] = []
    train_plainly(twin, ({key: tensor.to(options.device) for key, tensor in batch.items()} for batch in setting.batches), reference.append)
    done = time.perf_counter()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    weights = max(float((mine - other).detach().abs().max() / other.detach().abs().max()) for mine, other in pairs)
    return Outcome(record, reference, weights, between - began, done - between, TOLERANCES[options.dtype])


def open_tenant(setting: Setting, model: GPT) -> Tenant:
    """The co-tenant for the device."""
    script = write_script(setting.options.steps, setting.budget, floor=round(1.25 * setting.needs.one))
    if setting.options.device.type == "cuda":  # cuda-only
        from elastic_mbs.demo.cuda_tenant import CudaTenant

        return CudaTenant(setting.budget, script, model.blocks[-1], setting.options.device)
    return BudgetTenant(setting.budget, script, model.blocks[-1])
