"""A cross-entropy in chunks of rows: no more than the logits of one chunk are there at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from elastic_mbs.escalation.cross_entropy import CrossEntropy
from elastic_mbs.escalation.head import Head, LogitsOf, Step, gradients_of
from elastic_mbs.rollback.saved_tensors import saved_plainly

Inputs = tuple[Tensor, Tensor, Tensor | None]
"""The input of a head, of shape (rows, features), its weight, and its bias."""


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
    loss = CrossEntropy(target.flatten(), weight, ignore_index, label_smoothing)
    # The head itself is not among these: they live until backward is over.
    chunks = _Chunks(loss, head.rows, head.steps, rows, head.cast)
    inputs = head.hidden.flatten(0, -2), head.weight, head.bias
    at_once = _makes_gradients_at_once(head, dtype)
    total: Tensor = _ChunkedLoss.apply(*inputs, chunks, at_once)  # type: ignore[no-untyped-call]
    if reduction == "mean":
        total = total / loss.terms(total.dtype)
    if torch.is_autocast_enabled(head.hidden.device.type):
        dtype = torch.promote_types(dtype, torch.float32)
    return total.to(dtype)


def copies_of(head: Head, dtype: torch.dtype) -> int:
    """Return how many tensors of the size of a chunk's logits are there at once.

    Logits of `dtype` count as if they were in single precision, at least.
    """
    if not _makes_gradients_at_once(head, dtype):
        return 4 + 2 * len(head.steps)  # of torch's cross-entropy and its backward
    written_over = not head.steps and dtype.itemsize >= 4
    return 1 if written_over else 2 + 2 * len(head.steps)


def _makes_gradients_at_once(head: Head, dtype: torch.dtype) -> bool:
    """Return whether the gradients of a chunk are made with its loss, and scaled in backward.

    A loss in single precision, as the models of transformers have it, rounds its gradients after
    the scale that comes with the backward. Double weights would show that they were not.
    """
    return head.weight.dtype is not torch.float64 or dtype is torch.float64


@dataclass(frozen=True)
class _Chunks:
    """The losses of chunks of rows, and their gradients.

    Attributes:
        loss: the loss of all rows.
        logits_of: the function that gives the logits of some rows.
        steps: of that function, the ones after the linear layer.
        rows: rows of a chunk.
        cast: the type of autocast in which the linear layer runs; None where it is off.
    """

    loss: CrossEntropy
    logits_of: LogitsOf
    steps: Sequence[Step]
    rows: int
    cast: torch.dtype | None

    def summed(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the sum of the losses, with its graph."""
        losses = [
            self.loss.summed(self.logits_of(hidden[at : at + self.rows], weight, bias), at)
            for at in range(0, len(hidden), self.rows)
        ]
        return torch.stack(losses).sum()

    def with_gradients(
        self, inputs: Inputs, asked: Sequence[bool], scale: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the sum of the losses, and the gradients of the inputs.

        Args:
            inputs: the inputs.
            asked: which of them need a gradient.
            scale: the gradient of the sum, for gradients that are rounded as torch rounds them.
        """
        hidden, weight, bias = inputs
        # once: autocast would do it for each chunk
        matrix = weight.detach().to(self.cast or weight.dtype)
        bias = None if bias is None else bias.detach().to(matrix.dtype)
        grads = [
            None if each is None or not wanted else torch.zeros_like(each)
            for each, wanted in zip(inputs, asked, strict=True)
        ]
        with torch.autocast(hidden.device.type, enabled=False):
            losses = [
                self._add_gradients(hidden.detach(), matrix, bias, at, scale, grads)
                for at in range(0, len(hidden), self.rows)
            ]
        return torch.stack(losses).sum(), grads

    def _add_gradients(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        start: int,
        scale: Tensor | None,
        grads: Sequence[Tensor | None],
    ) -> Tensor:
        """Return the loss of the chunk that begins with row `start`, and add up its gradients."""
        chunk = hidden[start : start + self.rows].to(weight.dtype)
        of_hidden, of_weight, of_bias = grads
        loss, grad = self._with_gradient(functional.linear(chunk, weight, bias), start, scale)
        if of_hidden is not None:
            of_hidden[start : start + self.rows] = grad @ weight
        if of_weight is not None and of_weight.dtype is grad.dtype:
            # no addmm_, whose operations torch's counter leaves out
            torch.addmm(of_weight, grad.t(), chunk, out=of_weight)
        elif of_weight is not None:
            of_weight += grad.t() @ chunk
        if of_bias is not None:
            of_bias += grad.sum(0)
        return loss

    def _with_gradient(
        self, out: Tensor, start: int, scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of a chunk, and the gradient of the output of the linear layer.

        Without `scale` the gradient is written over the logits.
        """
        # nothing of a chunk is kept, so nothing of it is to go to the host
        with torch.enable_grad(), saved_plainly():
            logits = out.requires_grad_()
            for step in self.steps:
                logits = step(logits)
            if scale is not None:
                loss = self.loss.summed(logits, start)
                (grad,) = torch.autograd.grad(loss, out, scale)
                return loss.detach(), grad
        wide = torch.promote_types(logits.dtype, torch.float32)
        gradient = logits.detach().to(wide, copy=bool(self.steps))  # a step may have saved them
        loss = self.loss.into_gradient(gradient, start)
        (grad,) = torch.autograd.grad(logits, out, gradient.to(logits.dtype))
        return loss, grad


class _ChunkedLoss(torch.autograd.Function):
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
        chunks: _Chunks,
        at_once: bool,
    ) -> Tensor:
        inputs = hidden, weight, bias
        ctx.chunks, ctx.at_hand = chunks, at_once
        if at_once:
            total, grads = chunks.with_gradients(inputs, ctx.needs_input_grad[:3])
        else:
            total, grads = chunks.summed(*inputs), []
        ctx.save_for_backward(*inputs, *grads)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight, bias, *grads = ctx.saved_tensors
        inputs = hidden, weight, bias
        if torch.is_grad_enabled():  # a gradient of the gradient is asked for
            with torch._C.DisableTorchFunction():
                total = ctx.chunks.summed(*inputs)
            grads = gradients_of(total, inputs, grad)
        elif ctx.at_hand:
            ctx.at_hand = False  # they are given away: a second backward makes them again
            for each in grads:
                if each is not None:
                    each.data.mul_(grad)  # by `data`: they are saved tensors
        else:
            with torch._C.DisableTorchFunction():
                _, grads = ctx.chunks.with_gradients(inputs, ctx.needs_input_grad[:3], grad)
        return *grads, None, None
