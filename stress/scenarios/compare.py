"""How far a run under stress is from training without limits."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import nn

from elastic_mbs.cli.demo.compare import Rounding

from ..models.factory import make
from ..record import Differences
from ..reference.by_hand import accumulate, view_of
from .catalogue import Order
from .reference import (
    SHAKEN,
    Curve,
    begin_streams,
    generators_of,
    on_device,
    relative,
    rounding_of,
    train_by_hand,
    weight_difference,
)
from .train import Trained


@lru_cache(maxsize=8)
def separable(model: str, seed: int, device: str) -> bool:
    """Whether the gradient of a batch is the same whole and in two halves, and draws no random numbers, which other pieces would draw otherwise."""
    found = []
    for parts in (1, 2):
        subject = make(model, seed, device)
        view = view_of(subject, on_device(subject, 0, device))
        begin_streams(seed)
        streams = generators_of(subject)
        before, half = streams.read(hosts=True), view.length // 2
        accumulate(subject, view, [[0, half], [half, view.length]] if parts == 2 and half else [[0, view.length]])
        if streams.moved(before):
            return False
        with torch.no_grad():
            gradients = {name: p.grad.detach() for name, p in subject.model.named_parameters() if p.grad is not None}
        found.append(gradients | {name: buffer for name, buffer in subject.model.named_buffers() if buffer.is_floating_point()})
    return weight_difference(found[0], found[1]) <= rounding_of(subject.model)[1].weight


@lru_cache(maxsize=8)
def whole(model: str, seed: int, device: str, steps: int) -> Curve:
    """Training on whole batches."""
    return train_by_hand(make(model, seed, device), [None] * steps, seed)


def compare(order: Order, trained: Trained) -> Differences:
    """Largest differences from training without limits: over the same pieces, and on whole batches where the model is separable."""
    what = order.model, order.seed, order.device
    partitions, mine = [step.partition for step in trained.steps], trained.curve
    subject = make(*what)
    limits = rounding_of(subject.model)[1]
    other = train_by_hand(subject, partitions, order.seed, trained.evaluated)
    found = _differences(limits, mine, other)
    if not within_rounding(found) and (order.own or order.device != "cpu"):  # the built-in models in float64 make no rounding larger
        subject = make(*what)
        _shake(subject.model)
        found = _differences(limits, mine, other, train_by_hand(subject, partitions, order.seed, trained.evaluated))
    if not separable(*what):
        return found
    unlimited = whole(*what, len(trained.steps))
    return replace(found, whole_loss=relative(mine.losses, unlimited.losses), whole_weight=weight_difference(mine.final, unlimited.final))


def within_rounding(found: Differences) -> bool:
    """Whether rounding explains the differences from the same pieces."""
    return found.loss <= found.tolerance_loss and max(found.norm, found.weight, found.outputs or 0.0) <= found.tolerance_weight


def _differences(limits: Rounding, mine: Curve, other: Curve, shaken: Curve | None = None) -> Differences:
    """Less what one rounding of the weights at its start has driven apart in `shaken`, where training makes a rounding larger with each step."""
    names, outputs = list(other.final), _outputs(mine, other)
    if shaken is not None:
        off, own = ({name: weight_difference(each.final, other.final, [name]) for name in names} for each in (mine, shaken))
        names = [name for name in names if off[name] > SHAKEN * own[name]]
        if outputs is not None and outputs <= SHAKEN * (_outputs(shaken, other) or 0.0):
            outputs = 0.0
    return Differences(
        loss=relative(mine.losses, other.losses, None if shaken is None else shaken.losses),
        norm=relative(mine.norms, other.norms, None if shaken is None else shaken.norms),
        weight=weight_difference(mine.final, other.final, names),
        outputs=outputs,
        tolerance_loss=limits.loss,
        tolerance_weight=limits.weight,
    )


def _outputs(mine: Curve, other: Curve) -> float | None:
    """None where the model gave nothing that could be compared."""
    pairs = list(zip(mine.outputs, other.outputs, strict=True))
    return max((relative(a, b) for a, b in pairs if a or b), default=None)


def _shake(model: nn.Module) -> None:
    """Changes every weight by one rounding, up or down: how far that drives training apart is what rounding explains."""
    stream = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                signs = torch.randint(0, 2, parameter.shape, generator=stream).to(parameter.device) * 2 - 1
                parameter.mul_(1 + signs * torch.finfo(parameter.dtype).eps)
