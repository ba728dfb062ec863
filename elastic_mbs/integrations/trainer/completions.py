"""The loss of a batch of completions that a trainer has generated, run in pieces.

Each piece is weighed here: its loss is a mean or a sum, and that of a router is neither.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.integrations.trainer.router import Router
from elastic_mbs.integrations.trl import private
from elastic_mbs.integrations.trl.metrics import BatchMetrics, Note
from elastic_mbs.integrations.trl.rollouts import Completions
from elastic_mbs.memory import oom
from elastic_mbs.runtime import ElasticMBS

Loss = Callable[[Any, float], Tensor]  # of a piece, and its weight in the loss of the batch


def loss_of_completions(
    trainer: Any, rows: Completions, router: Router, plain: Callable[[Any], Tensor], inputs: Any
) -> Tensor:
    """Run a batch of completions in pieces, forward and, where gradients are wanted, backward.

    Args:
        trainer: whose batch it is.
        rows: reads the batch.
        router: the router's loss, if the trainer adds one.
        plain: computes the trainer's loss of some completions.
        inputs: the batch.

    Returns:
        The loss of the batch, as `compute_loss` returns it.
    """
    samples, training = rows.samples(inputs), torch.is_grad_enabled()

    def of_piece(piece: Any, share: float) -> Tensor:
        part = rows.number(piece) / rows.number(samples)
        # without gradients each piece is given the router's loss of the whole batch
        factor = (1.0 if training else part) / share
        with router.of_piece(whole=part == 1, factor=factor):
            return plain(piece)

    run = functools.partial(_train if training else _evaluate, trainer, rows, router, of_piece)
    return router.around(rows, samples, plain, lambda: run(samples), training=training)


def _train(trainer: Any, rows: Completions, router: Router, loss_of: Loss, samples: Any) -> Tensor:
    mbs: ElasticMBS = trainer.elastic
    steps = 1 if private.divides_by_steps(trainer) else trainer.current_gradient_accumulation_steps
    metrics, notes = BatchMetrics(trainer), list[Note]()
    try:
        for micro in mbs.micro_batches(samples, name="compute_loss", own_graph=False):
            with micro:
                metrics.restore()
                share = rows.share(micro.data, float(micro.total))
                # No variable holds the loss: it would outlive a failed attempt.
                micro.backward(loss_of(micro.data, share) * (share / steps))
                note = metrics.note(rows.weights(micro.data))
                micro.on_commit(functools.partial(notes.append, note))
    except BaseException:
        metrics.restore()
        raise
    metrics.join(notes, router.metrics)
    result = mbs.last_result
    assert result is not None
    loss = result.loss
    return oom.retry("scale the loss", lambda: loss * steps, (loss.device,))


def _evaluate(
    trainer: Any, rows: Completions, router: Router, loss_of: Loss, samples: Any
) -> Tensor:
    metrics, devices = BatchMetrics(trainer), (trainer.args.device,)
    total = oom.retry("count the loss terms", lambda: rows.total(samples), devices)

    def of_piece(piece: Any) -> Any:
        metrics.restore()
        share = rows.share(piece, total)
        return loss_of(piece, share) * share, metrics.note(rows.weights(piece))

    try:
        losses, notes = trainer.elastic.evaluate(of_piece, samples, outputs="device")
    except BaseException:
        metrics.restore()
        raise
    metrics.join(notes, router.metrics)
    return oom.retry("add up the losses", lambda: torch.stack([*losses]).sum(), devices)
