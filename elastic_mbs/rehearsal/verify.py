"""Verification of a loss: whole against put together from pieces, with the likely reason."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import nn

from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.view import BatchView
from elastic_mbs.engine.shared.peers import quiet
from elastic_mbs.engine.shared.resources import Resources
from elastic_mbs.engine.snapshot import Snapshot
from elastic_mbs.errors import UsageError
from elastic_mbs.rehearsal.comparison import Comparison
from elastic_mbs.rehearsal.kept import Kept
from elastic_mbs.rehearsal.moved import moved_in_training
from elastic_mbs.rehearsal.reasons import reason_of


@dataclass(frozen=True)
class VerifyReport:
    """The findings of a comparison of whole and split losses.

    Attributes:
        ok: nothing was found wrong.
        whole: loss of the samples taken whole (the sum of the terms, where losses have names).
        split: the same loss put together from single pieces, as the engine would weigh them.
        findings: everything that is wrong or worth knowing, each with the way out.
        compared: the losses could be compared; False where they draw other random numbers, or
            are not finite.
        moved: the difference to the loss of a piece that the pieces before it make in training, by
            state that the loss reads and moves.
    """

    ok: bool
    whole: float
    split: float
    findings: tuple[str, ...]
    compared: bool = True
    moved: float = 0.0

    def __str__(self) -> str:
        """Return the verdict and the findings, a line each."""
        figures = f"loss {self.whole:.9g} taken whole, {self.split:.9g} put together from pieces"
        head = f"{'ok' if self.ok else 'WRONG'}: {figures}"
        if self.ok and not self.compared:  # the figures differ by their draws
            head = "not compared"
        return "\n".join([head, *(f"- {finding}" for finding in self.findings)])

    def raise_if_wrong(self) -> None:
        """Raise a `UsageError` with the whole report as its text, if the losses differ."""
        if not self.ok:
            raise UsageError(str(self))


def _report(compared: Comparison) -> VerifyReport:
    ok, certain, findings = _findings(compared)
    moved = 0.0
    if ok and (state := moved_in_training(compared)) is not None:
        ok, certain, findings, moved = False, True, [f"the loss {state[0]}"], state[1]
    # those of equal draws, where it was they that were compared
    whole = sum(compared.whole.values())
    split = sum(compared.joined(compared.ones, each, compared.reduction) for each in compared.whole)
    if not compared.cuts:
        limits = compared.resources.settings.limits
        findings.append(
            f"a batch of {compared.view.length} samples is never cut with "
            f"min_micro_batch_size={limits.minimum} and align={limits.align}: verify needs "
            f"{2 * limits.floor}"
        )
    if compared.resources.model.batch_norms():
        findings.append(
            "the model has BatchNorm: in training its statistics are those of each "
            "micro-batch, so gradients depend on the split "
            "(compared here in eval mode); recipes.convert_ghost_batchnorm makes them the "
            "whole batch's"
        )
    return VerifyReport(ok, whole, split, tuple(findings), certain, moved)


def _findings(compared: Comparison) -> tuple[bool, bool, list[str]]:
    """Return whether the losses are right, whether they were compared, and what was found."""
    ok, certain, findings = True, compared.cuts, []
    names = list(compared.whole)
    lost = [text for name in names if (text := compared.lost(name)) is not None]
    if lost:
        return False, certain, lost
    for name in [each for each in names if not compared.adds_up(each, compared.reduction)]:
        reason = reason_of(compared, name)
        ok, certain = ok and not reason.wrong, certain and reason.compared
        if reason.text:
            subject = "the loss" if name is None else f"the loss {name!r}"
            findings.append(f"{subject} {reason.text}")
    return ok, certain, findings


def verify(
    resources: Resources,
    few: BatchView,
    counts: Counts,
    loss_fn: Callable[[Any], Any],
    *,
    tries: bool = True,
) -> VerifyReport:
    """Compare whole and split losses of a few samples, and leave no trace.

    See `ElasticMBS.verify`. Without `tries` an out-of-memory error is raised as it is.
    """
    if few.length < 2:
        raise UsageError(
            "verify compares a whole with its parts, so it needs at least 2 samples, not "
            f"{few.length}"
        )
    with quiet(resources.peers):  # around all: what is put back is what is there inside
        return _compare(resources, few, counts, loss_fn, tries=tries)


def _compare(
    resources: Resources,
    few: BatchView,
    counts: Counts,
    loss_fn: Callable[[Any], Any],
    *,
    tries: bool,
) -> VerifyReport:
    snapshot = Snapshot(resources, VerifyReport)
    # Set aside, whatever loss_fn does: nothing here adds to them. It may have frozen some, too.
    gradients = [(each, each.grad, each.requires_grad) for each in _parameters(resources)]
    kept = Kept(resources.model.every, snapshot)

    def put_back() -> None:
        for leaf, gradient, trainable in gradients:
            leaf.grad = gradient
            if leaf.requires_grad is not trainable:
                leaf.requires_grad_(trainable)
        resources.retry("put back what loss_fn has changed", kept.restore)

    def run() -> VerifyReport:
        return _report(Comparison(resources, few, counts, loss_fn, snapshot, kept))

    with ExitStack() as backup, ExitStack() as undo:
        backup.callback(resources.retry, "drop the copies of the buffers", snapshot.close)
        snapshot.take_modes()
        resources.retry("copy buffers and random streams", snapshot.take)
        for stack in (backup, undo):  # should an interrupt strike one, the other is whole
            stack.callback(put_back)
        for leaf, _, _ in gradients:
            leaf.grad = None
        what = f"run {few.length} samples whole: verify takes fewer with samples="
        return resources.retry(what, run) if tries else run()


def _parameters(resources: Resources) -> list[nn.Parameter]:
    """Return the parameters of the model and of modules beside it, each once."""
    owned = [module._parameters.values() for module in resources.model.every]
    return list(dict.fromkeys(each for own in owned for each in own if each is not None))
