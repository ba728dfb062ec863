"""Replicas of one model on many ranks (DDP): each runs its own samples alone.

Their gradients are summed once, at the end of the call.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import compress
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from elastic_mbs.batch.counts import Counts
from elastic_mbs.distributed import torch_private
from elastic_mbs.distributed.buckets import Buckets
from elastic_mbs.distributed.buffers import Buffers
from elastic_mbs.distributed.control import VALUES, Control, Place, Retry, Row
from elastic_mbs.distributed.overlap import Overlap
from elastic_mbs.distributed.wrappers import Quiet, check, check_not_joining
from elastic_mbs.engine.outcome.result import StepResult, has_loss, with_losses
from elastic_mbs.engine.shared.peers import Gradients
from elastic_mbs.engine.shared.trained_model import TrainedModel
from elastic_mbs.errors import (
    CountError,
    ElasticMBSError,
    MisuseError,
    PeerError,
    UnsupportedError,
)
from elastic_mbs.options import Settings

_WHAT = "make room for the sums of gradients over the ranks"
_RANGE = 8  # sums that were sent are made again where they would be scaled up by more than that


class Replicas:
    """The other ranks of a DDP model, as `elastic_mbs.engine.shared.peers.Peers`.

    Attributes:
        alone: False: a rank may have no batch.
        hooks: keep the wrappers quiet while a step function runs.
        about: what a run log says of this rank.
    """

    alone = False

    def __init__(
        self, wrappers: Sequence[DDP], model: TrainedModel, settings: Settings, retry: Retry
    ) -> None:
        """Refuse what would not be trained right, meet the other ranks, and make the buckets.

        Args:
            wrappers: the DDP modules.
            model: the modules that the user gave.
            settings: the options.
            retry: runs an operation of ours that can run out of memory.

        Raises:
            UnsupportedError: a hook, a mode or an option that would not be trained right.
        """
        _check(wrappers, settings)
        self.hooks: tuple[AbstractContextManager[object], ...] = (Quiet(wrappers),)
        self._wrappers = wrappers
        self._model = model
        self._retry = retry
        self._group: dist.ProcessGroup = wrappers[0].process_group
        # Sums of host memory are gloo's, whose waits can end; those of a device wait in its stream.
        self._on_host = all(device.type == "cpu" for device in model.devices())
        self._timeout = settings.distributed.timeout
        self._overlaps = settings.distributed.overlap
        # Totals are those of all ranks from the start: loss_fn divides by them itself.
        self._sums = settings.reduction == "sum"
        ignored = (_ignored(ddp) for ddp in wrappers)
        self._ignored: set[int] = set().union(*ignored)
        self._generation = -1  # of the model's leaves, for which `_leaves` is
        self._leaves: list[Tensor] = []  # that are summed: the same on every rank, in one order
        self._refresh()  # refuses other leaves before anybody waits
        self._buffers = Buffers(wrappers, self._ignored)
        self._control = self._connect()
        self.about = self._control.about
        self._buckets = Buckets([])
        self._overlap: Overlap | None = None  # of `_buckets`
        self._agreed: Overlap | None = None  # the one for whose leaves all ranks have met
        self._reference = 0.0  # the counts of all ranks by which sums that are sent are weighed
        self._again = True  # sums that were sent are not this call's gradient
        self._correction = 1.0  # of sums that were sent, to those of this call
        self._losses = torch.zeros(VALUES, dtype=torch.float64)
        self._places: list[Tensor] = []  # of each loss in `_losses`
        self._modules: list[nn.Module] = []  # of the model, for which `_buffers` are
        self._maps: list[Tensor] = []  # of each rank: which leaves have gradients
        self._make_room()
        self._warm_up()
        self._counts = 1.0  # of this rank in this call
        self._named = False  # pieces are weighed among all ranks, so gradients are only added
        self._names: tuple[str, ...] = ()  # of the losses of this call
        self._met = True  # this call has had its meeting
        self._prepared = True  # this call's gradients are its alone

    def _connect(self) -> Control:
        return Control(self._group, self._model.devices()[0], self._timeout, self._retry)

    def _refresh(self) -> None:
        """Follow the model's trainable leaves."""
        if self._generation == self._model.generation:
            return
        leaves = self._model.leaves
        inside = {id(each) for ddp in self._wrappers for each in ddp.module.parameters()}
        outside = [leaf for leaf in leaves if id(leaf) not in inside]
        if outside:
            raise UnsupportedError(
                f"{self._model.name_of(outside[0])} is trained and in no DDP wrapper, so ranks "
                "may begin with different values: wrap its module, too, "
                "ElasticMBS([ddp, DistributedDataParallel(other)])"
            )
        self._leaves = [leaf for leaf in leaves if id(leaf) not in self._ignored]
        self._generation = self._model.generation

    def _make_room(self) -> None:
        """Have memory for all sums, so that nothing is allocated after a meeting."""
        leaves = self._leaves
        if self._buckets.leaves is not leaves:
            # The old memory is gone before the new is made, unless the others still sum in it.
            self._buckets, self._overlap = Buckets([]), None
            self._maps = list(torch.zeros(self._control.size, len(leaves), dtype=torch.uint8))
            self._signature = float(zlib.crc32(repr(list(map(_form, leaves))).encode()))
            device = leaves[0].device if leaves else torch.device("cpu")
            kind = torch.float32 if device.type == "mps" else torch.float64
            self._losses = torch.zeros(VALUES, dtype=kind, device=device)
            self._places = list(self._losses)
            buckets = Buckets(leaves, turns=not self._overlaps)
            if self._overlaps:
                self._overlap = Overlap(buckets, self._losses, self._group)
            self._buckets = buckets  # last: it tells that all is there
        modules = self._model.modules  # another list, once it has changed
        self._buffers.refresh(modules_changed=modules is not self._modules)
        self._modules = modules

    def _warm_up(self) -> None:
        """Make one sum, so that the group has its connections before memory is short."""
        self._losses.fill_(1.0)
        self._wait(self._sum(self._losses))
        found = float(self._losses[0])
        if found != self._control.size:
            raise PeerError(
                f"a sum of ones over {self._control.size} ranks was {found:g}: the process group "
                "does not work"
            )

    def _sum(self, tensor: Tensor) -> dist.Work:
        work: dist.Work | None = dist.all_reduce(tensor, group=self._group, async_op=True)
        assert work is not None
        return work

    def _wait(self, work: dist.Work) -> None:
        """Wait for a collective of the data; on a device, only its stream waits."""
        if self._on_host:
            self._control.wait(work, Place.SUM)
            return
        try:
            work.wait()
        except RuntimeError as error:
            self._control.lose(f"a sum over the ranks has failed: {str(error)[:300]}")
            raise PeerError(self._control.broken) from None

    # ------------------------------------------------------------------ one call

    def begin(self) -> None:
        """Begin a training call; see `Peers`."""
        if self._control.broken:
            raise PeerError(self._control.broken)
        if self._control.left:  # the runtime was closed, and is used again
            batch = self._control.batch
            self._control = self._connect()
            self._control.batch = batch
        self._control.batch += 1
        self._met = self._named = self._prepared = self._again = False
        self._counts = 0.0
        if self._agreed is not None:
            self._agreed.begin(self._wait)
        for ddp in self._wrappers:
            check_not_joining(ddp)

    def share(self, counts: Counts) -> Counts:
        """Return the counts, as a part of all ranks' for a sum and for losses with names."""
        self._names = counts.names or ()
        self._named = self._sums or bool(self._names)
        totals = counts.totals()
        if not self._named:
            self._counts = totals[0]
            return counts
        if len(totals) > VALUES - 1:
            raise UnsupportedError(
                f"count has {len(totals)} losses, and ranks exchange {VALUES - 1} at most: add "
                "some of them up in loss_fn"
            )
        self._counts = 1.0
        names = float(zlib.crc32(repr(counts.names).encode()))
        rows = self._meet(Place.COUNTS, [names, *totals])
        if len({row.values[0] for row in rows}) > 1:
            raise MisuseError("the ranks have different losses in count=: give the same on all")
        everybody = [math.fsum(row.values[i] for row in rows) for i in range(1, len(totals) + 1)]
        if not self._sums:
            _check_total(everybody)
        self._met = False  # the one at the end is still to come
        return counts.among(everybody)

    def before_backward(self, gradients: Gradients, *, last: bool) -> None:
        """Put gradients aside that were there; let the last backward send what is whole."""
        self._put_aside(gradients)
        overlap = self._agreed
        if overlap is None:
            return
        self._again = self._again or overlap.sent > 0  # the batch has started over
        if last and gradients.settled and not self._again:
            overlap.arm(self._weight())
        else:
            overlap.disarm()

    def _put_aside(self, gradients: Gradients) -> None:
        """Put gradients aside that were there: `.grad` is this call's alone."""
        if not self._prepared:
            self._prepared = True
            gradients.put_aside(self._model.leaves)

    def _weight(self) -> float:
        """Return the weight of this rank's gradient before the counts of the others are known."""
        return 1.0 if self._named else self._counts / self._reference

    def meet(self, gradients: Gradients, result: StepResult) -> StepResult:
        """Make this rank's gradient and loss those of all ranks' samples.

        All that can fail on this rank alone comes before the meeting.
        """
        self._put_aside(gradients)
        self._refresh()
        self._check_gradients(gradients)
        self._retry(_WHAT, self._make_room)
        typed = has_loss(result)
        losses = self._retry(_WHAT, lambda: [result.loss, *result.losses.values()])
        count = 1 + len(self._names)
        like = losses[0] if typed else self._losses[0]
        totals = self._retry(_WHAT, lambda: [torch.empty_like(like) for _ in range(count)])
        if self._agreed is not None:
            self._put_losses(losses, self._weight())
            self._agreed.send_rest(self._weight(), self._retry)
        factor = self._agree_on_gradients()
        try:
            if self._again:
                self._add_up(losses, factor)
            else:
                self._take()
            self._finish(totals)
        except PeerError:
            raise
        except BaseException as error:  # the others cannot be told at a meeting: they add up
            self._control.lose(f"{type(error).__name__} ended a sum over the ranks: {error}")
            raise
        gradients.take_back()
        return with_losses(result, totals[0], dict(zip(self._names, totals[1:], strict=True)))

    def _check_gradients(self, gradients: Gradients) -> None:
        """Refuse gradients that no other rank would hear of."""
        own = set(map(id, self._model.leaves))
        for leaf in gradients.leaves():
            if leaf.grad is None:
                continue
            if id(leaf) not in own:
                raise UnsupportedError(
                    f"a leaf of shape {tuple(leaf.shape)} outside the model got a gradient, and "
                    "it is not known whether it is one parameter of all ranks or this rank's own: "
                    "put it in a module, wrap that in DDP and give it in model=[…]; for a "
                    "gradient of the batch itself use torch.autograd.grad in loss_fn"
                )
            if leaf.grad.layout is not torch.strided:
                raise UnsupportedError(
                    f"the gradient of {self._model.name_of(leaf)} is {leaf.grad.layout}: only "
                    "dense gradients are summed over the ranks"
                )

    def _agree_on_gradients(self) -> float:
        """Meet at the end of the batch; return this rank's share of all counts."""
        used = self._buckets.used()
        checksum = float(zlib.crc32(used))
        again = float(self._again or self._agreed is not self._overlap)
        rows = self._meet(Place.GRADIENT, [self._counts, self._signature, checksum, again])
        _check_total([row.values[0] for row in rows])
        if len({row.values[1] for row in rows}) > 1:
            raise MisuseError(
                "the ranks train different parameters (by shape, type or number): freeze and "
                "thaw the same ones on every rank"
            )
        if len({row.values[2] for row in rows}) > 1:
            self._make_missing(used)
        total = math.fsum(row.values[0] for row in rows)
        self._judge(total, again=any(row.values[3] for row in rows))
        return 1.0 if self._named else self._counts / total

    def _judge(self, total: float, *, again: bool) -> None:
        """Decide, the same on every rank, whether the sums that were sent are the gradient's.

        They are too large, or too small for half precision, where counts have changed by much.
        """
        agreed, self._agreed = self._agreed, self._overlap
        fits = self._named or total <= self._reference <= _RANGE * total
        self._again = agreed is None or again or not fits
        self._correction = 1.0 if self._named or self._again else self._reference / total
        if not fits:
            self._reference = total
        if self._again and agreed is not None:
            agreed.begin(self._wait)

    def _make_missing(self, used: bytes) -> None:
        """Make the gradients that another rank has: every optimizer is to make the same step."""
        problem: Exception | None = None

        def fill() -> None:
            wanted = map(any, zip(*map(Tensor.tolist, self._maps), strict=True))
            for leaf in compress(self._leaves, wanted):
                if leaf.grad is None:
                    leaf.grad = torch.zeros_like(leaf)

        mine = torch.frombuffer(bytearray(used), dtype=torch.uint8)
        self._control.gather(mine, self._maps, Place.LEAVES)
        try:
            self._retry("make the gradients that other ranks have", fill)
        except Exception as error:
            problem = error
        rows = self._control.meet(Place.LEAVES, failed=problem is not None)
        if any(row.failed for row in rows):
            self._raise(problem)

    def _put_losses(self, losses: list[Tensor], factor: float) -> None:
        """Put the losses, times `factor`, where they are summed."""

        def put() -> None:
            self._losses.zero_()
            for place, loss in zip(self._places, losses, strict=False):
                place.copy_(loss)
            self._losses.mul_(factor)

        with torch.no_grad(), torch_private.unseen():
            self._retry("sum the losses of the ranks", put)

    def _add_up(self, losses: list[Tensor], factor: float) -> None:
        """Sum losses and gradients over the ranks."""
        self._put_losses(losses, factor)
        with torch.no_grad(), torch_private.unseen():
            work = self._retry("sum the losses of the ranks", lambda: self._sum(self._losses))
            self._buckets.sum(factor, self._group, self._wait, self._retry)
            self._wait(work)

    def _take(self) -> None:
        """Take the sums that were sent before the ranks have met."""
        assert self._overlap is not None
        with torch.no_grad(), torch_private.unseen():
            self._overlap.take(self._correction, self._wait, self._retry)
            self._losses.mul_(self._correction)

    def _finish(self, totals: list[Tensor]) -> None:
        """Copy the sums of the losses, and send the buffers of rank 0."""
        with torch.no_grad(), torch_private.unseen():
            for total, place in zip(totals, self._places, strict=False):
                total.copy_(place)
            if self._control.size > 1:
                self._buffers.send(self._group, self._control.rank, self._wait, self._retry)

    def failed(self, error: BaseException) -> None:
        """Tell the others at their next meeting, where they end their call, too."""
        if self._met or self._control.broken:
            return
        self._met = True
        try:
            self._send_anything()
            self._control.meet(Place.GRADIENT, failed=True)
            self._control.errors(error)
        except ElasticMBSError as problem:
            error.add_note(f"elastic_mbs: {problem}")

    def _meet(self, place: Place, values: Sequence[float]) -> list[Row]:
        self._met = True  # an error in the meeting, or of it, is an error of all ranks
        try:
            rows = self._control.meet(place, values)
        except MisuseError:
            self._send_anything()
            raise
        if any(row.failed for row in rows):
            self._send_anything()
            self._raise(None)
        return rows

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

    def _raise(self, own: Exception | None) -> NoReturn:
        """Exchange errors, and raise this rank's own, or the one that stands for the others'."""
        found = self._control.errors(own)
        if own is not None:
            raise own
        raise PeerError(
            "another rank could not finish this batch, so all ranks have undone it and may go "
            f"on: {found}"
        )

    # ------------------------------------------------------------------ beside the calls

    def agree(self, error: BaseException | None) -> str:
        """Vote on an optimizer's step; see `Peers`. It replaces no error."""
        try:
            try:
                rows = self._control.meet(Place.STEP, failed=error is not None)
            except MisuseError:
                self._send_for_others()
                raise
            failed = any(row.failed for row in rows)
            if any(row.place != Place.STEP for row in rows):
                self._send_for_others()
            return self._control.errors(error) if failed else ""
        except ElasticMBSError as problem:
            if error is None:
                raise
            error.add_note(f"elastic_mbs: {problem}")
            return ""

    def leave(self, why: str) -> None:
        """Leave a note; see `Peers`."""
        self._control.leave(why)


def _check(wrappers: Sequence[DDP], settings: Settings) -> None:
    """Refuse wrappers and options that would not be trained right."""
    if settings.gradients.noise_scale is not None:
        raise UnsupportedError(
            "noise_scale= compares pieces of one rank with the gradient of all ranks: leave it out"
        )
    for ddp in wrappers:
        check(ddp)
    if len({id(ddp.process_group) for ddp in wrappers}) > 1:
        raise UnsupportedError(
            "the DDP models have different process groups: give each a runtime of its own, or "
            "wrap both with the same process_group="
        )


def _check_total(totals: Sequence[float]) -> None:
    if not any(totals):
        raise CountError(
            "the counts of all ranks together are zero, so the loss is a mean over nothing: skip "
            "such a batch on every rank"
        )


def _ignored(ddp: DDP) -> set[int]:
    names = torch_private.ignored(ddp)
    found = [*ddp.module.named_parameters(), *ddp.module.named_buffers()] if names else []
    return {id(tensor) for name, tensor in found if name in names}


def _form(leaf: Tensor) -> tuple[object, ...]:
    return tuple(leaf.shape), str(leaf.dtype)
