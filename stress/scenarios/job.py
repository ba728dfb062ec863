"""What a child process does: carries out one order, or only measures, and tells of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..limits import Emit, MemoryLimit, open_limit
from ..record import Step
from .meeting import Meeting
from .order import Order
from .session import needs_of, run

SOONER = 10.0
"""Seconds by which a process gives up waiting for another before it is taken for hung itself."""


def open_for(order: Order) -> MemoryLimit:
    """The world of an order. Of two processes on one device, neither moves its limit."""
    options: dict[str, Any] = {"shared": True} if order.meeting is not None and order.kind in {"shim", "cuda"} else {}
    return open_limit(order.kind, **options)


def _begin(emit: Emit, order: Order, meeting: Meeting) -> Order:
    """Measures, which also brings all that libraries keep for good onto the device, and waits until the room for both has its size."""
    with open_for(order) as world:
        needs = needs_of(order, world).to_json()
    emit({"needs": needs, "process": order.process})
    meeting.wait("begin")
    return replace(order, needs=needs)


def main(emit: Emit, **arguments: Any) -> None:
    """Carries out an order: emits `{"step": …}` after each step and `{"run": …}` at the end."""
    torch.set_num_threads(1)
    order = Order.from_json(arguments)
    meeting = None if order.meeting is None else Meeting(Path(order.meeting), order.deadline - SOONER)
    knows = order.needs is not None
    if meeting is not None and order.needs is None:
        order = _begin(emit, order, meeting)

    def tell(step: Step) -> None:
        emit({"step": step.to_json()})
        if meeting is not None and step.step == 0:  # one that is through before the other has begun would show nothing
            meeting.say(f"{order.process} trains")
            meeting.wait(f"{1 - order.process} trains")

    def wait() -> None:
        """Where two share a limit, neither compares before both have trained: references are not made for it."""
        if meeting is not None:
            emit({"trained": order.process})
            meeting.wait("compare")

    def opened() -> None:
        """Where both know what they need, the room for both gets its size when both models are there."""
        if knows and meeting is not None:
            emit({"opened": order.process})
            meeting.wait("begin")

    emit({"run": run(order, open_for(order), tell, wait, opened).to_json()})


def measure(emit: Emit, **arguments: Any) -> None:
    """Emits `{"needs": …}`."""
    torch.set_num_threads(1)
    order = Order.from_json(arguments)
    with open_for(order) as world:
        emit({"needs": needs_of(order, world).to_json()})
