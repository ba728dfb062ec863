"""A cross-entropy in chunks of rows: no more than the logits of one chunk are there at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from elastic_mbs.escalation.head import Head, gradients_of, leaves_of


def chunked_cross_entropy(
    head: Head,
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
        target: class numbers, of shape (…).
        rows: rows of a chunk.
        weight: as for `cross_entropy`.
        ignore_index: as for `cross_entropy`.
        reduction: "mean" or "sum".
        label_smoothing: as for `cross_entropy`.
    """
    head.check()
    target = target.flatten()

    def loss_of(hidden: Tensor, matrix: Tensor, bias: Tensor | None, start: int) -> Tensor:
        return functional.cross_entropy(
            head.rows(hidden, matrix, bias),
            target[start : start + rows],
            weight,
            ignore_index=ignore_index,
            reduction="sum",
            label_smoothing=label_smoothing,
        )

    hidden = head.hidden.flatten(0, -2)
    total: Tensor = _Chunks.apply(hidden, head.weight, head.bias, loss_of, rows)  # type: ignore[no-untyped-call]
    if reduction == "sum":
        return total
    counts = target != ignore_index
    if weight is None:  # in a type that has all whole numbers
        terms = counts.sum().to(torch.promote_types(total.dtype, torch.float32))
    else:
        terms = (weight[target.where(counts, 0)] * counts).sum()
    return (total / terms).to(total.dtype)


class _Chunks(torch.autograd.Function):
    """The sum of the losses of chunks of rows. Their gradients are made while each is at hand.

    So no chunk runs again in backward, and the product of input and weight is made once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        loss_of: Callable[..., Tensor],
        rows: int,
    ) -> Tensor:
        inputs, asked = (hidden, weight, bias), ctx.needs_input_grad
        grads = [
            None if each is None or not wanted else torch.zeros_like(each)
            for each, wanted in zip(inputs, asked, strict=False)
        ]
        of_hidden, *sums = grads
        losses = list[Tensor]()
        for start in range(0, len(hidden), rows):
            chunk, *fixed = leaves_of((hidden[start : start + rows], weight, bias), asked)
            # nothing of a chunk is kept, so nothing of it is to go to the host
            with torch.enable_grad(), saved_tensors_hooks(_as_it_is, _as_it_is):
                loss = loss_of(chunk, *fixed, start)
            found, *added = gradients_of(loss, (chunk, *fixed))
            losses.append(loss.detach())
            if of_hidden is not None and found is not None:
                of_hidden[start : start + rows] = found
            for each, more in zip(sums, added, strict=True):
                if each is not None and more is not None:
                    each.add_(more)
        ctx.save_for_backward(hidden, weight, bias, *grads)
        ctx.loss_of, ctx.rows = loss_of, rows
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight, bias, *grads = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of the gradient is asked for
            with torch._C.DisableTorchFunction():
                starts = range(0, len(hidden), ctx.rows)
                total = torch.stack(
                    [ctx.loss_of(hidden[at : at + ctx.rows], weight, bias, at) for at in starts]
                ).sum()
            return *gradients_of(total, (hidden, weight, bias), grad), None, None
        return *(None if each is None else each * grad for each in grads), None, None


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
