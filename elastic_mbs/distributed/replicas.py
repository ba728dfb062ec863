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
from elastic_mbs.distributed.ranks import WHAT, Agreed, Ranks
from elastic_mbs.distributed.sums import Sums
from elastic_mbs.distributed.wrappers import Quiet, check, check_again
from elastic_mbs.engine.shared.peers import Gradients
from elastic_mbs.engine.shared.trained_model import TrainedModel
from elastic_mbs.errors import PeerError, UnsupportedError
from elastic_mbs.options import Settings


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
        self._generation = -1  # of the model's leaves, for which `_leaves` is
        self._leaves: list[Tensor] = []  # that are summed: the same on every rank, in one order
        self._is_plain = settings.plain  # the gradient is the loss's alone: no scaler
        self._refresh(model)  # refuses other leaves before anybody waits
        self._buffers = Buffers(wrappers)
        super().__init__(wrappers[0].process_group, model, settings, retry)
        self._overlap = settings.distributed.overlap
        self._buckets = Buckets([])
        # A sum in the user's group can keep the process alive for as long as that group waits.
        self._data = self._control.connect("data") if self._on_host else self._group
        self._sums = Sums(self._buckets, self._data)
        self._agreed: Sums | None = None  # the ones for whose leaves all ranks have met
        self._anew = True  # sums that were sent are not this call's gradient
        self._modules: list[nn.Module] = []  # of the model, for which `_buffers` are
        self._make_room()
        self._warm_up()
        self._prepared = True  # this call's gradients are its alone

    def _refresh(self, model: TrainedModel) -> None:
        """Follow the model's trainable leaves."""
        if self._generation == model.generation:
            return
        leaves = model.leaves
        inside = {id(each) for ddp in self._wrappers for each in torch_private.parameters_of(ddp)}
        outside = [leaf for leaf in leaves if id(leaf) not in inside]
        if outside:
            raise UnsupportedError(self._why_outside(outside[0], model))
        self._leaves = list(leaves)
        self._generation = model.generation
        # A scaler has found its factor with other weights, and half precision has small numbers.
        in_half = any(leaf.dtype is torch.float16 for leaf in leaves)
        self._divides = self._is_plain and not in_half

    def _why_outside(self, leaf: Tensor, model: TrainedModel) -> str:
        """Return the reason why a leaf is trained without DDP, and the way out."""
        name = model.name_of(leaf)
        for ddp in self._wrappers:
            for place, parameter in ddp.module.named_parameters():
                if parameter is leaf and place in torch_private.ignored(ddp):
                    return (
                        f"DDP was told to ignore {name}, which is trained, so each rank would have "
                        "a gradient of its own: leave it out of "
                        "_set_params_and_buffers_to_ignore_for_model, or freeze it"
                    )
                if parameter is leaf:
                    return (
                        f"{name} was put into the module after DDP had wrapped it, so ranks may "
                        "begin with different values: make the DistributedDataParallel when the "
                        "model is complete"
                    )
        return (
            f"{name} is trained and in no DDP wrapper, so ranks may begin with different values: "
            "wrap its module, too, ElasticMBS([ddp, DistributedDataParallel(other)])"
        )

    def _make_room(self) -> None:
        """Have memory for all sums, so that nothing is allocated after a meeting."""
        leaves = self._leaves
        if self._buckets.leaves is not leaves:
            # The old memory is gone before the new is made, unless the others still sum in it.
            self._buckets = Buckets([])
            self._sums = Sums(self._buckets, self._data)
            self._make_common_room(leaves)
            buckets = Buckets(leaves, overlap=self._overlap)
            self._sums = Sums(buckets, self._data)
            self._buckets = buckets  # last: it tells that all is there
        modules = self._model.modules  # another list, once it has changed
        self._buffers.refresh(modules_changed=modules is not self._modules)
        self._modules = modules

    def _warm_up(self) -> None:
        """Make one sum, so that the group has its connections before memory is short."""
        self._losses.fill_(1.0)
        self._wait(torch_private.all_reduce(self._data, self._losses))
        found = float(self._losses[0])
        if found != self._control.size:
            raise PeerError(
                f"a sum of ones over {self._control.size} ranks was {found:g}: the process group "
                "does not work"
            )

    # ------------------------------------------------------------------ one call

    def begin(self) -> None:
        """Begin a training call; see `Peers`."""
        self._come_back()
        if self._agreed is not None:  # first: from `begin` on an error of this rank sends sums
            self._agreed.begin(self._wait)
        super().begin()
        self._prepared = self._anew = False
        for ddp in self._wrappers:
            check_again(ddp)

    def before_backward(self, gradients: Gradients, *, last: bool) -> None:
        """Put gradients aside that were there; let the last backward send what is whole."""
        self._put_aside(gradients)
        sums = self._agreed
        if sums is None:
            return
        self._anew = self._anew or sums.sent > 0  # the batch has started over
        if last and gradients.settled and not self._anew:
            sums.arm(self._weight())
        else:
            sums.disarm()

    def after_backward(self, *, last: bool) -> None:
        """Send what is whole now, and what the others wait for; see `Peers`."""
        if self._agreed is not None and self._agreed.armed:
            self._send_ahead()

    def _put_aside(self, gradients: Gradients) -> None:
        """Put gradients aside that were there: `.grad` is this call's alone."""
        if self._prepared:
            return
        self._prepared = True
        if not gradients.settled:  # there may be some
            gradients.put_aside(self._model.leaves)

    def _prepare_sums(self, gradients: Gradients) -> None:
        """Have the gradients of this call alone, and memory for their sums."""
        self._put_aside(gradients)
        self._refresh(self._model)
        self._check_gradients(gradients)
        self._retry(WHAT, self._make_room)

    def _send_ahead(self) -> None:
        """Send what is sent before the ranks meet."""
        if self._agreed is not None:
            self._agreed.send_ahead(self._weight(), self._retry)

    def _again(self) -> bool:
        """Return whether sums that were sent are not this call's gradient."""
        return self._anew or self._agreed is not self._sums

    def _used(self) -> bytes:
        """Return for each leaf that is summed whether it has a gradient."""
        return self._buckets.used()

    def _form_of_buffers(self) -> float:
        """Return a checksum of the buffers that rank 0 sends."""
        return self._buffers.form

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

    def _sum_gradients(self, agreed: Agreed) -> None:
        """Finish the sums that were sent before the ranks have met, or make them all."""
        sent, self._agreed = self._agreed, self._sums
        if agreed.again and sent is not None:
            sent.begin(self._wait)
        self._sums.finish(agreed.before, agreed.after, self._wait, self._retry)

    def _finish_sums(self, totals: list[Tensor], sums: list[float]) -> None:
        """Put the losses in `totals`, and send the buffers of rank 0."""
        super()._finish_sums(totals, sums)
        if self._control.size > 1:
            self._buffers.send(self._data, self._control.rank, self._wait, self._retry)

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
