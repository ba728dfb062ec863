"""Buffers of rank 0 (BatchNorm's statistics), sent to all ranks at the end of a call, as by DDP."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import is_

import torch
import torch.distributed as dist
from torch import Tensor
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
    """The buffers of the wrappers that broadcast them.

    Attributes:
        form: a checksum of their shapes and types, which all ranks have to share.
    """

    def __init__(self, wrappers: Sequence[DDP]) -> None:
        self.form = 0.0
        self._roots = [ddp.module for ddp in wrappers if torch_private.sends_buffers(ddp)]
        self._ignored = set().union(*map(_ignored, wrappers))
        self._places: list[dict[str, Tensor | None]] = []
        self._known: list[Tensor | None] = []  # in these places
        self._flats: list[_Flat] = []

    def refresh(self, *, modules_changed: bool) -> None:
        """Have memory for the buffers that are there. Can be repeated."""
        if modules_changed:
            modules = chain.from_iterable(root.modules() for root in self._roots)
            self._places = [module._buffers for module in modules]
        # In every call: no line of Python runs for a module or a buffer.
        found = list(chain.from_iterable(map(dict.values, self._places)))
        if len(found) == len(self._known) and all(map(is_, found, self._known)):
            return
        self._known, self._flats = [], []
        there = {id(each): each for each in found if each is not None}
        sent = [each for key, each in there.items() if key not in self._ignored]
        kinds = dict.fromkeys(buffer.device for buffer in sent)
        flats = [_Flat([b for b in sent if b.device == device]) for device in kinds]
        self._flats = [each for each in flats if len(each.flat)]
        self.form = float(zlib.crc32(repr(list(map(_form, sent))).encode()))
        self._known = found

    def send(
        self,
        group: torch_private.Group,
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
                begun.append(torch_private.broadcast(group, each.flat))

            retry("send the buffers to the other ranks", begin)
            wait(begun[0])
            if rank != 0:
                retry(
                    "take the buffers of rank 0",
                    partial(torch._foreach_copy_, each.buffers, each.views),
                )


def _ignored(ddp: DDP) -> set[int]:
    names = torch_private.ignored(ddp)
    found = ddp.module.named_buffers() if names else ()
    return {id(buffer) for name, buffer in found if name in names}


def _form(buffer: Tensor) -> tuple[object, ...]:
    return tuple(buffer.shape), str(buffer.dtype)
