"""What training must come to: hand-written accumulation, without the engine and without a limit; and how far a run is from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from elastic_mbs.batch.view import map_tensors
from elastic_mbs.cli.demo.compare import ROUNDING, Rounding
from elastic_mbs.rollback.random_streams import RandomStreams

from ..models.subject import Subject
from ..reference.by_hand import Partition, accumulate, view_of
from ..streams import start_streams
from .measure import batch_of

HALF = Rounding(loss=2e-2, weight=5e-2)
"""Of types with eight or eleven bits: sums in another order differ in the last of them."""


def rounding_of(model: nn.Module) -> tuple[str, Rounding]:
    """Name of the least precise type among the parameters, and what counts as rounding in it."""
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    dtype = max(kinds, key=lambda kind: torch.finfo(kind).eps, default=torch.float64)
    return str(dtype).removeprefix("torch."), ROUNDING.get(dtype, HALF)


@dataclass
class Curve:
    """What is compared of a training run."""

    losses: list[float] = field(default_factory=list)  # of each step
    norms: list[float] = field(default_factory=list)  # of each step's gradient
    outputs: list[list[float]] = field(default_factory=list)  # of each evaluation: figures per sample
    final: dict[str, Tensor] = field(default_factory=dict)  # parameters and buffers at the end


def begin_streams(seed: int) -> None:
    """Puts the random streams of a step (dropout) to where each run begins."""
    start_streams((seed + 1) % 2**32)


def generators_of(subject: Subject) -> RandomStreams:
    """All random streams that its loss may draw from, those named in its options among them."""
    return RandomStreams(subject.options.get("generators", ()), {parameter.device for parameter in subject.model.parameters()})


def train_by_hand(subject: Subject, partitions: Sequence[Partition | None], seed: int, evaluated: Mapping[int, Partition] | None = None) -> Curve:
    """Trains a subject over given partitions; None for the batch whole.

    After the steps in `evaluated` it is evaluated on the next step's batch over the pieces given there: a loss that draws random numbers depends on
    them.
    """
    model, optimizer = subject.model, subject.optimizer(subject.model.parameters())
    device = next(model.parameters()).device
    curve, probe = Curve(), Probe(model)
    begin_streams(seed)
    for step, partition in enumerate(partitions):
        view = view_of(subject, on_device(subject, step, device))
        loss = accumulate(subject, view, [[0, view.length]] if partition is None else partition)
        curve.losses.append(loss)
        curve.norms.append(norm_of(model))
        optimizer.step()
        optimizer.zero_grad()
        if evaluated and step in evaluated:
            following = view_of(subject, on_device(subject, step + 1, device))
            with probe, torch.no_grad():
                figures = [probe.run(subject.loss_fn, following.piece(start, stop), stop - start)[0] for start, stop in evaluated[step]]
            curve.outputs.append([] if any(each is None for each in figures) else [number for each in figures for number in flat(each)])
    curve.final = state_of(model)
    return curve


def on_device(subject: Subject, step: int, device: torch.device | str) -> Any:
    """The step's batch, copied to a device."""
    return map_tensors(batch_of(subject, step), lambda tensor: tensor.to(device))


def norm_of(model: nn.Module) -> float:
    """The 2-norm of the gradient, parameter by parameter: that takes no memory worth counting."""
    squares = 0.0
    for parameter in model.parameters():
        if parameter.grad is not None:
            grad = parameter.grad.coalesce().values() if parameter.grad.layout is torch.sparse_coo else parameter.grad
            squares += float(torch.linalg.vector_norm(grad)) ** 2
    return math.sqrt(squares)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of parameters and buffers, on the host, by name."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in named}


class Probe:
    """Evaluates a model for which only a loss function is known: a hook keeps two figures of each sample's output. Puts the model in eval mode."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._output: Any = None

    def __enter__(self) -> Probe:
        self._modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        self._hook = self._model.register_forward_hook(self._keep)
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()
        self._output = None
        for module, training in self._modes:
            module.training = training

    def _keep(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._output = output

    def run(self, loss_fn: Callable[[Any], Any], piece: Any, length: int) -> tuple[Tensor | None, int]:
        """Mean and mean square of each sample's output, (samples, 2), and how many they are.

        None where the model gives no tensor with a row for each.
        """
        loss_fn(piece)
        output, self._output = self._output, None
        rows = [leaf.detach() for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == length]
        if not rows:
            return None, length
        samples = rows[0].flatten(1) if rows[0].dim() > 1 else rows[0][:, None]
        samples = samples if samples.is_floating_point() else samples.float()
        return torch.stack([samples.mean(1), samples.pow(2).mean(1)], 1), length


def flat(figures: object) -> list[float]:
    """Figures per sample as one list; empty where there are none."""
    return figures.double().flatten().tolist() if isinstance(figures, Tensor) else []


SHAKEN = 30.0
"""Roundings that a run makes on its way count as so many of the weights at its start."""


def relative(mine: Sequence[float], other: Sequence[float], shaken: Sequence[float] | None = None) -> float:
    """Largest difference of two curves, relative to the other's values; infinite where lengths differ or one is no number.

    `shaken` is the other after one rounding of the weights at its start: what that has driven apart by then is no difference.
    """
    if len(mine) != len(other):
        return math.inf
    worst = explained = 0.0
    for number, (a, b) in enumerate(zip(mine, other, strict=True)):
        if shaken is not None:
            explained = max(explained, SHAKEN * _off(shaken[number], b))
        difference = _off(a, b)
        worst = max(worst, difference if difference > explained else 0.0)
    return worst


def _off(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):  # training that diverges does so in both
        return 0.0
    difference = abs(a - b) / max(abs(b), 1e-300)
    return difference if math.isfinite(difference) else math.inf


def weight_difference(mine: dict[str, Tensor], other: dict[str, Tensor], names: Sequence[str] | None = None) -> float:
    """Largest difference of an entry, relative to the largest entry of its tensor; infinite where one has what the other has not."""
    if mine.keys() != other.keys():
        return math.inf
    worst = 0.0
    for name in mine if names is None else names:
        a, b = mine[name], other[name]
        if a.shape != b.shape:
            return math.inf
        if a.numel() == 0 or torch.equal(a, b):
            continue
        a, b = a.to_dense().double(), b.to_dense().double()
        same = (a == b) | (a.isnan() & b.isnan())
        scale = b.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp_min(1e-300)
        difference = float((a - b).masked_fill(same, 0.0).abs().max() / scale)
        worst = max(worst, difference if math.isfinite(difference) else math.inf)
    return worst
