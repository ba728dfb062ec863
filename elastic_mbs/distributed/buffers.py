"""Buffers of rank 0 (BatchNorm's statistics), sent to all ranks at the end of a call, as by DDP."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from elastic_mbs.distributed import torch_private
from elastic_mbs.distributed.control import Retry

_ALIGN = 16  # bytes: where a view of any type may begin


class _Flat:
    """The buffers of one device, and memory that holds them all."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self.buffers = buffers
        starts, size = [], 0
        for buffer in buffers:
            starts.append(size)
            size += -(-buffer.nbytes // _ALIGN) * _ALIGN
        self.flat = torch.zeros(size, dtype=torch.uint8, device=buffers[0].device)
        self.views = [
            self.flat[start : start + buffer.nbytes].view(buffer.dtype).view(buffer.shape)
            for start, buffer in zip(starts, buffers, strict=True)
        ]


class Buffers:
    """The buffers of the wrappers that broadcast them."""

    def __init__(self, wrappers: Sequence[DDP], ignored: Collection[int]) -> None:
        self._roots = [ddp.module for ddp in wrappers if torch_private.sends_buffers(ddp)]
        self._ignored = ignored
        self._modules: list[nn.Module] = []
        self._known: list[Tensor] = []
        self._flats: list[_Flat] = []

    def refresh(self, *, modules_changed: bool) -> None:
        """Have memory for the buffers that are there. Can be repeated."""
        if modules_changed:
            self._modules = [module for root in self._roots for module in root.modules()]
        found = [each for each in self._found() if each.numel() and id(each) not in self._ignored]
        same = len(found) == len(self._known)
        if same and all(map(lambda a, b: a is b, found, self._known)):
            return
        self._known, self._flats = [], []
        kinds = dict.fromkeys(buffer.device for buffer in found)
        self._flats = [_Flat([b for b in found if b.device == device]) for device in kinds]
        self._known = found

    def _found(self) -> list[Tensor]:
        buffers = chain.from_iterable(module._buffers.values() for module in self._modules)
        return list({id(each): each for each in buffers if each is not None}.values())

    def send(
        self,
        group: dist.ProcessGroup,
        rank: int,
        wait: Callable[[dist.Work], None],
        retry: Retry,
    ) -> None:
        """Put the values of rank 0 in every rank's buffers."""
        for each in self._flats:
            begun: list[dist.Work] = []

            def begin(each: _Flat = each, begun: list[dist.Work] = begun) -> None:
                if rank == 0:
                    torch._foreach_copy_(each.views, each.buffers)
                work = dist.broadcast(each.flat, group_src=0, group=group, async_op=True)
                assert work is not None
                begun.append(work)

            retry("send the buffers to the other ranks", begin)
            wait(begun[0])
            if rank != 0:
                retry(
                    "take the buffers of rank 0",
                    partial(torch._foreach_copy_, each.buffers, each.views),
                )
