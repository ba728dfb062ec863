"""The forward and backward of a piece, and the optimizer's step, on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import Optimizer

from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.loss_terms import check_graph, read_losses, weighted_sum
from elastic_mbs.batch.transfer import to_device
from elastic_mbs.batch.view import BatchView, map_tensors
from elastic_mbs.engine.shared.resources import Resources
from elastic_mbs.planning.fakes import Fakes, step_of, storage_bytes
from elastic_mbs.planning.lines import Trace
from elastic_mbs.planning.timeline import Timeline
from elastic_mbs.planning.ways import Way, made
from elastic_mbs.planning.work import flops_of
from elastic_mbs.rollback.graph import drop_unrun, walk


class UntraceableStepError(Exception):
    """The optimizer's step does not run on fake tensors."""


@dataclass
class Tracer:
    """Tracer of pieces of a batch. The model is made of fakes meanwhile."""

    context: Resources
    view: BatchView
    counts: Counts
    loss_fn: Callable[[Any], Any]
    fakes: Fakes
    timelines: list[Timeline] = field(default_factory=list)

    def piece(self, size: int, way: Way = Way.NONE, *, count: bool = False) -> Trace:
        """Trace the first `size` samples into empty gradients, which stay.

        With `count` the work is counted.
        """
        timeline = Timeline(self.context.devices[0], flops_of if count else None)
        self.timelines.append(timeline)
        data = map_tensors(self.view.piece(0, size), self.fakes)
        # fakes have no values, so all that matters is that no loss is left out
        weights = dict.fromkeys(self.counts.names or (None,), 1.0)
        hooks = [
            leaf.register_post_accumulate_grad_hook(timeline.committed) for leaf in self.leaves()
        ]
        for leaf in self.leaves():
            leaf.grad = None
        try:
            with (
                _rnn_in_operations(self.context.model.modules),
                self.fakes.mode,
                timeline,
                torch.inference_mode(False),
                torch.enable_grad(),
            ):
                data = to_device(data, self.context.piece_device)
                with made(way, self.context, data, timeline) as moved:
                    value = self.loss_fn(data)
                    terms, _ = read_losses(value, self.counts.names)
                    check_graph(terms)
                    self._backward(weighted_sum(terms, weights))
        finally:
            drop_unrun()
            torch.clear_autocast_cache()  # around loss_fn, it holds casts of fakes
            for hook in hooks:
                hook.remove()
        timeline.note()  # the last leaf has its gradient only now
        return Trace(
            size,
            timeline.operations,
            timeline.points,
            timeline.flops,
            0 if moved is None else moved.bytes,
        )

    def leaves(self) -> list[Tensor]:
        return [self.fakes(leaf) for leaf in self.context.model.leaves]

    def _backward(self, loss: Tensor) -> None:
        """Run backward, with the real gradients of leaves outside the model set aside."""
        assert loss.grad_fn is not None
        outside = [
            (leaf, leaf.grad)
            for leaf in walk(loss.grad_fn).leaves
            if not isinstance(leaf, FakeTensor)
        ]
        try:
            for leaf, _ in outside:
                leaf.grad = None
            torch.autograd.backward(loss)
        finally:
            for leaf, grad in outside:
                leaf.grad = grad

    def step(self, optimizer: Optimizer) -> tuple[int, int]:
        """Return the bytes of the optimizer's state, and of its step's peak beyond that.

        Gradients, of the last piece, are in neither.
        """
        device = self.context.devices[0]
        try:
            run, state = step_of(optimizer, self.fakes)
            before = storage_bytes(state(), device)
            with self.fakes.mode, Timeline(device) as timeline, torch.no_grad():
                run()
        except Exception as error:
            raise UntraceableStepError(f"{type(error).__name__}: {error}") from None
        after = storage_bytes(state(), device)
        return after, max((point.live for point in timeline.points), default=0) - (after - before)


@contextmanager
def _rnn_in_operations(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Disable cuDNN's RNN inside the block, if there is one: its fake omits the saved workspace."""
    before = torch.backends.cudnn.enabled
    try:
        if any(isinstance(module, nn.RNNBase) for module in modules):
            torch.backends.cudnn.enabled = False
        yield
    finally:
        torch.backends.cudnn.enabled = before
