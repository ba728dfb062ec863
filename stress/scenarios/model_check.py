"""Checks of a model before training under stress.

It is made the same each time, its step runs, and there is something to compare.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from elastic_mbs import ElasticMBS
from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.loss_terms import check_graph, read_losses
from elastic_mbs.batch.view import BatchView
from elastic_mbs.errors import UsageError

from ..flat_options import grouped
from ..models.factory import make
from ..models.subject import Subject, naming
from ..reference.by_hand import accumulate, view_of
from .measure import batch_of
from .reference import generators_of, norm_of, relative, rounding_of, state_of, weight_difference


def check(model: str, seed: int, device: str) -> None:
    """Make a subject twice, compare, and run a step.

    Raises a UsageError where it cannot be used.
    """
    first, second = make(model, seed, device), make(model, seed, device)
    if weight_difference(state_of(first.model), state_of(second.model)) > 0:
        raise UsageError(
            f"--model {model}: two models made from seed {seed} differ; draw its weights from "
            "torch's, Python's or numpy's random numbers"
        )
    if not any(parameter.requires_grad for parameter in second.model.parameters()):
        raise UsageError(f"--model {model}: the model has no parameter that requires a gradient")
    if not _same(first, second) or not _same(first, first):
        raise UsageError(
            f"--model {model}: two first batches made from seed {seed} differ; make batches from "
            "their number, or from seeded streams"
        )
    with naming(model, "its options do not suit ElasticMBS"):
        ElasticMBS(second.model, **grouped(second.options)).close()
    _run(second, model, device)
    with naming(model, "its optimizer does not run"):
        optimizer = second.optimizer(second.model.parameters())
        if not callable(getattr(optimizer, "step", None)):
            raise UsageError(
                f"--model {model}: the optimizer's maker returned {type(optimizer).__name__}, "
                "which is no optimizer"
            )
        optimizer.step()


def _read_by_the_product(subject: Subject, batch: Any) -> Subject:
    """Return a subject whose losses the product reads too, once it has read a batch.

    Its errors name the way out, and the reference's do not.
    """
    count = subject.options.get("count")
    view = BatchView(batch, subject.options.get("dims"))
    counts = Counts.read(count, view, subject.options.get("reduction", "mean"))

    def loss_fn(piece: Any) -> Any:
        value = subject.loss_fn(piece)
        if subject.over is None:
            check_graph(read_losses(value, counts.names)[0])
        return value

    return replace(subject, loss_fn=loss_fn)


def _run(subject: Subject, model: str, device: str) -> None:
    """Run the first batch, and its loss once more from the same streams and buffers."""
    with naming(model, f"its step fails on its first batch{_batch_in_words(subject)}"):
        batch = batch_of(subject, 0, device)
        subject = _read_by_the_product(subject, batch)
        view = view_of(subject, batch)
        streams = generators_of(subject)
        buffers = [buffer.clone() for buffer in subject.model.buffers()]
        start = streams.read(hosts=True)
        loss = accumulate(subject, view, [[0, view.length]])
        streams.restore(start)
        with torch.no_grad():
            for buffer, value in zip(subject.model.buffers(), buffers, strict=True):
                buffer.copy_(value)
        again = accumulate(subject, view, [[0, view.length]], backward=False)
    norm = norm_of(subject.model)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise UsageError(
            f"--model {model}: the loss of its first batch is {loss:g} and its gradient's norm "
            f"{norm:g}, so nothing could be compared"
        )
    if norm == 0:
        raise UsageError(
            f"--model {model}: the gradient of its first batch is zero, so nothing could be "
            "compared"
        )
    if relative([again], [loss]) > rounding_of(subject.model)[1].loss:
        raise UsageError(
            f"--model {model}: the loss of one batch is {loss:.6g} and then {again:.6g}, from the "
            "same random streams and buffers, so nothing could "
            "be compared: it draws from a generator of its own, which has to be named (a dict of "
            "options as the factory's last entry, "
            '{"generators": [generator]}), or it depends on how often it was called'
        )


def _batch_in_words(subject: Subject) -> str:
    """Return a hint for the usual mistake: a batch of parts in place of a list of batches."""
    if isinstance(subject.batches, tuple) and all(
        isinstance(each, Tensor) for each in subject.batches
    ):
        return (
            f" (batches are a tuple of {len(subject.batches)} tensors, each of which is taken for "
            "a batch: is it one batch? then give [batch])"
        )
    return ""


def _same(first: Subject, second: Subject) -> bool:
    mine, other = (
        [leaf for leaf in tree_leaves(batch_of(subject, 0)) if isinstance(leaf, Tensor)]
        for subject in (first, second)
    )
    return len(mine) == len(other) and all(
        torch.equal(a, b) for a, b in zip(mine, other, strict=True)
    )
