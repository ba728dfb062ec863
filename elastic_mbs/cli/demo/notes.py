"""What happened in the run, step by step, printed as it goes. The training loop knows nothing of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from elastic_mbs import StepResult
from elastic_mbs.cli.demo.tenant import Move
from elastic_mbs.cli.demo.text import Batch
from elastic_mbs.events import CallDone, Event, format_bytes
from elastic_mbs.memory import Headroom, Reading, Usage

BAR = 24  # characters


@dataclass(frozen=True)
class Step:
    """One step of training."""

    length: int  # tokens of the batch's longest document
    loss: float
    seconds: float
    result: StepResult


class Notes:
    """Takes notes of a run of so many steps, with `budget` bytes for the training and its co-tenant, and prints them."""

    def __init__(self, steps: int, budget: int) -> None:
        self.steps: list[Step] = []
        self.events: list[Event] = []
        self.moves: list[tuple[float, Move]] = []  # with their times, in unix seconds
        self.seconds_lost = 0.0  # in failed attempts
        self._expected, self._budget = steps, budget
        self._results: list[StepResult] = []
        self._used: int | None = None
        self._limit = budget

    def memory(self, usage: Usage | None, reading: Reading) -> None:
        """Takes what is in use at the end of a forward pass, where it is near its peak."""
        if usage is not None and isinstance(reading, Headroom) and usage.allocated > (self._used or 0):
            self._used, self._limit = usage.allocated, reading.capacity

    def steps_of(self, batches: Iterable[Batch], begin: Callable[[int], object]) -> Iterator[Batch]:
        """The batches; `begin` gets each step's number before its batch is used, and a step is over when the next batch is asked for."""
        for number, batch in enumerate(batches):
            begin(number)
            self._used = None
            began = time.perf_counter()
            yield batch
            result = self._results.pop()
            self.steps.append(Step(batch["tokens"].shape[1], float(result), time.perf_counter() - began, result))
            print(self._line(self.steps[-1]), flush=True)

    def result(self, result: StepResult) -> None:
        self._results.append(result)

    def event(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, CallDone):
            self.seconds_lost += event.seconds_lost
        else:
            print(f"    {event.line()}", flush=True)

    def moved(self, move: Move) -> None:
        """The co-tenant is about to move."""
        self.moves.append((time.time(), move))
        left = f"{format_bytes(move.left)} of {format_bytes(self._budget)}"
        print(f"  * {move.what}, in {move.phase} of micro-batch {move.micro_batch} of step {move.step + 1}: {left} left for us", flush=True)

    def _line(self, step: Step) -> str:
        """`step 12/36  loss 3.5999   0.7 s  micro-batch  8 × 122 tokens  |███████████·▒▒▒▒▒▒▒▒▒▒▒▒| 36.4 MiB of 38.3 MiB`."""
        memory = ""
        if self._used is not None:
            memory = f"{memory_bar(self._used, self._limit, self._budget)} {format_bytes(self._used)} of {format_bytes(self._limit)}"
        return (
            f"step {len(self.steps):>{len(str(self._expected))}}/{self._expected}  loss {step.loss:.4f}  {step.seconds:4.1f} s  "
            f"micro-batch {step.result.micro_batch_size:2} × {step.length:3} tokens  {memory}"
        )


def memory_bar(used: int, limit: int, budget: int) -> str:
    """Used, free, and taken by others: `|████····▒▒▒▒|`."""
    mine = min(BAR, round(BAR * used / budget))
    others = min(BAR - mine, round(BAR * max(0, budget - limit) / budget))
    return f"|{'█' * mine}{'·' * (BAR - mine - others)}{'▒' * others}|"
