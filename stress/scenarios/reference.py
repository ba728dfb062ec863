"""What training must come to: hand-written accumulation, without the engine and without a limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from elastic_mbs.batch import map_tensors
from elastic_mbs.demo.compare import ROUNDING, Rounding

from ..by_hand import Partition, accumulate, view_of
from ..subject import Subject
from .needs import batch_of

HALF = Rounding(loss=2e-2, weight=5e-2)
"""Of types with eight or eleven bits: sums in another order differ in the last of them."""


def rounding_of(model: nn.Module) -> tuple[str, Rounding]:
    """Name of the least precise type among the parameters, and what counts as rounding in it."""
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    dtype = max(kinds, key=lambda kind: torch.finfo(kind).eps, default=torch.float64)
    return str(dtype).removeprefix("torch."), ROUNDING.get(dtype, HALF)


@dataclass
class Curve:
    """What is compared of a training run.

    Attributes:
        losses: of each step.
        norms: of each step's gradient.
        outputs: of each evaluation: figures per sample.
        final: parameters and buffers at the end, by name.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    outputs: list[list[float]] = field(default_factory=list)
    final: dict[str, Tensor] = field(default_factory=dict)


def start_streams(seed: int) -> None:
    """Puts the random streams of a step (dropout) to where each run begins."""
    torch.manual_seed(seed + 1)


def train_by_hand(subject: Subject, partitions: Sequence[Partition | None], seed: int, evaluated: Sequence[int] = ()) -> Curve:
    """Trains a subject over given partitions.

    Args:
        subject: is changed.
        partitions: for each step its pieces; None for the batch whole.
        seed: of the random streams.
        evaluated: steps after which it is evaluated on the next step's batch.
    """
    model, optimizer = subject.model, subject.optimizer(subject.model.parameters())
    device = next(model.parameters()).device
    curve, probe = Curve(), Probe(model)
    start_streams(seed)
    for step, partition in enumerate(partitions):
        batch = map_tensors(batch_of(subject, step), lambda tensor: tensor.to(device))
        view = view_of(subject, batch)
        loss = accumulate(subject, view, [[0, view.length]] if partition is None else partition)
        curve.losses.append(loss)
        curve.norms.append(norm_of(model))
        optimizer.step()
        optimizer.zero_grad()
        if step in evaluated:
            following = map_tensors(batch_of(subject, step + 1), lambda tensor: tensor.to(device))
            with probe, torch.no_grad():
                curve.outputs.append(flat(probe.run(subject.loss_fn, following)))
    curve.final = state_of(model)
    return curve


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
    """Evaluates a model for which only a loss function is known: what the model gives, per sample, comes from a hook.

    Inside the block the model is in eval mode. Two figures are kept of each sample's output, so that nothing of its size has to be.
    """

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

    def run(self, loss_fn: Callable[[Any], Any], piece: Any) -> Tensor | None:
        """Mean and mean square of each sample's output, (samples, 2); None where the model gives no tensor."""
        loss_fn(piece)
        output, self._output = self._output, None
        if not isinstance(output, Tensor) or output.dim() == 0:
            return None
        rows = output.detach().flatten(1) if output.dim() > 1 else output.detach()[:, None]
        return torch.stack([rows.mean(1), rows.pow(2).mean(1)], 1)


def flat(figures: Tensor | None) -> list[float]:
    """Figures per sample as one list; empty where there are none."""
    return [] if figures is None else figures.double().flatten().tolist()


def relative(mine: Sequence[float], other: Sequence[float]) -> float:
    """Largest difference of two curves, each relative to the other's value; infinite where they are not of one length or not numbers."""
    if len(mine) != len(other):
        return math.inf
    worst = 0.0
    for a, b in zip(mine, other, strict=True):
        if a == b or (math.isnan(a) and math.isnan(b)):  # training that diverges does so in both
            continue
        difference = abs(a - b) / max(abs(b), 1e-300)
        worst = max(worst, difference if math.isfinite(difference) else math.inf)
    return worst


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
