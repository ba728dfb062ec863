"""Two passes over a batch for a loss that compares samples: the gradient cache.

A loss over the embeddings of a whole batch (contrastive, in-batch negatives) is no sum over pieces.
But the network needs only the gradient of that loss at the embeddings:

    first pass   every piece is embedded without a graph, and its embeddings are kept; only the
                 first has a graph for a moment, which shows the outputs that need a gradient
    the loss     of all embeddings, with its gradient at them and at leaves of its own
    second pass  every piece is embedded again, with a graph, and runs backward from its rows of
                 that gradient

The second pass begins with the buffers and random streams of the first and runs the same pieces in
the same order. So it draws the same masks, sees the same statistics, and leaves buffers as one pass
would. Attributes that the loss changes (a counter, a centre) get what it has left when the second
pass has ended. Source: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory
Limited Setup" (2021), arXiv 2101.06983.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.batch.containers import map_tensors, tensors_in
from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.join import Apart
from elastic_mbs.engine.attempt import Attempt
from elastic_mbs.engine.outcome.result import (
    Place,
    StepResult,
    StoredOutput,
    check_not_overwritten,
    of_batch,
    place_of,
)
from elastic_mbs.engine.parts import CallParts
from elastic_mbs.engine.passes import Pass
from elastic_mbs.engine.two_pass.cache import (
    FROZEN,
    EmbeddingCache,
    OverEmbeddings,
    has_gradient,
    leaves_of_whole,
    read_loss,
)
from elastic_mbs.engine.two_pass.left import LeftByLoss
from elastic_mbs.errors import BatchError, LossError, MisuseError, ReplayUnsafeError
from elastic_mbs.rollback.random_streams import StreamState
from elastic_mbs.rollback.sample_draws import SampleDraws

_FIRST = Pass(training=False, outputs="device")
# Bound, so that a failure restarts the batch, in two passes.
_WHOLE = Pass(training=True, outputs=None, bound=True, adds_up=False)


class TwoPasses:
    """The two passes of a call, with a loss over all embeddings between them.

    A sample's embedding can depend on its piece (dropout, BatchNorm). Then the pieces of the second
    pass are bound to be the pieces of the first: a failure in the second pass restarts both at the
    smaller size. A failed piece of the first pass is replayed; at its end the first pass runs once
    more, in pieces of one size. Elsewhere the second pass may cut as it likes. Gradients that were
    there are put aside for the call, so that a restart takes back nothing of the user's.

    A batch that is expected to fit in one piece is embedded once, with its graph, and the loss runs
    in the same attempt. Two passes follow a failure.
    """

    def __init__(self, parts: CallParts, loss_fn: OverEmbeddings) -> None:
        self._parts = parts
        self._loss_fn = loss_fn
        self._cache: EmbeddingCache | None = None  # None during the first pass
        self._trained: list[bool] | None = None  # outputs of embed_fn that need a gradient
        self._whole = self._fits()  # the batch is embedded once
        self._loss: tuple[Tensor, StoredOutput | None] | None = None  # of a batch embedded once
        self._failures = 0  # of the call, when the first pass began
        self._embedded: StreamState | None = None  # random streams after the first pass
        self._ended: StreamState | None = None  # random streams after the loss
        self._left: LeftByLoss | None = None  # attributes that the loss has changed

    # ------------------------------------------------------------------ the passes

    @property
    def first(self) -> Pass:
        """The pass that the call begins with."""
        return _WHOLE if self._whole else _FIRST

    def _fits(self) -> bool:
        view = self._parts.batch.view
        # Pieces by length are embedded in another order than that of the batch.
        return view.sorted is None and self._parts.progress.size >= view.length

    def begin(self) -> None:
        """Put the gradients aside that are there."""
        gradients = self._parts.gradients
        gradients.put_aside(gradients.leaves())

    def embed(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return `fn`, run without a graph in the first of two passes, but for its first piece."""

        def run(piece: Any, *args: Any, **kwargs: Any) -> Any:
            graph = self._whole or self._trained is None or self._cache is not None
            with torch.set_grad_enabled(graph):
                return fn(piece, *args, **kwargs)

        return run

    def translate(self, attempt: Attempt, value: Any) -> Any:
        """Return the embeddings of a piece to keep, or the scalar from which it runs backward."""
        _check_rows(value, len(attempt))
        if self._whole:
            return self._loss_of_whole(value)
        if self._cache is None:
            if self._trained is None:
                self._trained = self._with_graph(value)
            return map_tensors(value, _alone)
        return self._cache.surrogate(value, attempt.piece)

    def _with_graph(self, value: Any) -> list[bool]:
        """Return which tensors of the first piece have a graph, and let go of it."""
        trained = [tensor.requires_grad for tensor in tensors_in(value)]
        if not any(trained):
            raise LossError(FROZEN)
        self._parts.hooks.drop_graph(())  # no backward frees it
        return trained

    def _loss_of_whole(self, embeddings: Any) -> Tensor:
        parts = self._parts
        resources, profile = parts.resources, parts.profile
        buffers, modes = self._buffers(), resources.model.training()
        loss, outputs = read_loss(self._loss_fn(embeddings), self._place())
        self._check_state(buffers, modes_changed=resources.model.training() != modes)
        if not profile.census_taken or profile.extra_leaves:
            parts.gradients.put_aside(leaves_of_whole(embeddings, loss))
        self._loss = loss.detach(), outputs
        return loss

    def restarted(self, failed: Pass) -> Pass:
        """Return the first pass. After a failure in the second, both run again."""
        if failed.training and not self._whole:
            self._parts.progress.count_replayed(self._parts.batch.view.length)
        return self._start_first()

    def _start_first(self) -> Pass:
        self._cache = self._loss = self._left = None
        self._whole = False
        self._failures = self._parts.progress.failures
        return _FIRST

    def after(self, ended: Pass) -> Pass | None:
        """Return the second pass after the first, or the first once more.

        The first runs again where the second is bound to its pieces and they have several sizes.
        """
        if ended.training:
            return None
        parts = self._parts
        bound = self._is_bound()
        if bound and parts.progress.failures > self._failures:
            parts.progress.restart()
            parts.snapshot.restore()
            return self._start_first()
        cache = self._differentiate()
        parts.snapshot.restore()
        parts.progress.rewind()
        parts.report.restart_peak()  # neither the first pass nor the loss shows what the rest needs
        self._cache = cache
        return Pass(training=True, outputs=None, bound=bound, adds_up=False)

    def _is_bound(self) -> bool:
        """Return whether a sample's embedding can depend on its piece, as far as is known.

        Raises:
            BatchError: the first pass has changed the batch.
        """
        parts, profile = self._parts, self._parts.profile
        if parts.edits.found():
            raise BatchError(
                "embed_fn changes its samples in place, and they are embedded twice: work on a "
                "copy (x = x.clone()) inside embed_fn. From the next call on pieces are copies"
            )
        profile.learn_draws(parts.snapshot.drew_since_start())
        profile.learn_normalises(parts.resources.model.normalises_batch())
        replay = parts.resources.settings.recovery.replay
        return profile.mixes or not profile.census_taken or replay == "isolate"

    # ------------------------------------------------------------------ between the passes

    def _differentiate(self) -> EmbeddingCache:
        """Run the loss over all embeddings. Its failures need room, and no smaller pieces."""
        parts = self._parts
        resources, progress = parts.resources, parts.progress
        check_not_overwritten([attempt.outputs for attempt in progress.committed])
        pad = resources.settings.pad
        pad = Apart.APART if pad is None else pad  # ragged ones are refused below
        result = parts.report.result(progress, progress.in_order(), None, pad)
        embeddings = resources.retry("join the embeddings on the device", lambda: result.outputs)
        samples = parts.batch.view.length
        _check_rows(embeddings, samples)
        progress.drop_committed()
        streams = resources.streams.read(hosts=True)
        buffers, modes = self._buffers(), resources.model.training()
        left = LeftByLoss(resources.model.every)

        def attempt() -> EmbeddingCache:
            left.undo()
            parts.gradients.clear_backward()  # of an attempt before this one
            resources.model.restore(modes)
            resources.streams.restore(streams)
            return self._run_loss(embeddings)

        cache = resources.retry(
            f"run loss_fn over the embeddings of {samples} samples, whose memory no micro-batch "
            "changes (take a smaller batch, or compute the loss block by block)",
            attempt,
        )
        parts.gradients.check(first=False)
        self._check_state(buffers, modes_changed=resources.model.training() != modes)
        resources.retry("copy what loss_fn has changed", left.end)
        self._left = left
        self._embedded = streams
        self._ended = resources.streams.read(hosts=True)
        parts.gradients.put_aside(leaf for leaf, _ in cache.own)
        return cache

    def _run_loss(self, embeddings: Any) -> EmbeddingCache:
        settings, view = self._parts.resources.settings, self._parts.batch.view
        trained = self._trained
        assert trained is not None
        by_length = view.sorted
        order = None if by_length is None else by_length.order
        by_sample = settings.gradients.draws == "sample"
        draws = SampleDraws(0, view.length) if by_sample else nullcontext()
        guard = self._parts.resources.guard or nullcontext()
        with torch.enable_grad(), draws, guard:
            return EmbeddingCache(
                embeddings, trained, self._loss_fn, order, settings.scaler, self._place()
            )

    def _place(self) -> Place:
        """Return the place of the outputs that come with the loss."""
        view = self._parts.batch.view
        return place_of(self._parts.resources.settings.outputs, view.tensors, view.length)

    def _check_state(self, buffers: list[tuple[int, int]], *, modes_changed: bool) -> None:
        """Refuse a loss that has changed modes or buffers: the second pass starts from others."""
        if modes_changed:
            raise MisuseError(
                "loss_fn switched a module's mode, and the second pass would run in another one "
                "than the first: switch it outside the call"
            )
        if self._buffers() != buffers:
            raise MisuseError(
                "loss_fn changed a buffer of the model (a queue, running statistics), and the "
                "second pass starts from the buffers that the first one started from: compute in "
                "embed_fn what changes buffers, or change them after the call"
            )

    def _buffers(self) -> list[tuple[int, int]]:
        """Return all buffers with their versions."""
        owned = [
            buffer
            for module in self._parts.resources.model.every
            for buffer in module._buffers.values()
            if buffer is not None
        ]
        return [(id(buffer), -1 if buffer.is_inference() else buffer._version) for buffer in owned]

    # ------------------------------------------------------------------ the end of the call

    def finish(self, result: StepResult) -> StepResult:
        """Leave streams and state as the loss has left them, and add gradients to those put aside.

        Raises:
            ReplayUnsafeError: the second pass has drawn other random numbers than the first.
        """
        parts, streams = self._parts, self._parts.resources.streams
        if self._loss is not None:
            parts.gradients.take_back()
            return of_batch(result, *self._loss)
        embedded, ended, cache, left = self._embedded, self._ended, self._cache, self._left
        assert embedded is not None
        assert ended is not None
        assert cache is not None
        assert left is not None
        expected = embedded if streams.draws_on_host else embedded._replace(hosts=None)
        retry = parts.resources.retry
        if not retry("compare the embeddings of both passes", cache.embeds_the_same):
            raise ReplayUnsafeError(
                "embed_fn gave other embeddings when it ran again, so its gradient is not "
                "that of the embeddings which the loss has seen: name each generator of your "
                "own that it draws from, recovery=RecoveryOptions(generators=[g]), and do not "
                "ask torch.is_grad_enabled()"
            )
        if retry("read the random streams", lambda: streams.moved(expected)):
            raise ReplayUnsafeError(
                "embed_fn drew other random numbers when it ran again, so its gradient is not "
                "that of the embeddings which the loss has seen: does it ask "
                "torch.is_grad_enabled(), or draw in its backward?"
            )
        retry(
            "put the random streams to where the loss has left them",
            lambda: streams.restore(ended),
        )
        retry("put the state in place that the loss has left", left.put)
        parts.gradients.take_back()
        return of_batch(result, cache.loss, cache.outputs)

    def close(self) -> None:
        """Drop the embeddings, their gradients, and what the loss has left."""
        self._cache = self._loss = self._left = None


