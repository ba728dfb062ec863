"""Verification of a loss: whole against put together from pieces, with the likely reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from elastic_mbs.batch.counts import Counts, looks_like_token_labels
from elastic_mbs.batch.loss_terms import check_graph, lost_in, read_losses
from elastic_mbs.batch.transfer import to_device
from elastic_mbs.batch.view import BatchView, map_tensors
from elastic_mbs.engine.shared.resources import Resources
from elastic_mbs.engine.snapshot import Snapshot
from elastic_mbs.errors import UsageError

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # half precision: 2e-2


@dataclass(frozen=True)
class VerifyReport:
    """The findings of a comparison of whole and split losses.

    Attributes:
        ok: the pieces make up the whole.
        whole: loss of the samples taken whole (the sum of the terms, where losses have names).
        split: the same loss put together from single pieces, as the engine would weigh them.
        findings: everything that is wrong or worth knowing, each with the way out.
    """

    ok: bool
    whole: float
    split: float
    findings: tuple[str, ...]

    def __str__(self) -> str:
        """Return the verdict and the findings, a line each."""
        verdict = "ok" if self.ok else "WRONG"
        head = (
            f"{verdict}: loss {self.whole:.9g} taken whole, {self.split:.9g} put together from "
            "pieces"
        )
        return "\n".join([head, *(f"- {finding}" for finding in self.findings)])

    def raise_if_wrong(self) -> None:
        """Raise a `UsageError` with the whole report as its text, if the losses differ."""
        if not self.ok:
            raise UsageError(str(self))


Losses = dict[str | None, float]  # by name


class _Comparison:
    """The losses of a few samples, taken whole and in pieces."""

    def __init__(
        self,
        resources: Resources,
        view: BatchView,
        counts: Counts,
        loss_fn: Callable[[Any], Any],
        snapshot: Snapshot,
    ) -> None:
        self.resources = resources
        self.view = view
        self.counts = counts
        self.loss_fn = loss_fn
        self.snapshot = snapshot
        self.reduction = resources.settings.reduction
        n = view.length
        self.whole = self._losses(0, n)
        self.ones, self.halves = (
            [(a, min(a + size, n), self._losses(a, min(a + size, n))) for a in range(0, n, size)]
            for size in (1, -(-n // 2))
        )

    def _losses(self, start: int, stop: int) -> Losses:
        self.snapshot.restore()
        self.resources.model.evaluate()
        # a loss without a graph is an error that should be found here as well
        with torch.enable_grad():
            piece = to_device(
                map_tensors(self.view.piece(start, stop), torch.clone), self.resources.piece_device
            )
            terms, _ = read_losses(self.loss_fn(piece), self.counts.names)
            if stop - start == self.view.length:  # one that counts nothing needs no graph
                check_graph(terms)
        self.dtype = next(iter(terms.values())).dtype
        losses = {name: float(term.detach()) for name, term in terms.items()}
        for name in self.counts.void if len(self.counts.void) < len(losses) else ():
            if math.isnan(losses[name]):
                losses[name] = 0.0  # over nothing: it has no part in the batch
        return losses

    def report(self) -> VerifyReport:
        found = {name: self._lost(name) for name in self.whole}
        for name, lost in found.items():
            if lost is None and not self._adds_up(name, self.reduction):
                what = "the loss" if name is None else f"the loss {name!r}"
                found[name] = f"{what} {self._reason(name)}"
        findings = [text for text in found.values() if text is not None]
        ok = not findings
        if self.resources.model.batch_norms():
            findings.append(
                "the model has BatchNorm: in training its statistics are those of each "
                "micro-batch, so gradients depend on the split "
                "(compared here in eval mode); recipes.convert_ghost_batchnorm makes them the "
                "whole batch's"
            )
        split = sum(self._joined(self.ones, name, self.reduction) for name in self.whole)
        return VerifyReport(ok, sum(self.whole.values()), split, tuple(findings))

    def _lost(self, name: str | None) -> str | None:
        """Return why the loss of a sample without a loss term would be lost, where it would be."""
        for start, stop, losses in self.ones:
            if not self.counts.weights(start, stop, self.reduction)[name]:
                text = lost_in(name, losses[name], f"sample {start}")
                if text is not None:
                    return text
        return None

    def _joined(
        self, pieces: list[tuple[int, int, Losses]], name: str | None, reduction: str
    ) -> float:
        weights = [
            self.counts.weights(start, stop, reduction=reduction)[name] for start, stop, _ in pieces
        ]
        return sum(
            losses[name] * weight
            for (_, _, losses), weight in zip(pieces, weights, strict=True)
            if weight
        )

    def _near(self, a: float, b: float) -> bool:
        return abs(a - b) <= TOLERANCE.get(self.dtype, 2e-2) * max(
            1e-12, *map(abs, self.whole.values())
        )

    def _adds_up(self, name: str | None, reduction: str) -> bool:
        return all(
            self._near(self.whole[name], self._joined(pieces, name, reduction))
            for pieces in (self.ones, self.halves)
        )

    def _reason(self, name: str | None) -> str:
        whole = self.whole[name]
        if not math.isfinite(whole):
            return (
                f"of the samples taken whole is {whole}, which no split can be compared with: is "
                "it a mean over nothing (every label ignored)?"
            )
        if not self._near(self._losses(0, self.view.length)[name], whole):
            return (
                "differs between two runs on the same samples, random streams put back: a source "
                "of randomness is not in generators="
            )
        if self.snapshot.drew_since_start():
            return (
                "draws random numbers, so whole and pieces cannot be compared: they draw others. "
                "Put the noise into the batch, and verify again"
            )
        other = "sum" if self.reduction == "mean" else "mean"
        if self._adds_up(name, other):
            return (
                f"is a {other} over the samples, but reduction={self.reduction!r}: use "
                f"reduction={other!r}"
            )
        found = self._missing_count(whole) if self.reduction == "mean" else self._extra_term(name)
        return found or (
            "of a batch is not made up of its samples' losses: it compares samples with each "
            "other (contrastive, in-batch negatives; exact as "
            "mbs.backward_embeddings(embed_fn, loss_fn, batch)), normalises by something that "
            "count= does not say, or depends on the batch's "
            "size, or on padding, of which pieces by length have less. Its split gradient is not "
            "the whole batch's"
        )

    def _missing_count(self, whole: float) -> str | None:
        label = looks_like_token_labels(self.view) if self.counts.names is None else None
        if label is None:
            return None
        labels = dict(self.view.named_tensors())[label]
        found = (labels != -100).reshape(len(labels), -1)
        for how, over, counted in (
            ("", "", found),
            (", shift=True", ", from the second of each sample on", found[:, 1:]),
        ):
            tokens = counted.sum(1).tolist()
            terms = sum(
                losses[None] * tokens[start] for start, _, losses in self.ones if tokens[start]
            )
            if sum(tokens) and self._near(whole, terms / sum(tokens)):
                return (
                    f"is a mean over the labels that are not -100{over}: give "
                    f"count=count_tokens({label!r}{how})"
                )
        return None

    def _extra_term(self, name: str | None) -> str | None:
        """Describe a term that is added once per call: it counts (pieces - 1) times too often."""
        surplus = [
            sum(losses[name] for _, _, losses in pieces) - self.whole[name]
            for pieces in (self.ones, self.halves)
        ]
        by_ones, by_halves = surplus[0] / (len(self.ones) - 1), surplus[1]
        if not self._near(by_ones, by_halves) or self._near(by_ones, 0.0):
            return None
        return (
            f"has a part of about {by_ones:.6g} that does not come from samples (a regulariser, "
            "say), and under "
            "reduction='sum' it is added once per piece: scale it with len(batch) / N, or use "
            "reduction='mean'"
        )


def verify(
    resources: Resources, few: BatchView, counts: Counts, loss_fn: Callable[[Any], Any]
) -> VerifyReport:
    """Compare whole and split losses of a few samples, and leave no trace.

    See `ElasticMBS.verify`.
    """
    if few.length < 2:
        raise UsageError(
            "verify compares a whole with its parts, so it needs at least 2 samples, not "
            f"{few.length}"
        )
    snapshot = Snapshot(resources, VerifyReport)
    # Set aside, whatever loss_fn does: nothing here adds to them.
    gradients = [(leaf, leaf.grad) for leaf in resources.model.leaves]

    def put_back() -> None:
        for leaf, gradient in gradients:
            leaf.grad = gradient
        resources.retry("put buffers and random streams back", snapshot.restore)

    with ExitStack() as backup, ExitStack() as undo:
        backup.callback(snapshot.close)
        snapshot.take_modes()
        resources.retry("copy buffers and random streams", snapshot.take)
        for stack in (backup, undo):  # should an interrupt strike one, the other is whole
            stack.callback(put_back)
        for leaf, _ in gradients:
            leaf.grad = None
        return resources.retry(
            f"run {few.length} samples whole: verify takes fewer with samples=",
            lambda: _Comparison(resources, few, counts, loss_fn, snapshot).report(),
        )
