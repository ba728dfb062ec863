"""Does the loss of a batch equal the loss put together from its pieces? And if not, what is the likely reason?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.loss_terms import Terms, read_losses
from elastic_mbs.batch.token_counts import looks_like_token_labels
from elastic_mbs.batch.view import BatchView, map_tensors
from elastic_mbs.engine.context import Context
from elastic_mbs.errors import UsageError

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
HALF_TOLERANCE = 2e-2


@dataclass(frozen=True)
class VerifyReport:
    """What the comparison found.

    Attributes:
        ok: the pieces make up the whole.
        whole: loss of the samples taken whole (the sum of the terms, where losses have names).
        split: the same loss put together from single pieces, as the engine would weigh them.
        findings: what is wrong or worth knowing, in words, each with what to do.
    """

    ok: bool
    whole: float
    split: float
    findings: tuple[str, ...]

    def __str__(self) -> str:
        """The verdict and the findings, a line each."""
        head = f"{'ok' if self.ok else 'WRONG'}: loss {self.whole:.9g} taken whole, {self.split:.9g} put together from pieces"
        return "\n".join([head, *(f"- {finding}" for finding in self.findings)])

    def raise_if_wrong(self) -> None:
        """Raises if the losses differ.

        Raises:
            UsageError: with the whole report as its text.
        """
        if not self.ok:
            raise UsageError(str(self))


class _Probe:
    """Evaluates the loss on ranges of the first samples, leaving no trace."""

    def __init__(
        self,
        parts: Context,
        view: BatchView,
        loss_fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        names: tuple[str, ...] | None,
    ) -> None:
        self._parts, self._view, self._fn, self._args, self._kwargs, self._names = parts, view, loss_fn, args, kwargs, names
        self._streams = parts.streams.read(hosts=True)

    def losses(self, start: int, stop: int) -> dict[str | None, float]:
        self._parts.streams.restore(self._streams)
        self._parts.buffers.restore(to_call_start=True)
        with torch.enable_grad():  # a loss without a graph is an error that should be found here as well
            piece = self._parts.streamer.load(map_tensors(self._view.piece(start, stop), torch.clone))
            terms: Terms = read_losses(self._fn(piece, *self._args, **self._kwargs), self._names)[0]
        self.dtype = next(iter(terms.values())).dtype
        return {name: float(term.detach()) for name, term in terms.items()}

    def pieces(self, size: int, stop: int) -> list[tuple[int, int, dict[str | None, float]]]:
        return [(a, min(a + size, stop), self.losses(a, min(a + size, stop))) for a in range(0, stop, size)]


def verify(
    parts: Context,
    few: BatchView,
    counts: Counts,
    loss_fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> VerifyReport:
    """Compares whole and split losses of a few samples. See `ElasticMBS.verify`."""
    if few.length < 2:
        raise UsageError(f"verify compares a whole with its parts, so it needs at least 2 samples, not {few.length}")
    modules = parts.model.modules
    modes = [module.training for module in modules]
    streams = parts.streams.read(hosts=True)
    parts.buffers.begin_call(modules, VerifyReport)
    try:
        for module in modules:
            module.training = False
        probe = _Probe(parts, few, loss_fn, args, kwargs, counts.names)
        return _compare(parts, few, counts, probe, few.length)
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        parts.buffers.restore(to_call_start=True)
        parts.streams.restore(streams)


def _compare(parts: Context, view: BatchView, counts: Counts, probe: _Probe, n: int) -> VerifyReport:
    whole = probe.losses(0, n)
    tolerance = TOLERANCE.get(probe.dtype, HALF_TOLERANCE)
    scale = max(1e-12, *(abs(value) for value in whole.values()))

    def near(a: float, b: float) -> bool:
        return abs(a - b) <= tolerance * scale

    ones, halves = probe.pieces(1, n), probe.pieces(-(-n // 2), n)
    reduction = parts.settings.reduction

    def joined(pieces: list[tuple[int, int, dict[str | None, float]]], name: str | None, weigh: str) -> float:
        total = 0.0
        for start, stop, losses in pieces:
            weight = (counts.weights(start, stop, reduction=weigh) or {}).get(name)
            if weight:
                total += losses[name] * weight
        return total

    findings: list[str] = []
    split = {name: joined(ones, name, reduction) for name in whole}
    wrong = [name for name in whole if not (near(whole[name], split[name]) and near(whole[name], joined(halves, name, reduction)))]
    for name in wrong:
        what = "the loss" if name is None else f"the loss {name!r}"
        findings.append(_reason(what, whole[name], name, counts, view, probe, ones, halves, joined, near, reduction, n))
    findings.extend(_known(modules=parts.model.modules))
    return VerifyReport(not wrong, sum(whole.values()), sum(split.values()), tuple(findings))


def _reason(
    what: str,
    whole: float,
    name: str | None,
    counts: Counts,
    view: BatchView,
    probe: _Probe,
    ones: Any,
    halves: Any,
    joined: Callable[..., float],
    near: Callable[[float, float], bool],
    reduction: str,
    n: int,
) -> str:
    if not math.isfinite(whole):
        return f"{what} of the samples taken whole is {whole}, which no split can be compared with: is it a mean over nothing (every label ignored)?"
    again = probe.losses(0, n)[name]
    if not near(again, whole):
        return f"{what} differs between two runs on the same samples, random streams put back: a source of randomness is not in generators="
    other = "sum" if reduction == "mean" else "mean"
    if near(whole, joined(ones, name, other)) and near(whole, joined(halves, name, other)):
        return f"{what} is a {other} over the samples, but reduction={reduction!r}: use reduction={other!r}"
    label = looks_like_token_labels(view)
    if reduction == "mean" and counts.names is None and label is not None:
        for shift in (False, True):
            if _fits_tokens(label, view, whole, ones, near, shift=shift):
                how, over = (", shift=True", ", from the second of each sample on") if shift else ("", "")
                return f"{what} is a mean over the labels that are not -100{over}: give count=count_tokens({label!r}{how})"
    if reduction == "sum":
        excess = {1: sum(losses[name] for _, _, losses in ones) - whole, 2: sum(losses[name] for _, _, losses in halves) - whole}
        # A term R that is added once per call shows up (pieces - 1) times too often.
        if len(halves) > 1 and near(excess[1] / (n - 1), excess[2] / (len(halves) - 1)):
            return (
                f"{what} has a part of about {excess[1] / (n - 1):.6g} that does not come from samples (a regulariser, say), and under "
                "reduction='sum' it is added once per piece: scale it with len(batch) / N, or use reduction='mean'"
            )
    return (
        f"{what} of a batch is not made up of its samples' losses: it compares samples with each other (contrastive, in-batch negatives), "
        "normalises by something that count= does not say, or depends on the batch's size. Its split gradient is not the whole batch's"
    )


def _fits_tokens(label: str, view: BatchView, whole: float, ones: Any, near: Callable[[float, float], bool], *, shift: bool) -> bool:
    labels = view.leaf(label)
    if shift and labels.dim() < 2:
        return False
    tokens = ((labels[:, 1:] if shift else labels) != -100).reshape(view.length, -1).sum(1).tolist()
    return bool(sum(tokens)) and near(whole, sum(losses[None] * tokens[start] for start, _, losses in ones if tokens[start]) / sum(tokens))


def _known(modules: list[nn.Module]) -> list[str]:
    found = []
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in modules):
        found.append(
            "the model has BatchNorm: in training its statistics are those of each micro-batch, so gradients depend on the split "
            "(compared here in eval mode)"
        )
    return found
