"""What happened in the run, step by step, printed as it goes. The training loop knows nothing of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from elastic_mbs import StepResult
from elastic_mbs.cli.demo.tenant import Move
from elastic_mbs.cli.demo.text import Batch
from elastic_mbs.events import CallDone, Event, format_bytes
from elastic_mbs.memory import Headroom, Reading, Usage

BAR = 24  # characters


class Notes:
    """Takes notes of a run of so many steps, with `budget` bytes for the training and its co-tenant, and prints them."""

    def __init__(self, steps: int, budget: int) -> None:
        self.results: list[StepResult] = []
        self.events: list[Event] = []
        self.moves: list[tuple[float, Move]] = []  # with their times, in unix seconds
        self.seconds_lost = 0.0  # in failed attempts
        self._expected, self._budget = steps, budget
        self._used: int | None = None
        self._limit = budget

    def memory(self, usage: Usage | None, reading: Reading) -> None:
        """Takes what is in use at the end of a forward pass, where it is near its peak."""
        if usage is not None and isinstance(reading, Headroom) and usage.allocated > (self._used or 0):
            self._used, self._limit = usage.allocated, reading.capacity

    def steps_of(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches; a step is over when the next batch is asked for, and its result is there by then."""
        for batch in batches:
            self._used = None
            began = time.perf_counter()
            yield batch
            print(self._line(self.results[-1], batch["tokens"].shape[1], time.perf_counter() - began), flush=True)

    def event(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, CallDone):
            self.seconds_lost += event.seconds_lost
        else:
            print(f"    {event.line()}", flush=True)

    def moved(self, move: Move) -> None:
        self.moves.append((time.time(), move))
        left = f"{format_bytes(move.left)} of {format_bytes(self._budget)}"
        print(f"  * {move.what}, in {move.phase} of micro-batch {move.micro_batch} of step {move.step + 1}: {left} left for us", flush=True)

    def _line(self, result: StepResult, length: int, seconds: float) -> str:
        """`step 12/36  loss 3.5999   0.7 s  micro-batch  8 × 122 tokens  |███████████·▒▒▒▒▒▒▒▒▒▒▒▒| 36.4 MiB of 38.3 MiB`."""
        memory = ""
        if self._used is not None:
            memory = f"{memory_bar(self._used, self._limit, self._budget)} {format_bytes(self._used)} of {format_bytes(self._limit)}"
        return (
            f"step {len(self.results):>{len(str(self._expected))}}/{self._expected}  loss {float(result):.4f}  {seconds:4.1f} s  "
            f"micro-batch {result.micro_batch_size:2} × {length:3} tokens  {memory}"
        )


def memory_bar(used: int, limit: int, budget: int) -> str:
    """Used, free, and taken by others: `|████····▒▒▒▒|`."""
    mine = min(BAR, round(BAR * used / budget))
    others = min(BAR - mine, round(BAR * max(0, budget - limit) / budget))
    return f"|{'█' * mine}{'·' * (BAR - mine - others)}{'▒' * others}|"
