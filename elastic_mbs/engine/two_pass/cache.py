"""The loss over all embeddings of a batch, and its gradients at them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.batch.containers import map_tensors, tensors_in
from elastic_mbs.batch.loss_terms import check_graph, read_losses, weighted_sum
from elastic_mbs.batch.schedule import Range
from elastic_mbs.engine.outcome.result import Place, StoredOutput
from elastic_mbs.errors import LossError, UsageError
from elastic_mbs.rollback.graph import walk

OverEmbeddings = Callable[[Any], Any]  # the embeddings of the whole batch → the loss


class EmbeddingCache:
    """A loss over embeddings, with its gradients at them and at leaves of its own.

    Attributes:
        loss: the loss of the whole batch, detached.
        outputs: the outputs that came with the loss.
        own: leaves that the loss reaches by itself (a learned temperature), with their gradients.
    """

    def __init__(
        self,
        embeddings: Any,
        trained: Sequence[bool],
        loss_fn: OverEmbeddings,
        order: Sequence[int] | None,
        scaler: torch.amp.GradScaler | None,
        outputs: Place,
    ) -> None:
        """Run the loss and its backward as far as the embeddings.

        Args:
            embeddings: the embeddings of the whole batch, in its order.
            trained: which of their tensors need a gradient.
            loss_fn: embeddings → loss.
            order: the samples in the order of the pieces, where they are sorted.
            scaler: scales the loss.
            outputs: the place where outputs are kept.

        Raises:
            LossError: there is no loss that depends on the embeddings.
        """
        inputs: list[Tensor] = []
        needs = iter(trained)

        def leaf(tensor: Tensor) -> Tensor:
            if next(needs):
                tensor = tensor.detach().requires_grad_()
                inputs.append(tensor)
            # A copy, because a loss that runs again must find it as it was.
            return tensor.clone()

        loss, self.outputs = read_loss(loss_fn(map_tensors(embeddings, leaf)), outputs)
        self.loss = loss.detach()
        self._seen = [tensor.detach() for tensor in inputs]
        # of each piece that was embedded again: how far off it is, and how long it was
        self._again: list[Tensor] = []
        self._trained, self._order = trained, order
        # Scaled here, where half precision would lose it. The engine scales the surrogate once
        # more, so that is divided by the same factor.
        self._unit = None if scaler is None else scaler.scale(torch.ones_like(self.loss))
        self._differentiate(loss if scaler is None else scaler.scale(loss), inputs)

    def _differentiate(self, loss: Tensor, inputs: list[Tensor]) -> None:
        assert loss.grad_fn is not None
        ids = set(map(id, inputs))
        own = [each for each in walk(loss.grad_fn).leaves if id(each) not in ids]
        check_hooks(own)
        gradients = torch.autograd.grad(loss, [*inputs, *own], allow_unused=True)
        self._gradients = gradients[: len(inputs)]
        if all(gradient is None for gradient in self._gradients):
            raise LossError(_INDEPENDENT)
        self.own = [
            (each, gradient)
            for each, gradient in zip(own, gradients[len(inputs) :], strict=True)
            if gradient is not None
        ]

    def surrogate(self, value: Any, piece: Range) -> Tensor:
        """Return a scalar whose gradient at this piece's embeddings is the loss's.

        In the first piece it has the gradients of the loss's own leaves, too.
        """
        embeddings = self._embeddings(value)
        rows: slice | list[int] = slice(piece.start, piece.stop)
        if self._order is not None:
            rows = list(self._order[piece.start : piece.stop])
        pairs = []
        for embedding, gradient, seen in zip(embeddings, self._gradients, self._seen, strict=True):
            here = tuple(
                map(slice, embedding.shape)
            )  # the gradient of pieces by length can be wider
            self._note(embedding.detach(), seen[rows][here])
            if gradient is not None and embedding.requires_grad:
                pairs.append((embedding, gradient[rows][here]))
        if not pairs:
            raise LossError(FROZEN)
        own = self.own if piece.start == 0 else ()
        parts = [_product(*pair).to(self.loss.device) for pair in (*pairs, *own)]
        total = sum(parts[1:], parts[0])
        return total if self._unit is None else total / self._unit

    def _embeddings(self, value: Any) -> list[Tensor]:
        """Return the tensors of a piece that need a gradient in this call."""
        found = tensors_in(value)
        if len(found) != len(self._trained):
            raise LossError(
                f"embed_fn returned {len(found)} tensors for samples that it had returned "
                f"{len(self._trained)} for"
            )
        pairs = list(zip(found, self._trained, strict=True))
        for tensor, trained in pairs:
            if tensor.requires_grad and not trained:
                raise LossError(
                    f"embed_fn returned {tensor.dtype} of shape {tuple(tensor.shape)} with a graph "
                    "for these samples, and without one for the first piece: return it with a "
                    "graph for all, or for none (.detach())"
                )
        return [tensor for tensor, trained in pairs if trained]

    def _note(self, now: Tensor, before: Tensor) -> None:
        """Note how far embeddings are off those that the loss has seen; the host does not wait."""
        if now.shape == before.shape:
            wide = torch.promote_types(before.dtype, torch.float32)
            before = before.to(wide)
            pair = torch.stack([(now - before).norm(), before.norm()])
            self._again.append(pair.to(self.loss.device))

    def embeds_the_same(self) -> bool:
        """Return whether the pieces had the same embeddings both times."""
        pairs = torch.stack(self._again).tolist() if self._again else []
        return all(not off > _SAME * long for off, long in pairs)


_SAME = 0.01  # of the embeddings' norm: a device may add in another order
_INDEPENDENT = (
    "the loss does not depend on the embeddings: loss_fn gets the values that embed_fn returned, "
    "for the whole batch"
)
FROZEN = (
    "no embedding that the loss depends on has a graph, so there is nothing to train in embed_fn: "
    "are its parameters frozen?"
)


def read_loss(value: Any, outputs: Place) -> tuple[Tensor, StoredOutput | None]:
    """Return the loss that a function of embeddings returned, and the outputs to keep.

    Args:
        value: the loss, alone or with outputs.
        outputs: the place where outputs are kept.

    Raises:
        LossError: there is no loss.
    """
    try:
        terms, found = read_losses(value, None)
        check_graph(terms)
    except LossError as error:
        raise LossError(
            f"loss_fn returned no loss for the embeddings of the whole batch: {error}"
        ) from None
    kept = None if found is None or outputs is None else StoredOutput(found, outputs)
    return weighted_sum(terms, {None: 1.0}), kept


def leaves_of_whole(embeddings: Any, loss: Tensor) -> tuple[Tensor, ...]:
    """Return the leaves of a loss whose graph goes through the embeddings of the whole batch.

    Raises:
        LossError: it does not depend on them, or they have no graph.
    """
    graphs = [tensor.grad_fn for tensor in tensors_in(embeddings) if tensor.grad_fn is not None]
    if not graphs:
        raise LossError(FROZEN)
    leaves = () if loss.grad_fn is None else walk(loss.grad_fn).leaves
    below = {id(leaf) for graph in graphs for leaf in walk(graph).leaves}
    if below.isdisjoint(map(id, leaves)):
        raise LossError(_INDEPENDENT)
    check_hooks([leaf for leaf in leaves if id(leaf) not in below])
    return leaves


def check_hooks(own: Sequence[Tensor]) -> None:
    """Refuse leaves of the loss's own that have a hook on their gradient."""
    if any(leaf._backward_hooks for leaf in own):
        raise UsageError(
            "a leaf that loss_fn reaches has a hook on its gradient, which would run twice: "
            "use it in embed_fn only, or take it off"
        )


def has_gradient(tensor: Tensor) -> bool:
    """Return whether a tensor is of a type that can have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def _product(tensor: Tensor, gradient: Tensor) -> Tensor:
    """Return the inner product of both, in full precision."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return (tensor.to(wide) * gradient.to(wide).conj()).sum().real
