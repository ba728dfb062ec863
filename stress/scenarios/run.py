"""An order carried out in this process.

Measures, trains under the script, and compares with a run without limits.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from elastic_mbs.errors import UsageError
from elastic_mbs.events import format_bytes

from ..limits import ON_GPU, in_child, open_limit, switch_onednn_off
from ..models.factory import make
from ..models.subject import Subject, one_line
from ..record import Needs, Run, Step
from .catalogue import Order
from .measure import longest_batch, measure
from .reference import Curve, compare
from .scripts import Room, margin_of
from .train import Session

Tell = Callable[[Step], object]
Meet = Callable[[str, Any], int | None]
"""Function of a moment's name and the facts known then.

Returns when both processes have reached it, with the device's size.
"""

_known: dict[tuple[object, ...], Needs] = {}  # measured in this process


def run(order: Order, tell: Tell, meet: Meet = lambda moment, known: None) -> Run:
    """Carry an order out.

    Raises a UsageError where the model cannot be trained like this, or the budget is below its
    need.
    """
    began = time.perf_counter()
    # Of two processes on one device, neither moves its limit.
    with open_limit(
        order.kind,
        **(
            {"shared": True}
            if order.entry.together and (order.kind == "shim" or order.kind in ON_GPU)
            else {}
        ),
    ) as memory:
        key = (order.kind, order.model, order.seed, order.device, order.steps)
        if key not in _known:
            _known[key] = measure(memory, make(order.model, order.seed, memory.device), order.steps)
        session = Session(order, memory, room_of(order, _known[key]))
        gc.collect()  # the objects of the measurement are gone
        record = session.record
        curve = session.curve
        largest = largest_block(order, _known[key], session.subject)
        size = meet("made", (record.needs, memory.reserved()))
        if size is not None:
            memory.share(size)
        if largest is not None:
            memory.fragment(largest)
        try:
            curve = session.train(tell)
        except (Exception, SystemExit) as error:  # training promises no others
            record.complaints.append(unexpected(error))
        del session
        record.expandable = memory.expandable()
    meet("trained", None)
    if record.end is not None:
        if in_child(order.kind):  # this process ends here, so nothing has to switch it on again
            # As while it trained: other kernels round otherwise, and in float32 that adds up.
            switch_onednn_off()
        _compare(order, curve, record)
    record.seconds = time.perf_counter() - began
    return record


def room_of(order: Order, needs: Needs) -> Room:
    """Return a share in bytes.

    Raises a UsageError where the budget is below the smallest micro-batch's need.
    """
    unit = float(needs.samples)
    margin = margin_of(order.kind)
    if order.budget is not None:
        unit = float(needs.fits(order.budget * (1 - margin)))
        if unit < needs.sizes[0]:
            raise UsageError(
                f"--budget: {format_bytes(order.budget)} are below the model: its smallest "
                f"micro-batch ({needs.sizes[0]}) takes "
                f"{format_bytes(needs.one)}, and {margin:.0%} stay free; give at least "
                f"{round(needs.one / (1 - margin)) + 1}"
            )
    return Room(needs, unit, copies=2 if order.entry.together else 1, margin=margin)


def largest_block(order: Order, needs: Needs, subject: Subject) -> int | None:
    """Return the bytes of the largest block where memory is fragmented.

    It is a share of the activations; no parameter, and no part of a batch on the device, is larger.
    """
    if order.entry.largest is None:
        return None
    batch = longest_batch(subject, order.steps).batch if in_child(order.kind) else ()
    whole = [
        leaf.nbytes
        for leaf in tree_leaves([*subject.model.parameters(), batch])
        if isinstance(leaf, torch.Tensor)
    ]
    return max(*whole, round(order.entry.largest * (needs.whole - needs.rest)))


def unexpected(error: BaseException) -> str:
    """Return a complaint about an error that is not promised, with the place that raised it."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"unexpected error: {one_line(error)} ({Path(where.filename).name}:{where.lineno})"


def _compare(order: Order, curve: Curve, record: Run) -> None:
    """Note the differences on the record, and the user's way out.

    The way out is for differences that random numbers do not explain.
    """
    try:
        record.differences = compare(order, curve, [step.partition for step in record.steps])
    except (Exception, SystemExit) as error:
        record.complaints.append(
            f"the run without limits, which it is compared with, has failed: {one_line(error)}"
        )
        return
