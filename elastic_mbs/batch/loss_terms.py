"""The loss and the outputs in the result of `loss_fn`, and the weighted sum of the terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch

from elastic_mbs.errors import LossError

Terms = dict[
    str | None, torch.Tensor
]  # by the names of their counts; a single loss has the name None

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
    if not any(term.requires_grad for term in terms.values()):
        raise LossError(
            "the loss has no graph, so there is nothing to differentiate: was it computed under "
            "torch.no_grad() or from detached tensors, "
            "or are all parameters frozen?"
        )
    return terms, outputs


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
            f"loss_fn returned a dict without 'loss' (it has {list(value)}); {_WAYS}; for several "
            "losses give count= as a dict"
        )
    loss = getattr(value, "loss", None)
    if loss is not None:
        return loss, value
    if isinstance(value, tuple | list) and value:
        if type(value) is list and len(value) > 1 and all(map(_is_loss, value)):
            raise LossError(
                f"loss_fn returned a list of {len(value)} losses, and only the first would be "
                "trained: return their sum, or a dict of them with count= as a dict; the tuple "
                "(loss, outputs) has a loss and what is kept beside it"
            )
        outputs = value[1] if len(value) == 2 else tuple(value[1:]) or None
        return value[0], outputs
    raise LossError(f"loss_fn returned a {type(value).__name__}, which has no loss in it; {_WAYS}")


def _scalar(loss: Any, what: str) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise LossError(f"{what} is a {type(loss).__name__}, not a tensor; {_WAYS}")
    if loss.numel() != 1:
        raise LossError(
            f"{what} has shape {tuple(loss.shape)}; it must be a scalar: reduce it with .mean() "
            "(or .sum() and reduction='sum')"
        )
    if not loss.is_floating_point():
        raise LossError(f"{what} has dtype {loss.dtype}; it must be a real floating-point scalar")
    # a 0-d loss is returned itself and not as a view: a failed attempt detaches it
    return loss if loss.ndim == 0 else loss.reshape(())


def _is_loss(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.requires_grad


def is_plain(loss: object) -> TypeGuard[torch.Tensor]:
    """Return whether a loss is a scalar with a graph, in full precision, as most are.

    There is nothing to read from such a loss.
    """
    # a tensor without a graph is a leaf
    return (
        type(loss) is torch.Tensor and loss.dtype in _FULL and loss.ndim == 0 and not loss.is_leaf
    )


_FULL = frozenset({torch.float32, torch.float64})


def weighted_sum(terms: Terms, weights: Mapping[str | None, float]) -> torch.Tensor:
    """Return Σ weight · term, a scalar with a graph."""
    # A term of weight 0 is left out: a mean over nothing is NaN, and so is NaN · 0. A small weight
    # would cost a half-precision loss bits.
    parts = [
        (term if term.dtype in _FULL else term.float()) * weights[name]
        for name, term in terms.items()
        if weights[name] != 0
    ]
    if not parts:
        raise LossError("every loss term of this piece has count 0")
    return sum(parts[1:], parts[0])
