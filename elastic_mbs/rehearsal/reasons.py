"""The reason why pieces give another loss than the whole, with the way out.

The first that applies is named. All but the last need evidence of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from elastic_mbs.batch.counts import looks_like_token_labels
from elastic_mbs.rehearsal.comparison import Comparison
from elastic_mbs.rehearsal.labels import LabelMeans, guessed, in_words, way_out
from elastic_mbs.rehearsal.moved import moved


@dataclass(frozen=True)
class Reason:
    """The finding of a loss whose pieces do not add up.

    Attributes:
        text: the finding, or "" where the loss is right after all.
        wrong: the split gradient is not the whole batch's, or there is none.
        compared: whole and pieces could be compared.
    """

    text: str
    wrong: bool = True
    compared: bool = True


_UNKNOWN = (
    "of a batch is not made up of its samples' losses: it compares samples with each other "
    "(contrastive, in-batch negatives; Dice, F1 or IoU over the batch; exact as "
    "mbs.backward_embeddings(embed_fn, loss_fn, batch)), normalises by something that count= does "
    "not say, or by statistics of the batch (of rewards, say: compute them before the call), or "
    "depends on the batch's size, or on padding, of which pieces by length have less. Its split "
    "gradient is not the whole batch's"
)
_MAY_BE_NAN = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_DRAWS = (
    "draws random numbers, so whole and pieces were not compared: they draw others. To compare "
    "them put the noise into the batch"
)


def reason_of(compared: Comparison, name: str | None) -> Reason:
    """Return why the pieces of a loss do not make up the whole."""
    whole = compared.whole[name]
    if not math.isfinite(whole):
        return Reason(
            f"of the samples taken whole is {whole}, which no split can be compared with: "
            f"{_not_finite(compared)}",
            compared=False,
        )
    again = compared.run([(0, compared.view.length)])[0].losses[name]
    if not compared.near(again, whole):
        return Reason(
            "differs between two runs on the same samples, random streams and buffers put back: "
            "it draws from a source of randomness that is not in generators=, or keeps a state "
            "outside of buffers (a counter, a running value)"
        )
    drew, on_host = compared.snapshot.drew_since_start(), compared.snapshot.drew_on_host()
    if drew and not compared.draw_equally():
        return Reason(_DRAWS, wrong=False, compared=False)
    if drew and compared.adds_up(name, compared.reduction):
        return Reason("", wrong=False)
    if compared.gradients_add_up(name):  # what cancels out is rounded more than any tolerance
        return Reason("", wrong=False)
    for find in (
        moved,
        _reduction,
        _samples,
        _label_mean,
        _label_guess,
        _once,
        _time,
    ):
        found = find(compared, name)
        if found is not None:
            return Reason(found)
    if on_host or (drew and compared.adds_up_alike(name)):
        return Reason(_DRAWS, wrong=False, compared=False)
    return Reason(_UNKNOWN)


def _not_finite(compared: Comparison) -> str:
    """Return what can have made a loss that is not finite."""
    view = compared.view
    if any(map(_has_nan, view.tensors)):
        names = [repr(path) for path, tensor in view.named_tensors() if path and _has_nan(tensor)]
        return "NaN is in the batch" + (f" ({', '.join(names)})" if names else "")
    for module in compared.modules:
        for name, leaf in module.named_parameters(recurse=False):
            if _has_nan(leaf.detach()):
                return f"NaN is in the model ({name!r} of a {type(module).__name__})"
    return (
        "no NaN was found in the batch or the model, so is it a mean over nothing (every label "
        "ignored), or too large for its type?"
    )


def _has_nan(tensor: Tensor) -> bool:
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested
    looked_at = plain and tensor.dtype in _MAY_BE_NAN and not tensor.is_meta
    return looked_at and bool(tensor.isnan().any())


def _reduction(compared: Comparison, name: str | None) -> str | None:
    other = "sum" if compared.reduction == "mean" else "mean"
    if not compared.adds_up(name, other):
        return None
    return (
        f"is a {other} over the samples, but reduction={compared.reduction!r}: use "
        f"reduction={other!r}"
    )


def _samples(compared: Comparison, name: str | None) -> str | None:
    """Name a count that was given for a mean over samples."""
    each = [1.0] * compared.view.length
    if compared.reduction != "mean" or not compared.is_mean_over(name, each):
        return None
    way = "leave count= out" if name is None else f"count={{{name!r}: None, ...}} counts samples"
    return f"is a mean over samples, and count= counts something else: {way}"


def _label_mean(compared: Comparison, name: str | None) -> str | None:
    """Name the count of a mean that the loss takes by cross_entropy or nll_loss."""
    if compared.reduction != "mean":
        return None
    noted = []
    for start, stop in [(0, compared.view.length), *((a.start, a.stop) for a in compared.ones)]:
        with LabelMeans() as means:
            compared.run([(start, stop)])
        noted.append(means.found)
    if len(set(map(len, noted))) > 1:
        return None
    for whole, *pieces in zip(*noted, strict=True):
        counted = [0.0] * compared.view.length
        for ran, mean in zip(compared.ones, pieces, strict=True):
            counted[ran.start] = mean.terms()  # of the piece
        if compared.is_mean_over(name, counted):
            found = way_out(compared.view, whole)
            if found is None and whole.weight is None:  # else a guess would fit by chance
                found = _guess(compared, name)
            return _named(compared, name, found or in_words(whole))
    return None


def _label_guess(compared: Comparison, name: str | None) -> str | None:
    """Name the count that the batch's own labels or masks give."""
    if compared.reduction != "mean":
        return None
    found = _guess(compared, name)
    return None if found is None else _named(compared, name, found)


