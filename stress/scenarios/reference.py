"""References of training: accumulation by hand, without the engine and without a limit.

Also the distance of a run from them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from elastic_mbs.cli.demo.compare import ROUNDING, Rounding
from elastic_mbs.rollback.random_streams import RandomStreams

from ..models.factory import make
from ..models.subject import Subject
from ..record import Differences
from ..reference.by_hand import Partition, accumulate, view_of
from ..streams import start_streams
from .catalogue import Order
from .measure import batch_of

# Types with eight or eleven bits: sums in another order differ in the last of them.
HALF = Rounding(loss=2e-2, weight=5e-2)
SHAKEN = 30.0  # roundings of the weights at the start that stand for those made on the way


def rounding_of(model: nn.Module) -> tuple[str, Rounding]:
    """Return the least precise type among the parameters, by name, and its allowed rounding."""
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    dtype = max(kinds, key=lambda kind: torch.finfo(kind).eps, default=torch.float64)
    return str(dtype).removeprefix("torch."), ROUNDING.get(dtype, HALF)


@dataclass
class Curve:
    """Figures of a training run that are compared."""

    losses: list[float] = field(default_factory=list)  # loss of each step
    norms: list[float] = field(default_factory=list)  # norm of each step's gradient
    # Loss of each piece of each evaluation.
    outputs: list[float] = field(default_factory=list)
    # Steps after which there was an evaluation, and its pieces.
    evaluated: dict[int, Partition] = field(default_factory=dict)
    final: dict[str, Tensor] = field(default_factory=dict)  # parameters and buffers at the end


def generators_of(subject: Subject) -> RandomStreams:
    """Return all random streams that the subject's loss may draw from.

    Generators named in its options are among them.
    """
    return RandomStreams(
        subject.options.get("generators", ()),
        {parameter.device for parameter in subject.model.parameters()},
    )


def train_by_hand(
    subject: Subject,
    partitions: Sequence[Partition | None],
    seed: int,
    evaluated: Mapping[int, Partition] | None = None,
) -> Curve:
    """Train over given partitions; None for the batch whole.

    After the steps in `evaluated` it is evaluated over the pieces given there.
    """
    model = subject.model
    optimizer = subject.optimizer(subject.model.parameters())
    device = next(model.parameters()).device
    curve = Curve()
    start_streams(seed + 1)
    for step, partition in enumerate(partitions):
        view = view_of(subject, batch_of(subject, step, device))
        curve.losses.append(
            accumulate(subject, view, [[0, view.length]] if partition is None else partition)
        )
        curve.norms.append(norm_of(model))
        optimizer.step()
        optimizer.zero_grad()
        if evaluated and step in evaluated:
            following = view_of(subject, batch_of(subject, step + 1, device))
            with evaluating(subject) as evaluate, torch.no_grad():
                curve.outputs += [
                    evaluate(following.piece(start, stop)) for start, stop in evaluated[step]
                ]
    curve.final = state_of(model)
    return curve


@contextlib.contextmanager
def evaluating(subject: Subject) -> Iterator[Callable[[Any], float]]:
    """Put the model in eval mode, and yield a function that evaluates a piece.

    The loss is all that is known of a user's model.
    """
    modes = [(module, module.training) for module in subject.model.modules()]

    def evaluate(piece: Any) -> float:
        returned = subject.loss_fn(piece)
        found = tree_leaves(getattr(returned, "loss", returned))
        return math.fsum(float(leaf.double().mean()) for leaf in found if isinstance(leaf, Tensor))

    subject.model.eval()
    try:
        yield evaluate
    finally:
        for module, training in modes:
            module.training = training


def norm_of(model: nn.Module) -> float:
    """Return the 2-norm of the gradient.

    It goes parameter by parameter, which takes no memory worth counting.
    """
    grads = (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    numbers = (
        grad.coalesce().values() if grad.layout is torch.sparse_coo else grad for grad in grads
    )
    return math.hypot(*(float(torch.linalg.vector_norm(each)) for each in numbers))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of parameters and buffers, on the host, by name."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in named}


def relative(
    mine: Sequence[float], other: Sequence[float], shaken: Sequence[float] | None = None
) -> float:
    """Return the largest difference of two curves, relative to the other's values.

    It is infinite where lengths differ or one is no number. `shaken` is the other after one
    rounding of
    the weights at its start: a distance that this explains is no difference.
    """
    if len(mine) != len(other):
        return math.inf
    a, b = (torch.tensor(curve, dtype=torch.float64) for curve in (mine, other))
    found = _off(a, b, b.abs())
    if shaken is not None and len(found):
        explained = (
            SHAKEN * _off(torch.tensor(shaken, dtype=torch.float64), b, b.abs()).cummax(0).values
        )
        found = found.where(found > explained, 0.0)
    return max(found.tolist(), default=0.0)


def _off(mine: Tensor, other: Tensor, scale: Tensor) -> Tensor:
    """Return differences of entries.

    They are 0 where training diverges in both, and infinite where it does in one.
    """
    same = (mine == other) | (mine.isnan() & other.isnan())
    found = (mine - other).abs() / scale.clamp_min(1e-300)
    return found.masked_fill(same, 0.0).nan_to_num(math.inf, math.inf)


def weight_difference(
    mine: dict[str, Tensor], other: dict[str, Tensor], shaken: dict[str, Tensor] | None = None
) -> float:
    """Return the largest difference of an entry, relative to its tensor's largest entry.

    It is infinite where one lacks a tensor that the other has. See `relative` for `shaken`.
    """
    if mine.keys() != other.keys() or any(mine[name].shape != other[name].shape for name in mine):
        return math.inf

    def off(of: dict[str, Tensor], name: str) -> float:
        a, b = (each[name].to_dense().double() for each in (of, other))
        return (
            float(_off(a, b, b.nan_to_num(0.0, 0.0, 0.0).abs().max()).max()) if a.numel() else 0.0
        )

    found = {name: off(mine, name) for name in mine}
    return max(
        (
            each
            for name, each in found.items()
            if shaken is None or each > SHAKEN * off(shaken, name)
        ),
        default=0.0,
    )


# ------------------------------------------------------------------- distance of a run


@lru_cache(maxsize=8)
def separable(model: str, seed: int, device: str) -> bool:
    """Return whether the gradient of a batch is the same whole and in two halves.

    It must draw no random numbers, because other pieces would draw others.
    """
    found = []
    for parts in (1, 2):
        subject = make(model, seed, device)
        view = view_of(subject, batch_of(subject, 0, device))
        start_streams(seed + 1)
        streams = generators_of(subject)
        before = streams.read(hosts=True)
        half = view.length // 2
        accumulate(
            subject,
            view,
            [[0, half], [half, view.length]] if parts == 2 and half else [[0, view.length]],
        )
        if streams.moved(before):
            return False
        gradients = {
            name: p.grad.detach()
            for name, p in subject.model.named_parameters()
            if p.grad is not None
        }
        found.append(
            gradients
            | {
                name: buffer
                for name, buffer in subject.model.named_buffers()
                if buffer.is_floating_point()
            }
        )
    return weight_difference(found[0], found[1]) <= rounding_of(subject.model)[1].weight


@lru_cache(maxsize=8)
def whole(model: str, seed: int, device: str, steps: int) -> Curve:
    """Train on whole batches."""
    return train_by_hand(make(model, seed, device), [None] * steps, seed)


def compare(order: Order, mine: Curve, partitions: Sequence[Partition]) -> Differences:
    """Return the largest differences from training without limits.

    Over the same pieces, and on whole batches where the model is separable.
    """
    what = order.model, order.seed, order.device
    subject = make(*what)
    limits = rounding_of(subject.model)[1]
    other = train_by_hand(subject, partitions, order.seed, mine.evaluated)
    found = _differences(limits, mine, other)
    # The built-in models in float64 make no rounding larger.
    if not within_rounding(found) and (order.own or order.device != "cpu"):
        subject = make(*what)
        _shake(subject.model)
        found = _differences(
            limits, mine, other, train_by_hand(subject, partitions, order.seed, mine.evaluated)
        )
    if not separable(*what):
        return found
    unlimited = whole(*what, len(partitions))
    return replace(
        found,
        whole_loss=relative(mine.losses, unlimited.losses),
        whole_weight=weight_difference(mine.final, unlimited.final),
    )


def within_rounding(found: Differences) -> bool:
    """Return whether rounding explains the differences from the same pieces."""
    return (
        found.loss <= found.tolerance_loss
        and max(found.norm, found.weight, found.outputs or 0.0) <= found.tolerance_weight
    )


def _differences(
    limits: Rounding, mine: Curve, other: Curve, shaken: Curve | None = None
) -> Differences:
    """Return differences, less those that one rounding of the weights at the start makes.

    Some training makes a rounding larger with each step.
    """

    def off(name: str) -> float:
        return relative(
            getattr(mine, name),
            getattr(other, name),
            None if shaken is None else getattr(shaken, name),
        )

    weight = weight_difference(mine.final, other.final, None if shaken is None else shaken.final)
    outputs = off("outputs") if mine.outputs or other.outputs else None
    return Differences(off("losses"), off("norms"), weight, limits.loss, limits.weight, outputs)


def _shake(model: nn.Module) -> None:
    """Change every weight by one rounding, up or down.

    The distance that this drives training apart is explained by rounding.
    """
    stream = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                signs = (
                    torch.randint(0, 2, parameter.shape, generator=stream).to(parameter.device) * 2
                    - 1
                )
                parameter.mul_(1 + signs * torch.finfo(parameter.dtype).eps)
