"""The path that nearly every piece takes: the loss function is known and memory suffices. Forward, backward, next.

What fails here or is not as it was goes to the engine, which runs the rest of the batch with all its questions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from elastic_mbs.batch.loss_terms import is_plain
from elastic_mbs.engine import misuse
from elastic_mbs.engine.recovery import retrying
from elastic_mbs.engine.scalar_backward import backward

if TYPE_CHECKING:
    from elastic_mbs.engine.call import Call


def runs_steadily(call: Call) -> bool:
    """Whether nothing of the pieces to come has to be asked about, learned or measured."""
    parts = call.parts
    watched = parts.commits.listening or parts.guard is not None or misuse.attempt_watch is not None
    return call.steady and call.names is None and not watched and not call.plan.probing and torch.is_grad_enabled()


def run_steadily(call: Call, loss_fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Runs pieces until the batch is done, or one is not as it was.

    Args:
        call: a call that `runs_steadily`.
        loss_fn: returns the loss of a piece.
        args: what it gets beside the piece.
        kwargs: the same, by name.
    """
    parts, traits, gradients, buffers = call.parts, call.traits, call.gradients, call.parts.buffers
    history = call.history
    while (piece := call.schedule.next(call.size)) is not None:
        if (micro := call.prepare(piece)) is None:
            return
        call.running = micro
        micro._phase = "forward"
        try:
            loss = loss_fn(micro.data, *args, **kwargs)
            if is_plain(loss) and gradients.stayed() and torch.is_grad_enabled():  # the step may have switched graphs off, after its own
                assert piece.weights is not None  # or it would have been skipped
                weighted = loss * piece.weights[None]
                micro._loss, micro._weighed = weighted.detach(), weighted
                history.touched = True
                micro._phase = "backward"
                backward(weighted)
                micro._phase = "commit"
            else:
                call.backward(micro, loss)
        except BaseException as error:
            loss = weighted = None
            if call.leave(micro, error):
                return
            raise
        loss = weighted = None
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
