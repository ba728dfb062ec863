"""What a child process does: carries out one order, or only measures, and tells of it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..worlds import Emit, ShimWorld, World, open_world
from .meeting import Meeting
from .order import Order
from .session import needs_of, run


def open_for(order: Order) -> World:
    """The world of an order. Of two processes on one device, neither moves its limit."""
    together = order.meeting is not None if order.kind == "cuda" else order.kind == "shim" and order.needs is not None
    options: dict[str, Any] = {"shared": True} if together else {}
    return open_world(order.kind, **options)


TOGETHER = 60.0
"""Seconds that the first of two waits for the other one to have started, so that they train at the same time."""


def _meet(world: ShimWorld) -> None:
    """Waits until both processes are on the device; training alone would show nothing."""
    until = time.monotonic() + TOGETHER
    here = torch.zeros(2**13, dtype=torch.float64)  # a block that counts is what makes a process known
    while len(world.fence.slots()) < 2 and time.monotonic() < until:
        time.sleep(0.005)
    del here


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
    meeting = None if order.meeting is None else Meeting(Path(order.meeting))
    if meeting is not None:
        order = _begin(emit, order, meeting)
    world = open_for(order)
    if isinstance(world, ShimWorld) and order.needs is not None:
        _meet(world)

    def wait() -> None:
        """Where two share a limit, neither compares before both have trained: references are not made for it."""
        if meeting is not None:
            emit({"trained": order.process})
            meeting.wait("compare")
        elif isinstance(world, ShimWorld) and order.needs is not None:
            limit = world.fence.budget  # before the parent can have heard
            emit({"trained": order.process})
            while world.fence.budget == limit:
                time.sleep(0.05)

    emit({"run": run(order, world, lambda step: emit({"step": step.to_json()}), wait).to_json()})


def measure(emit: Emit, **arguments: Any) -> None:
    """Emits `{"needs": …}`."""
    torch.set_num_threads(1)
    order = Order.from_json(arguments)
    with open_for(order) as world:
        emit({"needs": needs_of(order, world).to_json()})