class Unweighted(Counts):
    """Counts of a batch whose pieces add up as they are: the loss has weighed its samples."""

    def weights(self, start: int, stop: int, reduction: str = "mean") -> dict[str | None, float]:
        """Return the weight 1 for every piece."""
        return {None: 1.0}


def _alone(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy of a view that would keep a larger tensor alive.

    The first token's state of a transformer is a view of all states.
    """
    tensor = tensor.detach()
    dense = tensor.layout is torch.strided
    if dense and tensor.untyped_storage().nbytes() > tensor.nbytes:
        return tensor.clone()
    return tensor


def _check_rows(value: Any, samples: int) -> None:
    """Refuse embeddings that have not one row per sample."""
    found = tensors_in(value)
    rows = all(tensor.ndim > 0 and tensor.shape[0] == samples for tensor in found)
    if rows and any(map(has_gradient, found)):
        return
    shapes = ", ".join(f"{tensor.dtype} of shape {tuple(tensor.shape)}" for tensor in found[:8])
    raise LossError(
        f"embed_fn returned a {type(value).__name__} with {shapes or 'no tensor'} for {samples} "
        f"samples: it returns embeddings, a row per sample, as a tensor of shape ({samples}, ...), "
        "or a tuple or dict of such tensors. Compute in loss_fn what comes once per batch"
    )
