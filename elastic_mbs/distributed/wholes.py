"""Whole parameters of a sharded model: gathered before a call, their gradients scattered after it.

Ranks have shards of equal length, the last ones padded. A collective runs in memory that was there
before: `big` has the shards of all ranks, one after the other, and `small` one shard.

    gather    shard ─▶ small ══▶ big ─▶ whole
    scatter   whole.grad ─▶ big ══▶ small ─▶ gradient of the shard
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from elastic_mbs.device import with_index
from elastic_mbs.distributed import torch_private
from elastic_mbs.distributed.control import Retry
from elastic_mbs.errors import UnsupportedError

CAP = 25 * 2**20  # bytes of the shards that one collective takes; a larger parameter has its own

Wait = Callable[[dist.Work], None]


class Whole:
    """A parameter as a step computes with it, and its shard, as the optimizer has it.

    Attributes:
        name: of the parameter.
        shard: this rank's part.
        parameter: the whole; empty between calls.
        sums: the type in which gradients are summed over the ranks.
        padded: elements of a shard, with its padding.
    """

    def __init__(self, name: str, shard: DTensor, unit: FSDPModule) -> None:
        policy = torch_private.precision_of(unit)
        place, mesh = shard.placements[-1], shard.device_mesh
        assert isinstance(place, Shard)
        floating = shard.is_floating_point()
        dtype = (policy.param_dtype if floating else None) or shard.dtype
        self.name = name
        self.shard = shard
        self._type = shard.dtype
        self.sums = (policy.reduce_dtype if floating else None) or dtype
        device = with_index(torch.device(mesh.device_type))  # an offloaded shard is on the host
        self._empty = torch.empty(0, dtype=dtype, device=device)
        self.parameter = nn.Parameter(self._empty, requires_grad=shard.requires_grad)
        self._dim = place.dim
        self._ranks = mesh.size(mesh.ndim - 1)
        self._rows = shard.shape[place.dim]
        self._step = -(-self._rows // self._ranks)  # rows of a shard
        self.padded = self._step * (shard.numel() // max(1, self._rows))
        self.gradient: DTensor | None = None  # of the shard, for this call's sum

    @property
    def dtype(self) -> torch.dtype:
        """The type of the whole."""
        return self._empty.dtype

    @property
    def device(self) -> torch.device:
        """The device of the whole."""
        return self._empty.device

    def check(self) -> None:
        """Refuse what can come to a shard after the runtime was made.

        Raises:
            UnsupportedError: a hook that would never run, or another type.
        """
        if self.shard._post_accumulate_grad_hooks:
            raise UnsupportedError(
                f"{self.name} has a hook of register_post_accumulate_grad_hook, which would never "
                "run: gradients of shards are summed after the whole batch. Do after the call what "
                "it does"
            )
        if self.shard.dtype is not self._type:
            raise UnsupportedError(
                f"{self.name} was {self._type} and is {self.shard.dtype} by now: make the "
                "ElasticMBS when the model has its type"
            )

    # ------------------------------------------------------------------ memory

    def allocate(self) -> None:
        """Have memory for the whole. Can be repeated."""
        if self.parameter.shape != self.shard.shape:
            self.parameter.data = torch.empty(
                self.shard.shape, dtype=self.dtype, device=self.device
            )

    def release(self) -> None:
        """Drop the memory of the whole and of its gradients. Can be repeated."""
        self.parameter.grad = self.gradient = None
        self.parameter.data = self._empty

    def make_gradient(self) -> None:
        """Have a gradient for the shard, without values. Can be repeated."""
        if self.gradient is None:
            shard = self.shard
            self.gradient = DTensor.from_local(
                torch.empty_like(self.local()),
                shard.device_mesh,
                shard.placements,
                run_check=False,
                shape=shard.shape,
                stride=shard.stride(),
            )

    def local(self) -> Tensor:
        """Return the memory of this rank's shard."""
        with torch.no_grad():
            return self.shard.to_local()

    # ------------------------------------------------------------------ values

    def put_shard(self, part: Tensor) -> None:
        """Copy this rank's shard to its place in `small`."""
        local = self.local().movedim(self._dim, 0)
        part[: local.numel()].view(local.shape).copy_(local)

    def take_whole(self, parts: Tensor) -> None:
        """Copy the shards of all ranks, rows of `parts`, to the whole."""
        for part, rows in self._pairs(parts, self.parameter):
            rows.copy_(part)

    def put_gradient(self, parts: Tensor) -> None:
        """Copy the gradient of the whole to the rows of `parts`; zero where there is none."""
        grad = self.parameter.grad
        if grad is None:
            parts.zero_()
            return
        for part, rows in self._pairs(parts, grad):
            part.copy_(rows)

    def take_gradient(self, part: Tensor) -> None:
        """Copy this rank's shard of the sum to the gradient of the shard."""
        assert self.gradient is not None
        local = self.gradient.to_local().movedim(self._dim, 0)
        local.copy_(part[: local.numel()].view(local.shape))

    def _pairs(self, parts: Tensor, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each rank's place in `parts`, and its rows of the whole."""
        rows = whole.movedim(self._dim, 0).split(self._step)
        for part, own in zip(parts, rows, strict=False):  # the last ranks can have none
            yield part[: own.numel()].view(own.shape), own

    def keep_gradient(self) -> None:
        """Make the sum the gradient of the shard, or add it to the one that is there."""
        assert self.gradient is not None
        there = self.shard.grad
        if there is None:
            self.shard.grad = self.gradient
        else:
            assert isinstance(there, DTensor)
            there.to_local().add_(self.gradient.to_local())


class _Batch:
    """Some wholes of one type, and the collectives that they share."""

    def __init__(self, wholes: list[Whole]) -> None:
        first = wholes[0]
        mesh = first.shard.device_mesh
        self._wholes = wholes
        self.dtype, self.sums, self.device = first.dtype, first.sums, first.device
        self._ranks = mesh.size(mesh.ndim - 1)
        self._group = mesh.get_group(mesh.ndim - 1)
        self._replicas = mesh.get_group(0) if mesh.ndim == 2 and mesh.size(0) > 1 else None
        self.numel = sum(whole.padded for whole in wholes)

    @property
    def nbytes(self) -> tuple[int, int]:
        """The bytes of `big` and of `small`."""
        small = self.numel * max(self.dtype.itemsize, self.sums.itemsize)
        return small * self._ranks, small

    def _cut(self, memory: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return `big`, with a row for each rank, and `small`."""
        sizes = self.numel * self._ranks * dtype.itemsize, self.numel * dtype.itemsize
        big, small = (each[:size].view(dtype) for each, size in zip(memory, sizes, strict=True))
        return big.view(self._ranks, self.numel), small

    def _places(self, flat: Tensor) -> Iterator[tuple[Whole, Tensor]]:
        """Yield each whole and its place in the last dimension."""
        lengths = [whole.padded for whole in self._wholes]
        yield from zip(self._wholes, flat.split(lengths, -1), strict=True)

    def gather(self, memory: tuple[Tensor, Tensor], wait: Wait, retry: Retry) -> None:
        """Make the wholes out of the shards of all ranks."""
        big, small = self._cut(memory, self.dtype)

        def begin() -> dist.Work:
            for whole, part in self._places(small):
                whole.put_shard(part)
            return torch_private.begin_gather(big.view(-1), small, self._group)

        def take() -> None:
            for whole, parts in self._places(big):
                whole.take_whole(parts)

        wait(retry("gather the parameters", begin))
        retry("take the parameters of all ranks", take)

    def scatter(
        self, factor: float, memory: tuple[Tensor, Tensor], wait: Wait, retry: Retry
    ) -> None:
        """Sum gradient * factor over all ranks, and take this rank's shard."""
        big, small = self._cut(memory, self.sums)

        def begin() -> dist.Work:
            for whole, parts in self._places(big):
                whole.put_gradient(parts)
            if factor != 1.0:
                big.mul_(factor)
            return torch_private.begin_scatter(small, big.view(-1), self._group)

        def take() -> None:
            for whole, part in self._places(small):
                whole.take_gradient(part)

        wait(retry("sum the gradients over the ranks", begin))
        for whole in self._wholes:
            whole.parameter.grad = None
        if self._replicas is not None:
            replicas = self._replicas
            work = retry(
                "sum the gradients over the replicas",
                lambda: dist.all_reduce(small, group=replicas, async_op=True),
            )
            assert work is not None
            wait(work)
        retry("take the sums of gradients", take)


class Wholes:
    """The whole parameters of a model.

    Attributes:
        every: all of them.
        trained: those with a gradient.
        held: there is memory for the wholes.
    """

    def __init__(self, every: Sequence[Whole]) -> None:
        self.every = every
        self.trained = [whole for whole in every if whole.shard.requires_grad]
        self.held = False
        self._gathers, self._scatters = list(_batches(every)), list(_batches(self.trained))
        self._memory: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def sizes(self) -> tuple[int, int, int]:
        """Return the bytes of parameters, of gradients, and of the memory for collectives."""
        parameters, gradients = (
            sum(each.shard.numel() * each.dtype.itemsize for each in some)
            for some in (self.every, self.trained)
        )
        gradients += sum(each.local().nbytes for each in self.trained)
        return parameters, gradients, sum(sum(each) for each in self._needs().values())

    def _needs(self) -> dict[torch.device, tuple[int, int]]:
        needs: dict[torch.device, tuple[int, int]] = {}
        for batch in (*self._gathers, *self._scatters):
            pairs = zip(needs.get(batch.device, (0, 0)), batch.nbytes, strict=True)
            big, small = map(max, pairs)
            needs[batch.device] = big, small
        return needs

    def allocate(self, *, gradients: bool) -> None:
        """Have memory for the wholes and the collectives. Can be repeated.

        Args:
            gradients: see that there is room for the gradients, too.
        """
        for whole in self.every:
            whole.allocate()
        self._prepare_collectives()
        if gradients:
            [torch.empty_like(each) for w in self.trained for each in (w.parameter, w.local())]
        self.held = True

    def _prepare_collectives(self) -> None:
        for device, sizes in self._needs().items():
            if device not in self._memory:
                big, small = (torch.empty(n, dtype=torch.uint8, device=device) for n in sizes)
                self._memory[device] = big, small

    def prepare_scatter(self) -> None:
        """Have memory for collectives, and gradients for the shards. Can be repeated."""
        self._prepare_collectives()
        for whole in self.trained:
            whole.make_gradient()

    def release(self) -> None:
        """Drop all memory. Can be repeated."""
        self.held = False
        self._memory.clear()
        for whole in self.every:
            whole.release()

    def gather(self, wait: Wait, retry: Retry) -> None:
        """Make the wholes out of the shards of all ranks. Nothing is allocated."""
        for batch in self._gathers:
            batch.gather(self._memory[batch.device], wait, retry)
        self._memory.clear()  # pieces may have it

    def scatter(self, factor: float, wait: Wait, retry: Retry) -> None:
        """Put the sums of gradient * factor in the gradients of the shards, which are there."""
        for batch in self._scatters:
            batch.scatter(factor, self._memory[batch.device], wait, retry)

    def versions(self) -> list[int]:
        """Return how often each whole was changed."""
        return [whole.parameter._version for whole in self.every]


def _batches(wholes: Sequence[Whole]) -> Iterator[_Batch]:
    """Yield the wholes that share a collective."""
    current: list[Whole] = []
    size, before = 0, None
    for whole in wholes:
        kind = whole.dtype, whole.sums, whole.device
        nbytes = whole.padded * max(whole.dtype.itemsize, whole.sums.itemsize)
        if current and (size + nbytes > CAP or kind != before):
            yield _Batch(current)
            current, size = [], 0
        if whole.padded:
            current.append(whole)
            size, before = size + nbytes, kind
    if current:
        yield _Batch(current)
