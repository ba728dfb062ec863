"""A loss over the embeddings of a whole batch (contrastive, in-batch negatives): the gradient cache.

Such a loss compares samples, so it is no sum over pieces. But all that the network needs of it is
its gradient at the embeddings:

    first pass    every piece is embedded without a graph, and its embeddings are kept
    the loss      of all embeddings, with its gradient at them and at leaves of its own (a learned
    temperature) second pass   every piece is embedded again, with a graph, and runs backward from
    its rows of that gradient

Both passes are one call of the engine, whose batch runs twice. The second begins with the buffers
and random streams that the first began with and runs the same pieces in the same order, so it draws
the same masks, sees the same statistics, and leaves buffers as one pass would. Source: Gao et al.,
"Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (2021), arXiv 2101.06983.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.batch.containers import map_tensors, tensors_in
from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.loss_terms import read_losses, weighted_sum
from elastic_mbs.batch.schedule import Range
from elastic_mbs.batch.view import BatchView
from elastic_mbs.engine.call import Call, Take
from elastic_mbs.engine.context import Context
from elastic_mbs.engine.profile import names_of
from elastic_mbs.engine.recovery import reset_half_made, restore
from elastic_mbs.engine.result import StoredOutput, check_not_overwritten, with_outputs
from elastic_mbs.engine.state import Attempt, Phase
from elastic_mbs.errors import BatchError, LossError, MisuseError, ReplayUnsafeError, UsageError
from elastic_mbs.options import OutputPlace
from elastic_mbs.rollback.graph import drop_unrun, walk
from elastic_mbs.rollback.isolation import Isolation

_SAME = 0.01  # of the embeddings' norm: as far as the same piece may differ by how a device adds

OverEmbeddings = Callable[[Any], Any]  # what `embed_fn` returns, of the whole batch → the loss


class EmbeddingCall(Call):
    """A call that runs its batch twice, with a loss over all embeddings in between.

    Where what comes of a sample depends on its piece (dropout, BatchNorm), the pieces of the second
    pass are bound to be those of the first: a failure in it restarts both passes at the smaller
    size, and one in the first pass, which leaves pieces of several sizes, that pass. Elsewhere the
    second pass may cut as it likes. Gradients that were there are put aside for the call, so that a
    restart takes back nothing of the user's.
    """

    def __init__(
        self,
        context: Context,
        view: BatchView,
        *,
        name: str,
        identity: object,
        loss: OverEmbeddings,
    ) -> None:
        self._loss_fn = loss
        self._cache: _Cache | None = None  # of the first pass; None while that runs
        # gradients that were there, and the ids of their leaves
        self._aside, self._set_aside = Isolation(), set[int]()
        self._restarts = self._failures = 0  # of the call, when the first pass began
        self._unseen = False  # whether this is the first call of the function
        self._first: StoredOutput | None = None  # what it gave for the first piece then
        # where the second pass has failed at the floor, and how often
        self._at_floor: tuple[int | None, int] = None, 0
        counts = _Unweighted.samples(view.length)
        super().__init__(context, view, counts, name=name, identity=(identity, names_of(loss)[1]))

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        take: Take | None = None,
    ) -> None:
        """Runs both passes of `fn`; what they take is their own."""
        self._put_aside(self.context.ledger.leaves())
        self._first_pass()
        super().run(partial(self._embed, fn), args, kwargs, self._take)

    def _embed(self, fn: Callable[..., Any], piece: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self._cache is not None):
            return fn(piece, *args, **kwargs)

    def _take(self, attempt: Attempt, value: Any) -> None:
        """Keeps the embeddings of a piece, or runs backward from their gradient."""
        _check_rows(value, len(attempt))
        if self._cache is None:
            self.keep(attempt, map_tensors(value, _alone))
            return
        if self._unseen and attempt.piece.start == 0:
            self.context.retry(
                "compare the embeddings of both passes", lambda: self._check_same(value)
            )
        self.backward(attempt, self._cache.surrogate(value, attempt.piece))
        attempt.loss = None  # the surrogate's value means nothing
        if attempt.piece.start == 0:
            attempt.loss, attempt.callbacks = self._cache.loss, (self._settle,)

    def __next__(self) -> Attempt:
        state = self.state
        attempt = super().__next__()
        if state.restarts > self._restarts:  # a recovery went back to the start of the batch
            if self._cache is not None:
                state.replayed_samples += state.view.length
                self._at_floor = state.floor_start, state.failures_at_floor
            self._first_pass()
        return attempt

    # ------------------------------------------------------------------ the passes

    def _first_pass(self) -> None:
        state = self.state
        self._cache, self._restarts, self._failures = None, state.restarts, state.failures
        state.training = state.bound = False
        state.outputs = "device"

    def _finish(self) -> None:
        """Ends a pass: after the first comes the second, or, where its pieces cannot be the same, the first once more."""
        state, context = self.state, self.context
        if self._cache is not None:
            outputs = self._cache.outputs
            super()._finish()
            if state.result is not None:
                state.result = with_outputs(state.result, outputs)
            return
        self._unseen = not state.profile.census_taken
        bound = self._is_bound()
        if bound and state.failures > self._failures:
            state.restarts += 1
            state.replayed_samples += state.view.length
            self._rewind()
            self._first_pass()
            return
        self._first = state.in_order()[0].outputs if self._unseen else None
        cache = self._differentiate()
        self._rewind()
        self._cache, state.training, state.bound, state.outputs = cache, True, bound, None
        # the first pass has shown nothing of what the second needs
        state.floor_start, state.failures_at_floor = self._at_floor
        if state.plan.learning:  # nor has the loss
            context.meter.reset_peak()
            state.resets = context.meter.resets

    def _is_bound(self) -> bool:
        """Whether what comes of a sample can depend on its piece, as far as is known.

        Refuses a batch that was changed by the first pass.
        """
        state, context, profile, start = (
            self.state,
            self.context,
            self.state.profile,
            self.state.streams,
        )
        assert start is not None
        if state.view.versions() != state.batch_versions:
            profile.edits_batch = True
            raise BatchError(
                "embed_fn changes its samples in place, and they are embedded twice: work on a "
                "copy (x = x.clone()) inside embed_fn. From the next "
                "call on pieces are copies"
            )
        profile.draws = (
            context.retry("read the random streams", lambda: context.streams.learn(start))
            or profile.draws
        )
        profile.normalises_batch = profile.normalises_batch or context.model.normalises_batch()
        return (
            profile.mixes
            or not profile.census_taken
            or context.settings.recovery.replay == "isolate"
        )

    def _rewind(self) -> None:
        """Goes back to the start of the batch, with the buffers and random streams of then."""
        restore(self.state)
        self.state.drop_committed()
        self.state.schedule.restart()

    # ------------------------------------------------------------------ between the passes

    def _differentiate(self) -> _Cache:
        """The loss over all embeddings, and its gradients.

        Its own failures need room and no smaller pieces.
        """
        state, context = self.state, self.context
        check_not_overwritten([attempt.outputs for attempt in state.committed])
        result = state.make_result(state.in_order())
        embeddings = context.retry("join the embeddings on the device", lambda: result.outputs)
        _check_rows(embeddings, state.view.length)
        state.drop_committed()
        # what must not run inside a step function must not run inside the loss
        state.training, state.phase = True, Phase.FORWARD
        self._embedded = context.streams.read(hosts=True)
        buffers, modes = self._buffers(), context.model.training()

        def attempt() -> _Cache:
            drop_unrun()  # of an attempt before this one
            reset_half_made(context.settings.scaler)
            context.model.restore(modes)
            context.streams.restore(self._embedded)
            order = None if state.view.sorted is None else state.view.sorted.order
            with torch.enable_grad():
                return _Cache(
                    embeddings,
                    self._loss_fn,
                    order,
                    context.settings.scaler,
                    context.settings.outputs,
                )

        what = f"run loss_fn over the embeddings of {state.view.length} samples, whose memory no micro-batch changes"
        cache = context.retry(what, attempt)
        state.check_gradients()
        if context.model.training() != modes:
            raise MisuseError(
                "loss_fn switched a module's mode, and the second pass would run in another one "
                "than the first: switch it outside the call"
            )
        if self._buffers() != buffers:
            raise MisuseError(
                "loss_fn changed a buffer of the model (a queue, running statistics), and the "
                "second pass starts from the buffers that the first one "
                "started from: compute in embed_fn what changes buffers, or change them after the "
                "call"
            )
        self._after = context.streams.read(hosts=True)
        self._put_aside(leaf for leaf, _ in cache.own)
        state.phase = Phase.WAITING
        return cache

    def _buffers(self) -> list[tuple[int, int]]:
        """All buffers with their versions."""
        owned = [
            buffer
            for module in self.context.model.modules
            for buffer in module._buffers.values()
            if buffer is not None
        ]
        return [(id(buffer), -1 if buffer.is_inference() else buffer._version) for buffer in owned]

    # ------------------------------------------------------------------ what the call began with

    def _put_aside(self, leaves: Iterable[Tensor]) -> None:
        state, ledger = self.state, self.context.ledger
        full = [leaf for leaf in leaves if leaf.grad is not None]
        if full:
            self._set_aside.update(map(id, full))
            self._aside.set_aside(full)
            ledger.note()
            state.had_gradient, state.indistinct = set(), False
            state.settled = state.is_settled()

    def _check_same(self, value: Any) -> None:
        """Refuses an `embed_fn` whose second run gives something else.

        In the first call of a function only: it waits for the device.
        """
        before = [] if self._first is None else tensors_in(self._first.get())
        for one, other in zip(
            filter(_has_gradient, before), filter(_has_gradient, tensors_in(value)), strict=False
        ):
            if one.shape == other.shape and float((one - other.detach()).norm()) > _SAME * float(
                one.norm()
            ):
                raise ReplayUnsafeError(
                    "embed_fn gave other embeddings when it ran again, so its gradient is not "
                    "that of the embeddings which loss_fn has seen: name each "
                    "generator of your own that it draws from, "
                    "recovery=RecoveryOptions(generators=[g]), and do not ask "
                    "torch.is_grad_enabled()"
                )

    def _settle(self) -> None:
        """Ends the second pass as the first one and the loss have ended, and adds its gradients to those that were there."""
        state, context = self.state, self.context
        streams = context.streams
        ended = self._embedded if streams.draws_on_host else self._embedded._replace(hosts=None)
        if context.retry("read the random streams", lambda: streams.moved(ended)):
            raise ReplayUnsafeError(
                "embed_fn drew other random numbers when it ran again, so its gradient is not "
                "that of the embeddings which loss_fn has seen: does it "
                "ask torch.is_grad_enabled(), or draw in its backward?"
            )
        context.retry(
            "put the random streams to where the loss has left them",
            lambda: streams.restore(self._after),
        )
        if self._set_aside:
            state.had_gradient, state.modified = self._set_aside, True
            context.retry("add the gradients to those that were there", self._aside.fold)
            context.retry("put the gradients back in their places", self._aside.finish)

    def _close(self) -> None:
        self._cache = self._first = None
        self._aside.rewind()  # of a call that has ended early: an empty one has nothing to put back
        super()._close()


class _Unweighted(Counts):
    """Counts of a batch whose pieces are added as they are: the loss has weighed its samples already."""

    def weights(
        self, start: int, stop: int, reduction: str = "mean"
    ) -> dict[str | None, float] | None:
        return {None: 1.0}


class _Cache:
    """A loss over embeddings, and its gradients: at the embeddings, and at the leaves of its own."""

    def __init__(
        self,
        embeddings: Any,
        loss_fn: OverEmbeddings,
        order: Sequence[int] | None,
        scaler: torch.amp.GradScaler | None,
        outputs: OutputPlace,
    ) -> None:
        inputs: list[Tensor] = []

        def leaf(tensor: Tensor) -> Tensor:
            if _has_gradient(tensor):
                tensor = tensor.detach().requires_grad_()
                inputs.append(tensor)
            # it may be edited in place: a loss that runs again must find it as it was
            return tensor.clone()

        value = loss_fn(map_tensors(embeddings, leaf))
        try:
            terms, found = read_losses(value, None)
        except LossError as error:
            raise LossError(
                f"what loss_fn returned for the whole batch is no loss: {error}"
            ) from None
        loss = weighted_sum(terms, {None: 1.0})
        self.loss = loss.detach()
        self.outputs = None if found is None or outputs is None else StoredOutput(found, outputs)
        # Scaled here, where half precision would lose it; the engine scales the surrogate once
        # more, so that is divided by as much.
        self._unit = None if scaler is None else scaler.scale(torch.ones_like(self.loss))
        scaled = loss if scaler is None else scaler.scale(loss)
        assert scaled.grad_fn is not None
        ids = set(map(id, inputs))
        own = [each for each in walk(scaled.grad_fn).leaves if id(each) not in ids]
        if any(each._backward_hooks for each in own):
            raise UsageError(
                "a leaf that loss_fn reaches has a hook on its gradient, which would run twice: use "
                "it in embed_fn only, or take it off"
            )
        gradients = torch.autograd.grad(scaled, [*inputs, *own], allow_unused=True)
        if all(gradient is None for gradient in gradients[: len(inputs)]):
            raise LossError(
                "the loss does not depend on the embeddings: loss_fn gets what embed_fn returned, "
                "for the whole batch"
            )
        self._order = order  # of the samples in the pieces, where they are sorted
        self._gradients = gradients[: len(inputs)]
        self.own = [
            (each, gradient)
            for each, gradient in zip(own, gradients[len(inputs) :], strict=True)
            if gradient is not None
        ]

    def surrogate(self, value: Any, piece: Range) -> Tensor:
        """A scalar whose gradient is the loss's: at this piece's embeddings, and, in the first piece, at the leaves of the loss's own."""
        embeddings = [tensor for tensor in tensors_in(value) if _has_gradient(tensor)]
        rows = (
            slice(piece.start, piece.stop)
            if self._order is None
            else list(self._order[piece.start : piece.stop])
        )
        if len(embeddings) != len(self._gradients):
            raise LossError(
                f"embed_fn returned {len(embeddings)} tensors of embeddings for samples that it "
                f"had returned {len(self._gradients)} for"
            )
        pairs = [
            # of pieces by length the gradient can be wider
            (embedding, gradient[rows][tuple(map(slice, embedding.shape))])
            for embedding, gradient in zip(embeddings, self._gradients, strict=True)
            if gradient is not None and embedding.requires_grad
        ]
        if not pairs:
            raise LossError(
                "no embedding that loss_fn depends on has a graph, so there is nothing to train in "
                "embed_fn: are its parameters frozen?"
            )
        parts = [
            _product(*pair).to(self.loss.device)
            for pair in (*pairs, *(self.own if piece.start == 0 else ()))
        ]
        total = sum(parts[1:], parts[0])
        return total if self._unit is None else total / self._unit


def _product(tensor: Tensor, gradient: Tensor) -> Tensor:
    """Their inner product, in full precision."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return (tensor.to(wide) * gradient.to(wide).conj()).sum().real


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _alone(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one that would keep a larger one alive: the first token's state of a transformer is a view of all states."""
    return (
        tensor.clone()
        if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes
        else tensor
    )


def _check_rows(value: Any, samples: int) -> None:
    """Refuses what is not per sample."""
    found = tensors_in(value)
    if not any(map(_has_gradient, found)) or any(
        tensor.ndim == 0 or tensor.shape[0] != samples for tensor in found
    ):
        shapes = ", ".join(f"{tensor.dtype} of shape {tuple(tensor.shape)}" for tensor in found[:8])
        raise LossError(
            f"embed_fn returned a {type(value).__name__} with {shapes or 'no tensor'} for "
            f"{samples} samples: it returns embeddings, a row "
            f"per sample, as a tensor of shape ({samples}, ...), or a tuple or dict of such "
            "tensors. What comes once per batch is computed in loss_fn"
        )
