"""The words that the ranks of a trainer exchange once a batch, outside of its pieces.

A piece asks nobody: ranks have different numbers of them. So the metrics that trl gathers from all
ranks are noted by each for itself, and the notes are exchanged when a batch is over.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from elastic_mbs.distributed.control import Control, Place
from elastic_mbs.errors import ElasticMBSError, PeerError
from elastic_mbs.memory import oom
from elastic_mbs.options import DistributedOptions


class Exchange:
    """The other ranks of a trainer. In a block, as training or evaluation is, all ranks are there.

    Args:
        trainer: the trainer.
        gathers: returns whether its loss gathers from all ranks, and is run in pieces. Others
            exchange nothing.
        options: how long a rank waits for the others.
    """

    def __init__(
        self,
        trainer: Any,
        options: DistributedOptions | None = None,
        *,
        gathers: Callable[[], bool],
    ) -> None:
        self._trainer, self._gathers = trainer, gathers
        self._timeout = (options or DistributedOptions()).timeout
        self._control: Control | None = None
        self._depth = 0  # an evaluation can be inside of training

    @property
    def _needed(self) -> bool:
        return self._trainer.args.world_size > 1 and self._gathers()

    def __enter__(self) -> Self:
        """Meet the other ranks, before memory is short."""
        if self._needed:
            self._connected()
        self._depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave, and tell the ranks that still wait why."""
        self._depth -= 1
        if self._control is not None and not self._depth:
            words = "its trainer has ended" if error is None else f"{type(error).__name__}: {error}"
            self._control.leave(words)

    @property
    def counted(self) -> int:
        """The number of ranks, from the first on, that `gather_for_metrics` counts in this batch.

        The last batch of the data is filled up with samples that have been there before.
        """
        state, ranks = self._trainer.accelerator.gradient_state, self._trainer.args.world_size
        full = not state.end_of_dataloader or state.remainder <= 0
        return int(ranks if full else min(state.remainder, ranks))

    def all(self, mine: Any) -> list[Any]:
        """Return what every rank has brought, by rank.

        All ranks call it, or end a block of `told` by an error.

        Args:
            mine: made of what JSON has.

        Raises:
            PeerError: another rank has failed, or does not come.
        """
        if not self._needed:
            return [mine]
        control, words = self._connected(), json.dumps(mine).encode()
        rows = control.meet(Place.NOTES, [len(words)])
        if any(row.failed for row in rows):
            raise PeerError(
                "another rank could not finish this batch, so all ranks have undone it and may go "
                f"on: {control.errors(None)}"
            )
        longest = max(int(row.values[0]) for row in rows)
        found = [bytearray(longest) for _ in rows]
        own, *everyone = (
            torch.frombuffer(each, dtype=torch.uint8)
            for each in (bytearray(words.ljust(longest)), *found)
        )
        control.gather(own, everyone, Place.NOTES)
        return [json.loads(each) for each in found]

    @contextmanager
    def told(self) -> Iterator[None]:
        """Tell the other ranks, who wait in `all`, of an error that ends the block."""
        try:
            yield
        except PeerError:  # all ranks know
            raise
        except BaseException as error:
            if self._needed:
                self._tell(error)
            raise

    def _tell(self, error: BaseException) -> None:
        try:
            control = self._connected()
            control.meet(Place.NOTES, failed=True)
            control.errors(error)
        except ElasticMBSError as problem:
            error.add_note(f"elastic_mbs: {problem}")

    def _connected(self) -> Control:
        """Return the meetings of this block; the ranks that have left them meet anew."""
        if self._control is None or self._control.left:
            group, device = dist.group.WORLD, self._trainer.args.device
            assert group is not None  # in a job of several ranks
            retry = functools.partial(oom.retry, devices=(device,))
            self._control = Control(group, device, self._timeout, retry)
        return self._control
