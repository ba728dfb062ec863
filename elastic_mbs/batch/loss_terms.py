"""The loss and the outputs in the result of `loss_fn`, and the weighted sum of the terms."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, TypeGuard

import torch

from elastic_mbs.errors import CountError, LossError

# by the names of their counts; a single loss has the name None
Terms = dict[str | None, torch.Tensor]
Weights = Mapping[str | None, float]

_WAYS = "return the loss, (loss, outputs), an object with .loss, or a dict with 'loss'"


def read_losses(value: Any, names: tuple[str, ...] | None) -> tuple[Terms, Any]:
    """Return the loss terms, one for each of `names` (None: a single loss), and the outputs."""
    if value is None:
        raise LossError(f"loss_fn returned None; is a `return` missing? {_WAYS}")
    loss, outputs = _separate(value, names)
    if names is None:
        terms: Terms = {None: _scalar(loss, "the loss")}
    else:
        if not isinstance(loss, Mapping):
            raise LossError(
                f"count= is a dict with the names {list(names)}, so loss_fn must return a dict of "
                f"losses with them, not a {type(loss).__name__}"
            )
        missing, extra = [n for n in names if n not in loss], [n for n in loss if n not in names]
        if missing or extra:
            raise LossError(
                f"the losses and count= must have the same names: missing {missing}, without a "
                f"count {extra}"
            )
        terms = {name: _scalar(loss[name], f"the loss {name!r}") for name in names}
    return terms, outputs


def check_graph(terms: Terms) -> None:
    """Refuse losses none of which has a graph."""
    if not any(term.requires_grad for term in terms.values()):
        raise LossError(
            "the loss has no graph, so there is nothing to differentiate: was it computed under "
            "torch.no_grad() or from detached tensors, "
            "or are all parameters frozen?"
        )


def _separate(value: Any, names: tuple[str, ...] | None) -> tuple[Any, Any]:
    if isinstance(value, torch.Tensor):
        return value, None
    # a mapping or an object with the loss in it is also the outputs
    if isinstance(value, Mapping):
        if "loss" in value and (names is None or "loss" not in names):
            return value["loss"], value
        if names is not None:
            return value, None
        raise LossError(
            f"loss_fn returned a dict without 'loss' (it has {list(value)}); {_WAYS}"
            f"{_several(value)}"
        )
    loss = getattr(value, "loss", None)
    if loss is not None:
        return loss, value
    if isinstance(value, tuple | list) and value:
        _refuse_several(value)
        outputs = value[1] if len(value) == 2 else tuple(value[1:]) or None
        return value[0], outputs
    raise LossError(f"loss_fn returned a {type(value).__name__}, which has no loss in it; {_WAYS}")


def _several(values: Mapping[Any, Any]) -> str:
    """Return what to do with a dict of losses; "" where it holds something else."""
    if not values or not all(
        isinstance(value, torch.Tensor) and value.numel() == 1 for value in values.values()
    ):
        return ""
    counts = ", ".join(f"{name!r}: None" for name in values)
    return (
        "\n  if each is a mean over the samples: return sum(losses.values())\n"
        f"  if one is a mean over something else: count={{{counts}}}, where None counts samples; "
        "in its place a function batch → one number per sample counts the rest"
    )


def _refuse_several(values: tuple[Any, ...] | list[Any]) -> None:
    """Refuse a second loss beside the first one: it would be dropped as an output."""
    graphs = [
        isinstance(value, torch.Tensor) and value.ndim == 0 and value.requires_grad
        for value in values
    ]
    if graphs[0] and any(graphs[1:]):
        i = graphs.index(True, 1)
        raise LossError(
            f"loss_fn returned a {type(values).__name__} whose entries 0 and {i} are both scalars "
            "with a graph, and only the first counts as the loss\n"
            "  several losses: return their sum, or a dict of them with count= as a dict, "
            "{'a': loss_a, 'b': loss_b} with count={'a': None, 'b': None} (None counts samples)\n"
            "  one loss and a value to look at: return the value detached, "
            "(loss, value.detach())"
        )


def _scalar(loss: Any, what: str) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise LossError(f"{what} is a {type(loss).__name__}, not a tensor; {_WAYS}")
    if loss.numel() != 1:
        raise LossError(
            f"{what} has shape {tuple(loss.shape)}; it must be a scalar\n"
            "  if it is the model's output: return the loss of it\n"
            "  if the loss comes second: put it first, (loss, outputs)\n"
            "  if it is a loss for each sample (reduction='none'): return its .mean(), or its "
            ".sum() with ElasticMBS(reduction='sum')"
        )
    if not loss.is_floating_point():
        raise LossError(f"{what} has dtype {loss.dtype}; it must be a real floating-point scalar")
    # a 0-d loss is returned itself and not as a view: a failed attempt detaches it
    return loss if loss.ndim == 0 else loss.reshape(())


def is_plain(loss: object) -> TypeGuard[torch.Tensor]:
    """Return whether a loss is a scalar with a graph, in full precision, as most are.

    There is nothing to read from such a loss.
    """
    # a tensor without a graph is a leaf
    return (
        type(loss) is torch.Tensor and loss.dtype in _FULL and loss.ndim == 0 and not loss.is_leaf
    )


_FULL = frozenset({torch.float32, torch.float64})


def weighted(terms: Terms, weights: Weights) -> Terms:
    """Return the terms times their weights, without those of weight 0.

    A mean over nothing is NaN, and so is NaN · 0.
    """
    # a small weight would cost a half-precision loss bits
    return {
        name: (term if term.dtype in _FULL else term.float()) * weights[name]
        for name, term in terms.items()
        if weights[name] != 0
    }


def weighted_sum(terms: Terms, weights: Weights) -> torch.Tensor:
    """Return Σ weight · term, a scalar with a graph. One weight at least is not 0."""
    parts = list(weighted(terms, weights).values())
    return sum(parts[1:], parts[0])


def lost_in(name: str | None, value: float, samples: str) -> str | None:
    """Return why a loss of weight 0 is wrong; None for 0 and for NaN, which is 0/0.

    Args:
        name: its name.
        value: its value.
        samples: those that it is of, in words.
    """
    if not value or math.isnan(value):
        return None
    return (
        f"{'the loss' if name is None else f'the loss {name!r}'} of {samples} is {value:.6g}, but "
        "count= says that it has no terms there. Under reduction='mean' its weight is then 0, and "
        "what it holds would be lost\n"
        "  if it comes from these samples (a sum over all, divided by what count= counts): return "
        "the sum divided by mbs.total, with reduction='sum'\n"
        "  if it comes once per batch (a regulariser): return it under a name of its own, "
        "{'loss': loss, 'regulariser': value}, with count={'loss': count, 'regulariser': None}"
    )


def without_void(terms: Terms, weights: Weights, void: Collection[str | None]) -> Weights:
    """Return the weights, with 0 for a sum that its function has divided by a count of 0.

    It waits for the device, and only for losses that have no term in the whole batch.

    Args:
        terms: the losses of a piece.
        weights: their weights.
        void: names of the losses that have no term in the whole batch.

    Raises:
        CountError: such a loss is not finite, though it is not 0/0 or the only one.
    """
    found = dict(weights)
    for name in void:
        value = float(terms[name].detach()) if weights[name] else 0.0
        if math.isnan(value) and len(void) < len(terms):
            found[name] = 0.0
        elif not math.isfinite(value):
            what, key = ("the loss", "") if name is None else (f"the loss {name!r}", f"[{name!r}]")
            raise CountError(
                f"{what} is {value}, and its count is zero for the whole batch: was it divided by "
                f"mbs.total{key}, which is 0?\n"
                f"  divide by (mbs.total{key} or 1), or skip such a batch before the call"
            )
    return found
