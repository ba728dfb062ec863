"""The path that nearly every piece takes: the loss function is known and memory suffices. Forward, backward, next.

What fails here or is not as it was goes to the engine, which runs the rest of the batch with all its questions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from elastic_mbs import guards
from elastic_mbs.losses import takes_seed
from elastic_mbs.recovery import retrying

if TYPE_CHECKING:
    from elastic_mbs.engine import Call


def runs_steadily(call: Call) -> bool:
    """Whether nothing of the pieces to come has to be asked about, learned or measured."""
    parts = call.parts
    watched = parts.commits.listening or parts.guard is not None or guards.attempt_watch is not None
    return call.steady and call.names is None and not watched and not call.plan.probing


def run_steadily(call: Call, step: Callable[[Any], Any]) -> None:
    """Runs pieces until the batch is done, or one is not as it was.

    Args:
        call: a call that `runs_steadily`.
        step: returns the loss of a piece.
    """
    parts, traits, gradients, buffers = call.parts, call.traits, call.gradients, call.parts.buffers
    backward, seeds, repeats, history = torch.autograd.backward, parts.seeds, call.counts.uniform, call.history
    while (piece := call.schedule.next(call.size)) is not None:
        if (micro := call.prepare(piece)) is None:
            return
        call.running = micro
        micro._phase = "forward"
        try:
            loss = step(micro.data)
            if takes_seed(loss) and gradients.stayed() and piece.weights is not None:
                weight = piece.weights[None]
                micro._loss, micro._weighed = loss.detach() * weight, loss  # a value of our own: users add to what they detach from theirs
                seed = seeds.take(loss, weight, repeats=repeats)
                history.touched = True
                micro._phase = "backward"
                backward(loss, seed)
                micro._phase = "commit"
            else:
                call.backward(micro, loss)
        except BaseException as error:
            loss = None
            if call.leave(micro, error):
                return
            raise
        loss = None
        if micro._phase == "commit" and gradients.commits() in traits.commits:
            gradients.advance()
            if buffers.watched:
                traits.changes_buffers = retrying(parts, "compare the buffers with their copies", buffers.end_clean_piece)
            call.committed.add(micro)
            call.running = None
        else:
            call.leave(micro, None)
            return
    call.finish()
