"""A cross-entropy in chunks of rows: no more than the logits of one chunk are there at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from elastic_mbs.escalation.head import Head, gradients_of, leaves_of
from elastic_mbs.rollback.saved_tensors import saved_plainly

LossOf = Callable[..., Tensor]
"""Input, weight and bias of a head, and the first row of a chunk → the loss of the chunk."""


def chunked_cross_entropy(
    head: Head,
    dtype: torch.dtype,
    target: Tensor,
    rows: int,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross-entropy of a head's logits, computed in chunks of `rows`.

    Args:
        head: the head, of hidden states of shape (…, features).
        dtype: the type of its logits.
        target: class numbers, of shape (…).
        rows: rows of a chunk.
        weight: as for `cross_entropy`.
        ignore_index: as for `cross_entropy`.
        reduction: "mean" or "sum".
        label_smoothing: as for `cross_entropy`.
    """
    head.check()
    target = target.flatten()
    logits_of = head.rows  # not the head: `loss_of` lives until backward is over

    def loss_of(hidden: Tensor, matrix: Tensor, bias: Tensor | None, start: int) -> Tensor:
        return functional.cross_entropy(
            logits_of(hidden, matrix, bias),
            target[start : start + rows],
            weight,
            ignore_index=ignore_index,
            reduction="sum",
            label_smoothing=label_smoothing,
        )

    hidden = head.hidden.flatten(0, -2)
    # A loss in single precision, as the models of transformers have it, rounds its gradients after
    # the scale that comes with the backward. Double weights would show that they were not.
    double = head.weight.dtype is torch.float64
    cast = None if double else head.autocast  # which leaves doubles alone
    total: Tensor = _Chunks.apply(  # type: ignore[no-untyped-call]
        *(hidden, head.weight, head.bias, loss_of, rows, cast),
        not double or dtype is torch.float64,
    )
    if reduction == "sum":
        return total
    return (total / _terms(target, weight, ignore_index, total.dtype)).to(total.dtype)


def _terms(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """Return the number of targets that count, or the sum of their weights: a mean's divisor."""
    counts = target != ignore_index
    if weight is None:  # in a type that has all whole numbers
        return counts.sum().to(torch.promote_types(dtype, torch.float32))
    return (weight[target.where(counts, 0)] * counts).sum()


class _Chunks(torch.autograd.Function):
    """The sum of the losses of chunks of rows.

    The gradients of a chunk are made while it is at hand, so the product of input and weight is
    made once. Where that would round them otherwise, each chunk runs again in backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        loss_of: LossOf,
        rows: int,
        cast: torch.dtype | None,
        at_once: bool,
    ) -> Tensor:
        inputs, asked = (hidden, weight, bias), ctx.needs_input_grad
        ctx.loss_of, ctx.rows, ctx.cast, ctx.at_once = loss_of, rows, cast, at_once
        grads: Sequence[Tensor | None] = ()
        if at_once:
            losses, grads = _with_gradients(inputs, asked, loss_of, rows, cast)
        else:
            losses = _losses(ctx, hidden, weight, bias)
        ctx.save_for_backward(*inputs, *grads)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight, bias, *grads = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of the gradient is asked for
            with torch._C.DisableTorchFunction():
                losses = _losses(ctx, hidden, weight, bias)
            found = gradients_of(torch.stack(losses).sum(), (hidden, weight, bias), grad)
        elif ctx.at_once:
            found = [None if each is None else each * grad for each in grads]
        else:
            with torch._C.DisableTorchFunction():
                inputs, asked = (hidden, weight, bias), ctx.needs_input_grad
                _, found = _with_gradients(inputs, asked, ctx.loss_of, ctx.rows, ctx.cast, grad)
        return *found, None, None, None, None


def _losses(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    starts = range(0, len(hidden), ctx.rows)
    return [ctx.loss_of(hidden[at : at + ctx.rows], weight, bias, at) for at in starts]


def _with_gradients(
    inputs: tuple[Tensor, Tensor, Tensor | None],
    asked: Sequence[bool],
    loss_of: LossOf,
    rows: int,
    cast: torch.dtype | None,
    scale: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the losses of the chunks, and the gradients of the inputs, times `scale`.

    The product of the head is made in the type `cast`, that of autocast.
    """
    hidden, *whole = inputs
    fixed = leaves_of(whole, asked[1:], cast)  # once: autocast would do it for each chunk
    of_hidden, *sums = (
        None if each is None or not wanted else torch.zeros_like(each)
        for each, wanted in zip(inputs, asked, strict=False)
    )
    losses = list[Tensor]()
    for start in range(0, len(hidden), rows):
        (chunk,) = leaves_of([hidden[start : start + rows]], asked, cast)
        # nothing of a chunk is kept, so nothing of it is to go to the host
        with torch.enable_grad(), saved_plainly():
            loss = loss_of(chunk, *fixed, start)
        found, *added = gradients_of(loss, (chunk, *fixed), scale)
        losses.append(loss.detach())
        if of_hidden is not None and found is not None:
            of_hidden[start : start + rows] = found
        for each, more in zip(sums, added, strict=True):
            if each is not None and more is not None:
                each.add_(more)
    return losses, [of_hidden, *sums]
