"""Replicas of one model on many ranks (DDP): each runs its own samples alone.

Their gradients are summed once, at the end of the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import compress

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from elastic_mbs.distributed import torch_private
from elastic_mbs.distributed.buckets import Buckets
from elastic_mbs.distributed.buffers import Buffers
from elastic_mbs.distributed.control import Place, Retry
from elastic_mbs.distributed.overlap import Overlap
from elastic_mbs.distributed.ranks import WHAT, Ranks
from elastic_mbs.distributed.wrappers import Quiet, check, check_not_joining
from elastic_mbs.engine.shared.peers import Gradients
from elastic_mbs.engine.shared.trained_model import TrainedModel
from elastic_mbs.errors import PeerError, UnsupportedError
from elastic_mbs.options import Settings

_RANGE = 8  # sums that were sent are made again where they would be scaled up by more than that


class Replicas(Ranks):
    """The other ranks of a DDP model."""

    _wrapper = "wrap that in DDP and give it in model=[…]"

    def __init__(
        self,
        wrappers: Sequence[DDP],
        model: TrainedModel,
        settings: Settings,
        retry: Retry,
        hooks: tuple[AbstractContextManager[object], ...] = (),
    ) -> None:
        """Refuse what would not be trained right, meet the other ranks, and make the buckets.

        Args:
            wrappers: the DDP modules.
            model: the modules that the user gave.
            settings: the options.
            retry: runs an operation of ours that can run out of memory.
            hooks: in place while a step function runs, besides those of the wrappers.

        Raises:
            UnsupportedError: a hook, a mode or an option that would not be trained right.
        """
        _check(wrappers)
        self.hooks = (Quiet(wrappers), *hooks)
        self._wrappers = wrappers
        ignored = (_ignored(ddp) for ddp in wrappers)
        self._ignored: set[int] = set().union(*ignored)
        self._generation = -1  # of the model's leaves, for which `_leaves` is
        self._leaves: list[Tensor] = []  # that are summed: the same on every rank, in one order
        self._refresh(model)  # refuses other leaves before anybody waits
        self._buffers = Buffers(wrappers, self._ignored)
        super().__init__(wrappers[0].process_group, model, settings, retry)
        self._overlaps = settings.distributed.overlap
        self._buckets = Buckets([])
        self._overlap: Overlap | None = None  # of `_buckets`
        self._agreed: Overlap | None = None  # the one for whose leaves all ranks have met
        self._reference = 0.0  # the counts of all ranks by which sums that are sent are weighed
        self._anew = True  # sums that were sent are not this call's gradient
        self._correction = 1.0  # of sums that were sent, to those of this call
        self._modules: list[nn.Module] = []  # of the model, for which `_buffers` are
        self._make_room()
        self._warm_up()
        self._prepared = True  # this call's gradients are its alone

    def _refresh(self, model: TrainedModel) -> None:
        """Follow the model's trainable leaves."""
        if self._generation == model.generation:
            return
        leaves = model.leaves
        inside = {id(each) for ddp in self._wrappers for each in ddp.module.parameters()}
        outside = [leaf for leaf in leaves if id(leaf) not in inside]
        if outside:
            raise UnsupportedError(
                f"{model.name_of(outside[0])} is trained and in no DDP wrapper, so ranks "
                "may begin with different values: wrap its module, too, "
                "ElasticMBS([ddp, DistributedDataParallel(other)])"
            )
        self._leaves = [leaf for leaf in leaves if id(leaf) not in self._ignored]
        self._generation = model.generation

    def _make_room(self) -> None:
        """Have memory for all sums, so that nothing is allocated after a meeting."""
        leaves = self._leaves
        if self._buckets.leaves is not leaves:
            # The old memory is gone before the new is made, unless the others still sum in it.
            self._buckets, self._overlap = Buckets([]), None
            self._make_common_room(leaves)
            buckets = Buckets(leaves, turns=not self._overlaps)
            if self._overlaps:
                self._overlap = Overlap(buckets, self._group)
            self._buckets = buckets  # last: it tells that all is there
        modules = self._model.modules  # another list, once it has changed
        self._buffers.refresh(modules_changed=modules is not self._modules)
        self._modules = modules

    # ------------------------------------------------------------------ one call

    def begin(self) -> None:
        """Begin a training call; see `Peers`."""
        super().begin()
        self._prepared = self._anew = False
        if self._agreed is not None:
            self._agreed.begin(self._wait)
        for ddp in self._wrappers:
            check_not_joining(ddp)

    def before_backward(self, gradients: Gradients, *, last: bool) -> None:
        """Put gradients aside that were there; let the last backward send what is whole."""
        self._put_aside(gradients)
        overlap = self._agreed
        if overlap is None:
            return
        self._anew = self._anew or overlap.sent > 0  # the batch has started over
        if last and gradients.settled and not self._anew:
            overlap.arm(self._weight())
        else:
            overlap.disarm()

    def _put_aside(self, gradients: Gradients) -> None:
        """Put gradients aside that were there: `.grad` is this call's alone."""
        if self._prepared:
            return
        self._prepared = True
        if not gradients.settled:  # there may be some
            gradients.put_aside(self._model.leaves)

    def _weight(self) -> float:
        """Return the weight of this rank's gradient before the counts of the others are known."""
        return 1.0 if self._named else self._counts / self._reference

    def _prepare_sums(self, gradients: Gradients) -> None:
        """Have the gradients of this call alone, and memory for their sums."""
        self._put_aside(gradients)
        self._refresh(self._model)
        self._check_gradients(gradients)
        self._retry(WHAT, self._make_room)

    def _send_ahead(self) -> None:
        """Send all that hooks have not sent, before the ranks meet."""
        if self._agreed is not None:
            self._agreed.send_rest(self._weight(), self._retry)

    def _again(self) -> bool:
        """Return whether sums that were sent are not this call's gradient."""
        return self._anew or self._agreed is not self._overlap

    def _judge(self, total: float, *, again: bool) -> None:
        """Decide, the same on every rank, whether the sums that were sent are the gradient's.

        They are too large, or too small for half precision, where counts have changed by much.
        """
        agreed, self._agreed = self._agreed, self._overlap
        fits = self._named or total <= self._reference <= _RANGE * total
        self._anew = agreed is None or again or not fits
        self._correction = 1.0 if self._named or self._anew else self._reference / total
        if not fits:
            self._reference = total
        if self._anew and agreed is not None:
            agreed.begin(self._wait)

    def _used(self) -> bytes:
        """Return for each leaf that is summed whether it has a gradient."""
        return self._buckets.used()

    def _use_all(self, used: bytes) -> None:
        """Make the gradients that another rank has: every optimizer is to make the same step."""
        problem: Exception | None = None

        def fill() -> None:
            for leaf in compress(self._leaves, wanted):
                if leaf.grad is None:
                    leaf.grad = torch.zeros_like(leaf)

        wanted = self._gather_maps(used)
        try:
            self._retry("make the gradients that other ranks have", fill)
        except Exception as error:
            problem = error
        self._meet(Place.LEAVES, own=problem)

    def _sum_gradients(self, factor: float) -> None:
        """Sum the buckets, or take the sums that were sent before the ranks have met."""
        if self._anew or self._overlap is None:
            self._buckets.sum(factor, self._group, self._wait, self._retry)
        else:
            self._overlap.take(self._correction, self._wait, self._retry)

    def _finish_sums(self, totals: list[Tensor], sums: list[float]) -> None:
        """Put the losses in `totals`, and send the buffers of rank 0."""
        super()._finish_sums(totals, sums)
        if self._control.size > 1:
            self._buffers.send(self._group, self._control.rank, self._wait, self._retry)

    def _keep_sums(self, gradients: Gradients) -> None:
        """Add the sums to the gradients that were there."""
        gradients.take_back()

    def _send_anything(self) -> None:
        """Send what the others wait for in a call that has failed."""
        if self._agreed is None:
            return
        try:
            self._agreed.send_anything()
        except Exception as error:
            self._control.lose(f"{type(error).__name__} kept a sum from its begin: {error}")
            raise PeerError(self._control.broken) from None

    def _send_for_others(self) -> None:
        """Send what the others wait for in a call that this rank does not make."""
        if self._agreed is not None:
            self._agreed.begin(self._wait)
            self._send_anything()


def _check(wrappers: Sequence[DDP]) -> None:
    """Refuse wrappers that would not be trained right."""
    for ddp in wrappers:
        check(ddp)
    if len({id(ddp.process_group) for ddp in wrappers}) > 1:
        raise UnsupportedError(
            "the DDP models have different process groups: give each a runtime of its own, or "
            "wrap both with the same process_group="
        )


def _ignored(ddp: DDP) -> set[int]:
    names = torch_private.ignored(ddp)
    found = [*ddp.module.named_parameters(), *ddp.module.named_buffers()] if names else []
    return {id(tensor) for name, tensor in found if name in names}
