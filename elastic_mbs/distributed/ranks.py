"""The meetings of one training call, the same for replicas (DDP) and for shards (FSDP2).

    share    counts of all ranks, where pieces need them
    meet     all that can fail on one rank alone, then one meeting, then the sums
    failed   a rank that has no gradient says so at the next meeting

Subclasses add up the gradients. Some send sums before the ranks have met (`sums.py`).
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_mbs.batch.counts import Counts
from elastic_mbs.device import accelerator_of
from elastic_mbs.distributed import torch_private
from elastic_mbs.distributed.buckets import GRAD, used
from elastic_mbs.distributed.control import VALUES, Control, Place, Retry, Row
from elastic_mbs.engine.outcome.result import StepResult, has_loss, set_losses
from elastic_mbs.engine.outcome.timing import Stopwatch, Timed, known
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

_BESIDE = 7  # numbers at the end of a batch, before its losses
_RANGE = 8  # sums are made again where the total has become smaller by more
_MOST = VALUES - _BESIDE - 1  # losses with names: the batch's own is one more
_LAYOUT = attrgetter("layout")
WHAT = "hold the sums of gradients over the ranks"


class Agreed(NamedTuple):
    """The numbers on which ranks have agreed at the end of a batch.

    Attributes:
        share: the factor of this rank's loss.
        before: the factor of this rank's gradients where their sum was not sent yet.
        after: the factor of all sums.
        again: sums that were sent are made again.
        losses: their sums over the ranks, of losses in host memory.
    """

    share: float
    before: float
    after: float
    again: bool
    losses: list[float]


class Ranks:
    """The other ranks, as `elastic_mbs.engine.shared.peers.Peers`, but for the sums of gradients.

    Attributes:
        alone: False: a rank may have no batch.
        in_step: pieces make collectives; see `Peers`.
        hooks: in place while a step function runs.
        about: what a run log says of this rank.
        speeds: of each rank, in samples per second; see `Peers`.
    """

    alone = False
    in_step = False
    hooks: tuple[AbstractContextManager[object], ...]
    _wrapper: str  # the wrapper that a module with its leaves in it has, in words
    _adds_up = False  # pieces are weighed among all ranks in every call
    _divides = False  # pieces may be weighed by a total of all ranks, which saves a pass

    def __init__(
        self, group: dist.ProcessGroup, model: TrainedModel, settings: Settings, retry: Retry
    ) -> None:
        """Meet the other ranks.

        Args:
            group: the ranks.
            model: the modules that the user gave.
            settings: the options.
            retry: runs an operation of ours that can run out of memory.

        Raises:
            UnsupportedError: an option that would not be right with other ranks.
            PeerError: another rank did not come.
        """
        _check(settings)
        self._group = group
        self._model = model
        self._retry = retry
        # Sums of host memory are gloo's, whose waits can end; those of a device wait in its stream.
        self._on_host = is_on_host(model)
        self._timeout = settings.distributed.timeout
        # Totals are those of all ranks from the start: loss_fn divides by them itself.
        self._is_sum = settings.reduction == "sum"
        self._control = self._connect()
        self.about = self._control.about
        self.speeds: tuple[float, ...] = ()
        self._accelerator = accelerator_of(model.devices()[0])
        self._watch = Stopwatch(self._accelerator)  # of this rank's own work in this call
        self._timed: Timed[int] = deque()  # samples of the calls whose time is not known yet
        self._work = (0.0, 0.0)  # samples and seconds of the last call whose time is known
        self._losses = torch.zeros(VALUES, dtype=torch.float64)  # their sums, on a device
        self._places: list[Tensor] = []  # of each loss in `_losses`
        self._maps: list[Tensor] = []  # of each rank: which leaves have gradients
        self._signature = 0.0  # of the leaves that are summed
        self._counts = 1.0  # of this rank in this call
        self._weighed = 1.0  # the total by which its pieces are weighed
        # A total of all ranks in an earlier call: it stands for the present one until they meet.
        self._reference = 0.0
        self._total = 0.0  # of all ranks in the latest call
        self._named = False  # pieces are weighed among all ranks, so gradients are only added
        self._names: tuple[str, ...] = ()  # of the losses of this call
        self._met = True  # this call has had its meeting

    def _connect(self) -> Control:
        return Control(self._group, self._model.devices()[0], self._timeout, self._retry)

    def _make_common_room(self, leaves: Sequence[Tensor]) -> None:
        """Have memory for what ranks exchange about these leaves, which are summed."""
        self._maps = list(torch.zeros(self._control.size, len(leaves), dtype=torch.uint8))
        self._signature = float(zlib.crc32(repr(list(map(_form, leaves))).encode()))
        device = leaves[0].device if leaves else torch.device("cpu")
        kind = torch.float32 if device.type == "mps" else torch.float64
        self._losses = torch.zeros(VALUES, dtype=kind, device=device)
        self._places = list(self._losses)

    def _wait(self, work: dist.Work, place: Place = Place.SUM) -> None:
        """Wait for a collective of the data; on a device, only its stream waits."""
        if self._on_host:
            self._control.wait(work, place)
            return
        try:
            work.wait()
        except RuntimeError as error:
            self._control.lose(f"a collective of the data has failed: {str(error)[:300]}")
            raise PeerError(self._control.broken) from None

    # ------------------------------------------------------------------ one call

    def begin(self) -> None:
        """Begin a training call; see `Peers`."""
        self._come_back()
        self._control.batch += 1
        self._met = self._named = False
        self._counts = self._weighed = 0.0

    def _come_back(self) -> None:
        """Meet the others again where the runtime was closed, and is used again."""
        if self._control.broken:
            raise PeerError(self._control.broken)
        if self._control.left:
            batch = self._control.batch
            self._control = self._connect()
            self._control.batch = batch

    def share(self, counts: Counts) -> Counts:
        """Return the counts, as a part of all ranks' for a sum and for losses with names."""
        self._names = counts.names or ()
        self._named = self._is_sum or self._adds_up or bool(self._names)
        totals = counts.totals()
        if not self._named:
            self._counts = totals[0]
            parts = _equal_parts(self._counts, self._reference) if self._divides else 1
            self._weighed = self._counts * parts
            self._watch = Stopwatch(self._accelerator)
            return counts.divided_by(parts)
        if len(totals) > _MOST:
            raise UnsupportedError(
                f"count has {len(totals)} losses, and ranks exchange {_MOST} at most: add "
                "some of them up in loss_fn"
            )
        self._counts = self._weighed = self._reference = 1.0
        names = float(zlib.crc32(repr(counts.names).encode()))
        rows = self._meet(Place.COUNTS, [names, *totals])
        if len({row.values[0] for row in rows}) > 1:
            raise MisuseError("the ranks have different losses in count=: give the same on all")
        everybody = [math.fsum(row.values[i] for row in rows) for i in range(1, len(totals) + 1)]
        if not self._is_sum:
            _check_total(everybody)
        self._met = False  # the one at the end is still to come
        self._watch = Stopwatch(self._accelerator)  # the others were waited for until now
        return counts.among(everybody)

    def meet(self, gradients: Gradients, result: StepResult) -> StepResult:
        """Make this rank's gradient and loss those of all ranks' samples.

        All that can fail on this rank alone comes before the meeting.
        """
        self._note_work(result)
        self._prepare_sums(gradients)
        losses, totals, known = self._retry(WHAT, partial(self._losses_of, result))
        self._send_ahead()
        agreed = None
        try:
            agreed = self._agree_on_gradients(known)
            with torch.no_grad(), torch_private.unseen():
                self._add_up([] if self._on_host else losses, agreed)
                self._finish_sums(totals, agreed.losses)
        except BaseException as error:
            # All ranks know of an error at the meeting. After it they add up, and are not told.
            at_meeting = agreed is None and isinstance(error, Exception)
            if not (at_meeting or isinstance(error, PeerError)):
                self._control.lose(f"{type(error).__name__} ended a sum over the ranks: {error}")
            raise
        self._keep_sums(gradients)
        set_losses(result, totals[0], dict(zip(self._names, totals[1:], strict=True)))
        return result

    def _losses_of(self, result: StepResult) -> tuple[list[Tensor], list[Tensor], list[float]]:
        """Return this rank's losses, memory for their sums, and their numbers.

        The numbers go with the meeting, but for those of a device: it would be waited for.
        """
        typed = has_loss(result)  # first: a loss that was read is there
        losses = [result.loss, *result.losses.values()]
        like = losses[0] if typed else self._losses[0]
        totals = [torch.empty_like(like) for _ in range(1 + len(self._names))]
        return losses, totals, list(map(float, losses)) if self._on_host else []

    def before_piece(self) -> None:
        """Do nothing: pieces make no collective; see `Peers`."""

    def after_backward(self, *, last: bool) -> None:
        """Do nothing; see `Peers`."""

    def undo(self) -> bool:
        """Return that this rank itself has run out of memory; see `Peers`."""
        return True

    def _note_work(self, result: StepResult) -> None:
        """Note what this rank has done by itself, and how long it took."""
        self._watch.stop()
        samples = sum(stop - start for start, stop in result.partition)
        if samples:
            self._timed.append((self._watch, samples))
        for done, seconds in known(self._timed):
            if seconds:
                self._work = (float(done), seconds)

    def _prepare_sums(self, gradients: Gradients) -> None:
        """Do all that can fail on this rank alone, before the ranks meet."""
        raise NotImplementedError

    def _used(self) -> bytes:
        """Return for each leaf that is summed whether it has a gradient."""
        raise NotImplementedError

    def _send_ahead(self) -> None:
        """Send sums before the ranks have met."""

    def _send_anything(self) -> None:
        """Send what the others wait for in a call that has failed."""

    def _send_for_others(self) -> None:
        """Send what the others wait for in a call that this rank does not make."""

    def _weight(self) -> float:
        """Return the factor of this rank's gradient before the ranks have met."""
        return self._weighed / self._reference

    def _again(self) -> bool:
        """Return whether sums that were sent are not this call's gradient."""
        return False

    def _form_of_buffers(self) -> float:
        """Return a checksum of the buffers that one rank sends to all; none are sent: 0."""
        return 0.0

    def _use_all(self, used: bytes) -> None:
        """Follow the other ranks, of which some have gradients of other leaves."""
        raise NotImplementedError

    def _sum_gradients(self, agreed: Agreed) -> None:
        """Sum the gradients over the ranks. Nothing is allocated."""
        raise NotImplementedError

    def _keep_sums(self, gradients: Gradients) -> None:
        """Make the sums the gradients of the optimizer's parameters."""
        raise NotImplementedError

    def _check_gradients(self, gradients: Gradients) -> None:
        """Refuse gradients that no other rank would hear of."""
        leaves, own = gradients.leaves(), set(map(id, self._model.leaves))
        grads = list(map(GRAD, leaves))
        there = used(grads)
        leaves, grads = list(compress(leaves, there)), list(compress(grads, there))
        if own.issuperset(map(id, leaves)) and set(map(_LAYOUT, grads)) <= {torch.strided}:
            return
        for leaf, grad in zip(leaves, grads, strict=True):
            if id(leaf) not in own:
                raise UnsupportedError(
                    f"a leaf of shape {tuple(leaf.shape)} outside the model got a gradient, and "
                    "it is not known whether it is one parameter of all ranks or this rank's own: "
                    f"put it in a module, {self._wrapper}; for a gradient of the batch itself use "
                    "torch.autograd.grad in loss_fn"
                )
            if grad.layout is not torch.strided:
                raise UnsupportedError(
                    f"the gradient of {self._model.name_of(leaf)} is {grad.layout}: only "
                    "dense gradients are summed over the ranks"
                )

    def _agree_on_gradients(self, losses: Sequence[float]) -> Agreed:
        """Meet at the end of the batch. A rank without a batch brings no losses."""
        used = self._used()
        checksum = float(zlib.crc32(used))
        own = [self._counts, self._signature, checksum, float(self._again())]
        own += [self._form_of_buffers(), *self._work]
        weighed = [self._weighed * loss for loss in losses]
        rows = self._meet(Place.GRADIENT, [*own, *weighed])
        _check_total([row.values[0] for row in rows])
        if len({row.values[1] for row in rows}) > 1:
            raise MisuseError(
                "the ranks train different parameters (by shape, type or number): freeze and "
                "thaw the same ones on every rank"
            )
        if len({row.values[4] for row in rows}) > 1:
            raise MisuseError(
                "the buffers of the ranks differ by shape, type or number, and those of rank 0 are "
                "sent to all: give them one size on every rank, or make "
                "DistributedDataParallel(…, broadcast_buffers=False)"
            )
        if len({row.values[2] for row in rows}) > 1:
            self._use_all(used)
        work = [row.values[5:_BESIDE] for row in rows]
        self.speeds = tuple(samples / seconds if seconds else 0.0 for samples, seconds in work)
        total = 1.0 if self._named else math.fsum(row.values[0] for row in rows)
        # With a smaller reference the sums are too large for half precision, and with a much
        # larger one too small.
        reference, fits = self._reference, total <= self._reference <= _RANGE * total
        again = not fits or any(row.values[3] for row in rows)
        share = self._weighed / total
        before, after = (share, 1.0) if again else (self._weight(), reference / total)
        if not fits or total == self._total:
            self._reference = total
        self._total = total
        sums = [
            sum(row.values[place] for row in rows) / total
            for place in range(_BESIDE, _BESIDE + 1 + len(self._names))
        ]
        return Agreed(share, before, after, again, sums)

    def _gather_maps(self, used: bytes) -> list[bool]:
        """Return for each leaf that is summed whether a rank has a gradient of it."""
        mine = torch.frombuffer(bytearray(used), dtype=torch.uint8)
        self._control.gather(mine, self._maps, Place.LEAVES)
        return list(map(any, zip(*map(Tensor.tolist, self._maps), strict=True)))

    def _add_up(self, losses: list[Tensor], agreed: Agreed) -> None:
        """Sum gradients over the ranks, and these losses."""
        put = partial(self._put, losses, agreed.share)
        work = self._retry("sum the losses", put) if losses else None
        self._sum_gradients(agreed)
        if work is not None:
            self._wait(work)

    def _put(self, losses: list[Tensor], factor: float) -> dist.Work:
        """Begin to sum losses on a device, weighed."""
        self._losses.zero_()
        for place, loss in zip(self._places, losses, strict=False):
            place.copy_(loss)
        return torch_private.all_reduce(self._group, self._losses.mul_(factor))

    def _finish_sums(self, totals: list[Tensor], sums: list[float]) -> None:
        """Put the sums of the losses in `totals`: these, or the ones of a device."""
        found: Sequence[float | Tensor] = sums if self._on_host else self._places
        for total, value in zip(totals, found, strict=False):
            total.fill_(value)

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

    def _meet(
        self, place: Place, values: Sequence[float] = (), own: Exception | None = None
    ) -> list[Row]:
        """Meet; raise where a rank has failed, this one by `own`."""
        self._met = True  # an error in the meeting, or of it, is an error of all ranks
        try:
            rows = self._control.meet(place, values, failed=own is not None)
        except MisuseError:
            self._send_anything()
            raise
        if any(row.failed for row in rows):
            self._send_anything()
            self._raise(own)
        return rows

    def _raise(self, own: Exception | None) -> NoReturn:
        """Exchange errors, and raise this rank's own, or the one that stands for the others'."""
        found = self._control.errors(own)
        if own is not None:
            raise own
        raise PeerError(
            "another rank could not finish this batch, so all ranks have undone it and may go "
            f"on: {found}"
        )

    def end(self) -> None:
        """End a call; see `Peers`. A replica keeps nothing of it."""

    # ------------------------------------------------------------------ beside the calls

    def beside(self) -> AbstractContextManager[None]:
        """Return a block beside the training calls; see `Peers`. A replica is whole by itself."""
        return nullcontext()

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


def is_on_host(model: TrainedModel) -> bool:
    """Return whether gradients and losses are in host memory."""
    return all(device.type == "cpu" for device in model.devices())


def _check(settings: Settings) -> None:
    if settings.gradients.noise_scale is not None:
        raise UnsupportedError(
            "noise_scale= compares pieces of one rank with the gradient of all ranks: leave it out"
        )
    if settings.gradients.verify == "error":
        raise UnsupportedError(
            "verify='error' would raise on one rank, when all ranks have the gradient: use "
            "GradientOptions(verify='warn'), and mbs.verify"
        )


def _equal_parts(count: float, total: float) -> int:
    """Return total / count where it is a power of two, so that no weight is rounded; else 1."""
    exact = 0 < count <= total and math.frexp(total / count)[0] == 0.5
    return int(total / count) if exact else 1


def _check_total(totals: Sequence[float]) -> None:
    if not any(totals):
        raise CountError(
            "the counts of all ranks together are zero, so the loss is a mean over nothing: skip "
            "such a batch on every rank"
        )


def _form(leaf: Tensor) -> tuple[object, ...]:
    return tuple(leaf.shape), str(leaf.dtype)