def _guess(compared: Comparison, name: str | None) -> str | None:
    return guessed(
        compared.view,
        lambda counted: compared.is_mean_over(name, counted),
        looks_like_token_labels(compared.view),
    )


def _named(compared: Comparison, name: str | None, found: str) -> str:
    """Return the way out with the name of the loss, where losses have names."""
    return found if name is None else f"{found}, in the dict of count= for {name!r}"


def _once(compared: Comparison, name: str | None) -> str | None:
    """Describe a term that is added once per call: it counts (pieces - 1) times too often."""
    if compared.reduction != "sum" or compared.ones is compared.halves:
        return None
    surplus = [
        sum(ran.losses[name] for ran in pieces) - compared.whole[name]
        for pieces in (compared.ones, compared.halves)
    ]
    by_ones, by_halves = surplus[0] / (len(compared.ones) - 1), surplus[1]
    if not compared.near(by_ones, by_halves) or compared.near(by_ones, 0.0):
        return None
    return (
        f"has a part of about {by_ones:.6g} that does not come from samples (a regulariser, "
        "say), and under "
        "reduction='sum' it is added once per piece: scale it with len(batch) / N, or use "
        "reduction='mean'"
    )


def _time(compared: Comparison, name: str | None) -> str | None:
    """Name a module that gets samples where it wants time."""
    n, first = compared.view.length, compared.ones[0]
    with _first_inputs(compared.modules) as whole:
        compared.run([(0, n)])
    with _first_inputs(compared.modules) as piece:
        compared.run([(first.start, first.stop)])
    for module, (steps, *rest) in whole.items():
        if steps == n and piece.get(module) == (first.stop - first.start, *rest):
            return (
                f"is cut along time: {type(module).__name__} has batch_first=False, and got "
                f"samples along its dim 0. {_dims(compared)}let the loader put samples first, and "
                "use x.transpose(0, 1) in loss_fn"
            )
    return None


def _dims(compared: Comparison) -> str:
    """Return the option for a batch whose fields all have a second dimension."""
    fields = compared.view.named_tensors()
    if not fields or any(tensor.ndim < 2 for _, tensor in fields):
        return "Where samples lie along dim 1, "
    dims = {path: 1 for path, _ in fields}
    return f"Where samples lie along dim 1 say dims={dims}, or "


@contextmanager
def _first_inputs(modules: list[nn.Module]) -> Iterator[dict[nn.Module, tuple[int, ...]]]:
    """Yield the shapes of the first inputs of modules that want time first."""
    shapes: dict[nn.Module, tuple[int, ...]] = {}

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if given and given[0].ndim > 1:
            shapes.setdefault(module, tuple(given[0].shape))

    hooks = [
        module.register_forward_pre_hook(note, with_kwargs=True)
        for module in modules
        if getattr(module, "batch_first", None) is False
    ]
    try:
        yield shapes
    finally:
        for hook in hooks:
            hook.remove()
