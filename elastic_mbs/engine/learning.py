"""Finding out, on the path without failures: what a loss function's graph reaches, what its backward does, and what a call cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from elastic_mbs.controller.controller import Observation
from elastic_mbs.engine.micro_batch import MicroBatch
from elastic_mbs.engine.recovery import streams_moved
from elastic_mbs.events import Resized
from elastic_mbs.rollback.graph import has_foreign_hook, walk

if TYPE_CHECKING:
    from elastic_mbs.engine.call import Call


def take_census(call: Call, micro: MicroBatch) -> None:
    """Walks the graph: once per loss function, once a call where it reaches leaves outside the model, and always after a failure."""
    traits = call.traits
    if traits.walked and (call.walked or not traits.guests) and not call.history.failures:
        return
    root = micro._root
    assert root is not None
    census = walk(root)
    meet_leaves(call, census.leaves)
    traits.normalises_batch = traits.normalises_batch or census.normalises_batch or call.parts.inventory.normalises_batch()
    traits.walked = call.walked = True
    micro._leaves, micro._custom = census.leaves, census.custom


def meet_leaves(call: Call, leaves: tuple[torch.Tensor, ...]) -> None:
    """Watches leaves that are not the model's, before anything of this backward has committed to them."""
    guests = call.parts.commits.watch_guests(leaves)
    call.history.check_guests(guests)
    call.filled.update(id(leaf) for leaf in guests if leaf.grad is not None)
    call.traits.guests = call.traits.guests or bool(guests)


def meet_inner_leaves(call: Call, leaves: tuple[torch.Tensor, ...]) -> None:
    """The same for leaves of a backward inside a backward, which the census cannot reach."""
    before = {id(leaf) for leaf in call.parts.commits.leaves()}
    meet_leaves(call, leaves)
    call.traits.hidden = True
    if call.isolation is not None:
        call.isolation.set_aside(leaf for leaf in leaves if id(leaf) not in before)


def learn(call: Call, micro: MicroBatch, committed: Sequence[torch.Tensor]) -> None:
    """Compares what a clean backward has committed to with the census: the first one, and each with a number of commits not seen before."""
    parts, traits = call.parts, call.traits
    root = micro._root
    assert root is not None
    assert call.stream_start is not None
    if micro._leaves is None:
        census = walk(root)
        micro._leaves, micro._custom = census.leaves, census.custom
    reached = {id(leaf) for leaf in micro._leaves}
    traits.custom |= micro._custom
    marks = [id(leaf) for leaf in committed]
    traits.hidden = traits.hidden or len(set(marks)) < len(marks) or not reached.issuperset(marks)
    traits.draws = traits.draws or streams_moved(parts, call.stream_start)
    traits.commits.add(len(marks))
    for leaf in committed:
        if has_foreign_hook(leaf):
            parts.log.warn_once(
                parts.settings.name,
                "tensor-hook",
                f"{parts.inventory.name_of(leaf)} has a hook on its gradient, which runs once per micro-batch: it must be linear (no clamp, no norm) "
                "for the gradient to be the whole batch's",
            )


def look_at_batch(call: Call) -> None:
    """Notices a `loss_fn` that edits its samples in place. After a piece while it is new, and at a call's end from then on."""
    if not call.traits.edits_batch and call.view.versions() != call.versions:
        call.traits.edits_batch = call.history.edited = True


def look_at_streams(call: Call) -> None:
    """Learns whether the step draws random numbers, and whether it draws them on the host."""
    streams, traits = call.parts.streams, call.traits
    if call.stream_start is not None and not (traits.draws and streams.draws_on_host):
        traits.draws = streams_moved(call.parts, call.stream_start) or traits.draws


def held_beside(call: Call) -> int | None:
    """Bytes that are in use when a call begins, without gradients: those are in its peak, whether they were there or are made in it."""
    usage = call.parts.meter.usage()
    if usage is None:
        return None
    grads = (leaf.grad for leaf in call.parts.inventory.leaves if id(leaf) in call.filled)
    return usage.allocated - sum(grad.nbytes for grad in grads if grad is not None and grad.layout is torch.strided)


def tell_controller(call: Call, pieces: int) -> None:
    """Tells the controller how the call went, and everybody when it moves."""
    parts = call.parts
    # Once a size is learned, only an allocator that can thrash has something to tell.
    usage = parts.meter.usage() if call.plan.learning or parts.devices[0].type != "cpu" else None
    # A peak counts when it belongs to this call alone: somebody else may have reset the process's statistics meanwhile.
    peak = usage.peak_allocated if usage and call.plan.learning and parts.meter.resets == call.resets else None
    seen = Observation(
        size=call.size,
        epoch=call.plan.epoch,
        samples=call.view.length,
        elements=call.view.elements,
        pieces=pieces,
        peak=peak,
        fragmentation=usage.fragmentation if usage else 1.0,
        seconds=None if call.plan.probing else parts.stopwatch.seconds(),
        retries=parts.new_retries(usage.retries if usage else 0),
        ooms=call.history.failures,
        least_fragmentation=usage.least_fragmentation if usage else None,
    )
    for (key, earlier), seconds in parts.stopwatch.finished():
        parts.controller.timed(key, earlier._replace(seconds=seconds))
    if seen.seconds is None and not call.plan.probing:
        parts.stopwatch.later((call.key, seen))
    capacity = parts.capacity()
    move = parts.controller.end(call.key, seen, capacity)
    if move is not None:
        available = None if capacity is None else capacity.bytes
        parts.log.emit(Resized(parts.settings.name, move.before, move.after, move.reason, str(call.key), available))
