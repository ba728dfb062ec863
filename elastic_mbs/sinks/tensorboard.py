"""The sink for TensorBoard."""

from __future__ import annotations

from typing import Any

from elastic_mbs.error_bases import UsageError
from elastic_mbs.events import CallDone, Event, GuardedSink


class TensorBoard(GuardedSink):
    """A sink that writes scalars and texts to a TensorBoard writer.

    The step of each is the number of training calls that the runtime has finished.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`, or anything with its `add_scalar`,
            `add_text` and `flush`. It is not closed.

    Raises:
        UsageError: the writer has no such methods.
    """

    def __init__(self, writer: Any) -> None:
        super().__init__()
        methods = ("add_scalar", "add_text", "flush")
        if not all(callable(getattr(writer, method, None)) for method in methods):
            raise UsageError(
                f"TensorBoard({writer!r}): it has no add_scalar, add_text and flush; give a "
                "torch.utils.tensorboard.SummaryWriter"
            )
        self._writer = writer
        self._steps: dict[str, int] = {}  # training calls finished, by the runtime's name

    def __repr__(self) -> str:
        return f"TensorBoard({type(self._writer).__name__})"

    def _take(self, event: Event) -> None:
        name = event.name
        step = self._steps.get(name, 0)
        if not isinstance(event, CallDone):
            self._writer.add_text(f"{name}/events", event.line(), step)
            return
        if event.mode == "train":
            self._steps[name] = step + 1
        scalars: dict[str, float | None] = {
            "loss": event.loss,
            "micro_batch_size": event.micro_batch_size,
            "samples_per_second": event.rate,
            "out_of_memory": event.ooms,
            "seconds_lost": event.seconds_lost,
            "memory/allocated": event.allocated,
            "memory/reserved": event.reserved,
            "memory/peak": event.peak_reserved,
            "memory/free": event.free,
            "memory/held_by_others": event.held_by_others,
        }
        prefix = name if event.mode == "train" else f"{name}/{event.mode}"
        for tag, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(f"{prefix}/{tag}", value, step)

    def _end(self) -> None:
        self._writer.flush()
