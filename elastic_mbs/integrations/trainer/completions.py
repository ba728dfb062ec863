"""The loss of a batch of completions that a trainer has generated, run in pieces.

Each piece is weighed here: its loss is a mean or a sum, and that of a router is neither.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.integrations.exchange import Exchange
from elastic_mbs.integrations.trainer.ranks import alone
from elastic_mbs.integrations.trainer.router import Router
from elastic_mbs.integrations.trl import private
from elastic_mbs.integrations.trl.metrics import BatchMetrics, Note
from elastic_mbs.integrations.trl.rollouts import Completions
from elastic_mbs.memory import oom
from elastic_mbs.runtime import ElasticMBS

Loss = Callable[[Any], Tensor]  # of a piece, weighed as in the loss of the batch


def loss_of_completions(
    trainer: Any,
    rows: Completions,
    router: Router,
    exchange: Exchange,
    plain: Callable[[Any], Tensor],
    inputs: Any,
) -> Tensor:
    """Run a batch of completions in pieces, forward and, where gradients are wanted, backward.

    Args:
        trainer: whose batch it is.
        rows: reads the batch.
        router: the router's loss, if the trainer adds one.
        exchange: the other ranks.
        plain: computes the trainer's loss of some completions.
        inputs: the batch.

    Returns:
        The loss of the batch, as `compute_loss` returns it.
    """
    samples, training = rows.samples(inputs), torch.is_grad_enabled()
    devices = (trainer.args.device,)
    total = oom.retry("count the loss terms", lambda: rows.total(samples), devices)

    def of_piece(piece: Any) -> Tensor:
        share = rows.share(piece, total)
        part = rows.number(piece) / rows.number(samples)
        # without gradients each piece is given the router's loss of the whole batch
        factor = (1.0 if training else part) / share
        with router.of_piece(whole=part == 1, factor=factor), alone(trainer):
            return plain(piece) * share

    def run() -> Tensor:
        run_pieces, metrics = _train if training else _evaluate, BatchMetrics(trainer)
        with metrics.undone():
            loss, notes = run_pieces(trainer, rows, metrics, of_piece, samples)
        metrics.join(notes, exchange, router.metrics)
        return loss

    # An engine's call tells the other ranks of its error, and an evaluation makes none.
    with nullcontext() if training else exchange.told():
        return router.around(rows, samples, plain, run, training=training, told=not training)


def _train(
    trainer: Any, rows: Completions, metrics: BatchMetrics, loss_of: Loss, samples: Any
) -> tuple[Tensor, list[Note]]:
    mbs: ElasticMBS = trainer.elastic
    steps = 1 if private.divides_by_steps(trainer) else trainer.current_gradient_accumulation_steps
    notes, parts = list[Note](), steps * trainer.args.world_size
    for micro in mbs.micro_batches(samples, name="compute_loss", own_graph=False):
        with micro:
            metrics.restore()
            # No variable holds the loss: it would outlive a failed attempt.
            micro.backward(loss_of(micro.data) / parts)
            note = metrics.note(rows.weights(micro.data))
            micro.on_commit(functools.partial(notes.append, note))
    result = mbs.last_result
    assert result is not None
    loss = result.loss
    return oom.retry("scale the loss", lambda: loss * steps, (loss.device,)), notes


def _evaluate(
    trainer: Any, rows: Completions, metrics: BatchMetrics, loss_of: Loss, samples: Any
) -> tuple[Tensor, list[Note]]:
    def of_piece(piece: Any) -> Any:
        metrics.restore()
        return loss_of(piece), metrics.note(rows.weights(piece))

    losses, notes = trainer.elastic.evaluate(of_piece, samples, outputs="device")
    devices = (trainer.args.device,)
    return oom.retry("add up the losses", lambda: torch.stack([*losses]).sum(), devices), notes
