"""The forward and backward of a piece, and the optimizer's step, on fake tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from elastic_mbs.batch.containers import tensors_in
from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.loss_terms import check_graph, read_losses, weighted_sum
from elastic_mbs.batch.transfer import to_device
from elastic_mbs.batch.view import BatchView, map_tensors
from elastic_mbs.engine.shared.resources import Resources
from elastic_mbs.escalation.ladder import Step
from elastic_mbs.optimizer.known import is_independent
from elastic_mbs.optimizer.reach import Reach
from elastic_mbs.planning.fakes import Fakes, step_of, storage_bytes
from elastic_mbs.planning.interrupts import held_back
from elastic_mbs.planning.lines import Trace
from elastic_mbs.planning.timeline import Timeline
from elastic_mbs.planning.values import Values
from elastic_mbs.planning.ways import NONE, made
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

    def piece(self, size: int, way: Step = NONE, *, count: bool = False) -> Trace:
        """Trace a piece of `size` into empty gradients, which stay.

        With `count` the work is counted.
        """
        with held_back():
            return self._piece(size, way, count=count)

    def _piece(self, size: int, way: Step, *, count: bool) -> Trace:
        values = Values(self.fakes.mode)
        counter = flops_of if count else None
        timeline = Timeline(self.context.devices[0], self.fakes.mode, counter, values=values)
        start, stop, exact = self.view.example(size)
        for real in self.fakes.tables:
            values.know(self.fakes(real), real)
        data = self._data(start, stop, values)
        # a batch can require grad: taken whole it is among the fakes, and else its own leaf
        inputs = [t for t in (*tensors_in(data), *self.view.tensors) if t.requires_grad]
        hooks = self._emptied(inputs, timeline)
        try:
            with (
                _gradients_may_be_asked_for(inputs),
                _rnn_in_operations(self.context.model.modules),
                self.fakes.mode,
                timeline,
                torch.inference_mode(False),
                torch.enable_grad(),
            ):
                data = to_device(data, self.context.piece_device)
                with made(way, self.context, data, timeline) as moved:
                    value = self.loss_fn(data)  # kept during backward, as a call keeps it
                    terms, _ = read_losses(value, self.counts.names)
                    check_graph(terms)
                    self._backward(weighted_sum(terms, self._weights()))
        finally:
            drop_unrun()
            torch.clear_autocast_cache()  # around loss_fn, it holds casts of fakes
            for hook in hooks:
                hook.remove()
        timeline.note()  # the last leaf has its gradient only now
        return Trace(
            exact,
            timeline.operations,
            timeline.points,
            timeline.flops,
            0 if moved is None else moved.bytes,
        )

    def _weights(self) -> Mapping[str | None, float]:
        """Return a weight for each loss: fakes have no values, so none may be left out."""
        return dict.fromkeys(self.counts.names or (None,), 1.0)

    def _data(self, start: int, stop: int, values: Values) -> Any:
        """Return some samples as fakes, and note the values that are known."""

        def faked(real: Tensor) -> Tensor:
            fake = self.fakes(real)
            values.know_labels(fake, real)
            return fake

        return map_tensors(self.view.piece(start, stop), faked)

    def _emptied(self, inputs: list[Tensor], timeline: Timeline) -> list[RemovableHandle]:
        """Empty the gradients, and return hooks that note when they are made."""
        for leaf in self.leaves():
            leaf.grad = None
        return [
            leaf.register_post_accumulate_grad_hook(timeline.committed)
            for leaf in dict.fromkeys([*self.leaves(), *filter(_is_leaf, inputs)])
        ]

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
        device, known = self.context.devices[0], is_independent(optimizer)
        try:
            # objects of the optimizer's own are not copied, and the step changes them
            reach = Reach(optimizer, [optimizer], deep=not known)
            run, state = step_of(optimizer, self.fakes)
            before = storage_bytes(state(), device)
            with (
                held_back(),
                self.fakes.mode,
                Timeline(device, self.fakes.mode, any_value=known) as timeline,
                torch.no_grad(),
            ):
                try:
                    run()
                finally:
                    reach.restore()
        except Exception as error:
            raise UntraceableStepError(f"{type(error).__name__}: {error}") from None
        after = storage_bytes(state(), device)
        return after, max((point.live for point in timeline.points), default=0) - (after - before)


_is_leaf = attrgetter("is_leaf")


@contextmanager
def _gradients_may_be_asked_for(inputs: Sequence[Tensor]) -> Iterator[None]:
    """Let torch look for gradients of parts of a batch: it warns, and a warning can be an error."""
    with warnings.catch_warnings() if inputs else nullcontext():
        if inputs:
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
        yield


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
