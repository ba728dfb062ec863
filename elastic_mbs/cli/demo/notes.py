"""What happened in the run, step by step, printed as it goes. The training loop knows nothing of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from elastic_mbs import StepResult
from elastic_mbs.cli.demo.tenant import TenantMove
from elastic_mbs.cli.demo.text import Batch
from elastic_mbs.events import CallDone, Event, format_bytes


class Notes:
    """Takes notes of a run of so many steps, with `budget` bytes for the training and its co-tenant, and prints them."""

    def __init__(self, steps: int, budget: int) -> None:
        self.results: list[StepResult] = []
        self.events: list[Event] = []
        self.moves: list[tuple[float, TenantMove]] = []  # with their times, in unix seconds
        self._expected, self._budget = steps, budget

    def steps_of(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches; a step is over when the next batch is asked for, and its result is there by then."""
        for batch in batches:
            began = time.perf_counter()
            yield batch
            result, took = self.results[-1], time.perf_counter() - began
            pieces = f"micro-batch {result.micro_batch_size:2} × {batch['tokens'].shape[1]:3} tokens"
            print(f"step {len(self.results):2}/{self._expected}  loss {float(result):.4f}  {took:4.1f} s  {pieces}", flush=True)

    def event(self, event: Event) -> None:
        self.events.append(event)
        if not isinstance(event, CallDone):
            print(f"    {event.line()}", flush=True)

    def moved(self, move: TenantMove) -> None:
        self.moves.append((time.time(), move))
        left = f"{format_bytes(move.left)} of {format_bytes(self._budget)}"
        print(f"  * {move.what}, in {move.phase} of micro-batch {move.micro_batch} of step {move.step + 1}: {left} left for us", flush=True)
