"""The second act: one document that does not fit, and cannot be cut, trains all the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice

import torch

from elastic_mbs import Escalated, Event, RecoveryOptions, StepResult
from elastic_mbs.cli.demo.compare import ROUNDING, Options, largest_difference, measure
from elastic_mbs.cli.demo.gpt import GPTConfig, make_model
from elastic_mbs.cli.demo.run import train, train_plainly
from elastic_mbs.cli.demo.tenant import limited
from elastic_mbs.cli.demo.text import Batch, collate, read_documents
from elastic_mbs.events import format_bytes

MODEL = GPTConfig(context=768, width=64, heads=4, layers=6)
STEPS = 3
PART = 0.4  # of the memory that the document needs


@dataclass(frozen=True)
class LongDocument:
    """Both runs on one document at a time."""

    need: int  # bytes of a step in plain PyTorch
    budget: int  # bytes that there were
    losses: list[float]
    reference: list[float]  # losses of the run without limits
    weight: float  # largest difference of a weight at the end, relative to its tensor's largest
    rungs: list[str]  # that were taken, in words
    dtype: torch.dtype

    @property
    def equal(self) -> bool:
        """True if the runs differ by rounding only."""
        allowed = ROUNDING[self.dtype]
        pairs = zip(self.losses, self.reference, strict=True)
        return self.weight <= allowed.weight and all(
            abs(mine - other) <= allowed.loss * abs(other) for mine, other in pairs
        )

    def __str__(self) -> str:
        outcome = "EQUAL within rounding" if self.equal else "DIFFERENT"
        return (
            f"one document         {MODEL.context} tokens, which cannot be cut: needs "
            f"{format_bytes(self.need)}, there were {format_bytes(self.budget)}\n"
            f"taken                {', '.join(self.rungs) or 'nothing'}\n"
            f"{outcome}: a document that does not fit trained the same model."
        )


def run_long_document(options: Options, show: Callable[[str], None]) -> LongDocument:
    """Train on long documents, one at a time, in a part of the memory that one needs.

    Args:
        options: the options of the demo.
        show: prints a line.
    """
    model = make_model(MODEL, seed=options.seed, dtype=options.dtype)
    batches = list(_documents(options))
    need = measure(model, batches[0], options.device)
    budget = round(PART * need)
    twin = copy.deepcopy(model)
    results: list[StepResult] = []
    events: list[Event] = []

    def on_event(event: Event) -> None:
        events.append(event)
        if isinstance(event, Escalated):
            show(f"    {event.line()}")

    recovery = RecoveryOptions(escalate="auto")
    with limited(budget, options.device):
        train(model, batches, on_event, results.append, recovery=recovery)
    reference: list[float] = []
    train_plainly(twin, batches, reference.append)
    taken = [event for event in events if isinstance(event, Escalated)]
    steps = {event.by: f"{event.by} {f'({event.part})' if event.part else ''}" for event in taken}
    return LongDocument(
        need,
        budget,
        list(map(float, results)),
        reference,
        largest_difference(model, twin),
        [step.rstrip() for step in steps.values()],
        options.dtype,
    )


def _documents(options: Options) -> Iterator[Batch]:
    """Yield batches of one document, each as long as the model can read."""
    found = read_documents(options.text, count=64, longest=MODEL.context + 1, seed=options.seed)
    text = b"\n\n".join(found)
    length = MODEL.context + 1
    every = bytes(islice(cycle(text), STEPS * length))
    for start in range(0, len(every), length):
        yield collate([every[start : start + length]])
