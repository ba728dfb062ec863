"""Meetings of all ranks on the host, on a gloo group of their own.

Every wait has a limit, and its error names who is missing. Nothing is allocated in a meeting.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from itertools import pairwise
from threading import Thread
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from elastic_mbs.distributed import torch_private
from elastic_mbs.errors import MisuseError, PeerError

T = TypeVar("T")


class Retry(Protocol):
    """A runner of operations of ours that can run out of memory (see `oom.retry`)."""

    def __call__(self, what: str, operation: Callable[[], T]) -> T:
        """Run the operation, again after memory was released."""
        ...


VALUES = 22  # numbers that a rank brings to a meeting, at most
LOOK = 1.0  # seconds between two looks at the notes of the others, while waiting
ANSWER = 3.0  # seconds in which the store has to answer
_HEAD = 3
_ZEROS = (0.0,) * VALUES
_END = (
    "End this process: torchrun starts the job again (--max-restarts), and it goes on from its "
    "last checkpoint"
)
_TEXT = 600  # bytes of an error that the others are told
_SPARE = 10.0  # seconds after which gloo itself gives up, later than we do


class Place(IntEnum):
    """The places where ranks meet."""

    COUNTS = 1
    GRADIENT = 2
    LEAVES = 3
    STEP = 4
    ERROR = 5
    SUM = 6
    WHOLE = 7
    PIECE = 8
    NOTES = 9


_WORDS = {
    Place.COUNTS: "at the start of a batch",
    Place.GRADIENT: "at the end of a batch",
    Place.LEAVES: "where they agree on the leaves that have gradients",
    Place.STEP: "in optimizer_step()",
    Place.ERROR: "where they exchange errors",
    Place.SUM: "while gradients are summed",
    Place.WHOLE: "where parameters are gathered, for a batch or an evaluation",
    Place.PIECE: "in a piece of a batch, in lock-step",
    Place.NOTES: "where they exchange the metrics of a batch",
}


class Row(NamedTuple):
    """The numbers that one rank has brought to a meeting."""

    place: int
    batch: int
    failed: bool
    values: list[float]


class Notes:
    """Notes of the ranks for each other, in the store of the job. No look waits without a limit.

    Where a machine was cut off, the store never answers: nothing ends the read of its socket.

    Attributes:
        silent: the store did not answer in time.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.silent = False
        self._store, self._rank = store, rank
        self._others = [other for other in range(size) if other != rank]
        self._asking: Thread | None = None

    def wait(self, number: int) -> None:
        """Say that this rank waits for the others, for that time."""
        self._ask(lambda: self._store.set(f"waiting/{self._rank}", str(number)), None)

    def missing(self, number: int) -> list[int]:
        """Return the ranks that do not wait for that time."""

        def look() -> list[int]:
            return [
                other
                for other in self._others
                if self._read(f"waiting/{other}") != str(number).encode()
            ]

        return self._ask(look, [])

    def leave(self, number: int, why: str) -> None:
        """Say that this rank leaves, before it waits once more."""

        def write() -> None:
            self._store.set(f"left/{self._rank}", f"{number} {why}")
            self._store.add("left", 1)

        self._ask(write, None)

    def left(self, number: int) -> dict[int, str]:
        """Return the ranks that have left before they came to that wait, with their reasons."""

        def look() -> dict[int, str]:
            found: dict[int, str] = {}
            for other in self._others if self._store.add("left", 0) else ():
                waits, _, why = self._read(f"left/{other}").decode().partition(" ")
                if waits and int(waits) < number:
                    found[other] = why
            return found

        return self._ask(look, {})

    def _read(self, key: str) -> bytes:
        return self._store.get(key) if self._store.check([key]) else b""

    def _ask(self, question: Callable[[], T], otherwise: T) -> T:
        """Return the store's answer, or `otherwise` where it has none, or not in time."""
        answers: list[T] = []

        def ask() -> None:
            with suppress(RuntimeError):  # the store ends with its host
                answers.append(question())

        if self._asking is not None:
            self._asking.join(0 if self.silent else ANSWER)
        if self._asking is None or not self._asking.is_alive():
            self._asking = Thread(target=ask, daemon=True)
            self._asking.start()
            self._asking.join(ANSWER)
        self.silent = self._asking.is_alive()
        return answers[0] if answers else otherwise


class Control:
    """The ranks of one job. All ranks call every method but `leave`, in the same order.

    Attributes:
        rank: the number of this rank.
        size: how many there are.
        job: the same on all ranks, and another one for each start.
        batch: the number of the training call that runs.
        broken: why no meeting is possible any more, or "".
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, timeout: float, retry: Retry
    ) -> None:
        """Make the group for the host.

        Args:
            group: the ranks.
            device: whose tensors that group sends.
            timeout: seconds that a rank waits for the others.
            retry: runs an operation of ours that can run out of memory.
        """
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.batch = 0
        self.broken = ""
        self._timeout = timeout
        self._retry = retry
        self._gone = False
        self._waits = 0  # how often ranks have waited for each other
        width = _HEAD + VALUES
        # Arrays of Python's, which are tensors for the group.
        self._own, self._all = array("d", [0.0] * width), array("d", [0.0] * width * self.size)
        self._row = torch.frombuffer(self._own, dtype=torch.float64)
        rows = torch.frombuffer(self._all, dtype=torch.float64)
        self._rows = list(rows.view(self.size, width))
        self._words, self._everyone = bytearray(_TEXT), bytearray(_TEXT * self.size)
        self._text = torch.frombuffer(self._words, dtype=torch.uint8)
        texts = torch.frombuffer(self._everyone, dtype=torch.uint8)
        self._texts = list(texts.view(self.size, _TEXT))
        self.job = self._draw(group, device)
        try:
            # No earlier start has used these keys: the store of torchrun outlives the processes,
            # and the addresses of those before are in it.
            self._store = PrefixStore(f"elastic_mbs/{self.job}", torch_private.store_of(group))
        except RuntimeError as error:
            raise self._no_connection(error) from None
        self._notes = Notes(self._store, self.rank, self.size)
        self._group = self.connect("meetings")

    def connect(self, name: str) -> ProcessGroupGloo:
        """Return a group of gloo of all ranks, whose collectives end soon after the time-out.

        A collective cannot be taken back, and a process that ends waits for it.
        """
        store = PrefixStore(name, self._store)
        try:
            return torch_private.gloo_group(store, self.rank, self.size, self._timeout + _SPARE)
        except RuntimeError as error:
            raise self._no_connection(error) from None

    def _no_connection(self, error: RuntimeError) -> PeerError:
        first = next(iter(str(error).splitlines()), "")
        return PeerError(
            f"the ranks could not connect within {self._timeout:g} s: make the ElasticMBS on every "
            f"rank, with the same options ({first[:160]})"
        )

    def _draw(self, group: dist.ProcessGroup, device: torch.device) -> str:
        """Return a random word that rank 0 has drawn."""
        drawn = torch.tensor([int.from_bytes(os.urandom(6), "big")], device=device)
        work = torch_private.broadcast(group, drawn)
        until = time.monotonic() + self._timeout
        while device.type == "cpu" and not torch_private.is_over(work, LOOK):
            if time.monotonic() > until:
                raise PeerError(
                    f"not all ranks have made their ElasticMBS within {self._timeout:g} s: make "
                    "it on every rank, with the same options"
                )
        work.wait()
        return f"{int(drawn):012x}"

    # ------------------------------------------------------------------ meetings

    def meet(
        self, place: Place, values: Sequence[float] = (), *, failed: bool = False
    ) -> list[Row]:
        """Bring numbers, and return what every rank has brought, by rank.

        Raises:
            PeerError: a rank has left, or does not come in time.
            MisuseError: a rank is at another place of its loop.
        """
        rest = _ZEROS[len(values) :]
        self._own[:] = array("d", (place, self.batch, failed, *values, *rest))
        self._exchange(self._rows, self._row, place)
        every, width = self._all.tolist(), len(self._own)
        rows = [
            Row(int(every[at]), int(every[at + 1]), bool(every[at + 2]), every[at + _HEAD : end])
            for at, end in pairwise(range(0, len(every) + 1, width))
        ]
        if not any(row.failed for row in rows) and len({row[:2] for row in rows}) > 1:
            self.batch = max(row.batch for row in rows)  # they can go on together
            where = "; ".join(
                f"rank {rank} is {_WORDS[Place(row.place)]} ({row.batch} so far)"
                for rank, row in enumerate(rows)
            )
            raise MisuseError(
                f"the ranks do not make the same calls: {where}. Each batch and each "
                "optimizer_step() needs one call on every rank, with the same options (reduction=, "
                "count=); one without samples calls backward(loss_fn, None)"
            )
        return rows

    def gather(self, mine: torch.Tensor, everyone: list[torch.Tensor], place: Place) -> None:
        """Put every rank's tensor in `everyone`."""
        self._exchange(everyone, mine, place)

    def errors(self, error: BaseException | None) -> str:
        """Return the errors of all other ranks in words, after a meeting in which one had one."""
        text = "" if error is None else f"{type(error).__name__}: {error}"
        words = text.encode()[:_TEXT]
        self._words[:] = words.ljust(_TEXT, b"\0")
        self._exchange(self._texts, self._text, Place.ERROR)
        everyone = bytes(self._everyone)
        found = [
            everyone[start : start + _TEXT].rstrip(b"\0")
            for start in range(0, len(everyone), _TEXT)
        ]
        return "; ".join(
            f"rank {rank}: {each.decode(errors='ignore')}"
            for rank, each in enumerate(found)
            if each and rank != self.rank
        )

    def _exchange(self, everyone: list[torch.Tensor], mine: torch.Tensor, place: Place) -> None:
        if self.broken:
            raise PeerError(self.broken)

        def begin() -> dist.Work:
            return torch_private.all_gather(self._group, everyone, mine)

        try:
            work = self._retry("meet the other ranks", begin)
        except BaseException as error:
            self.lose(f"{type(error).__name__} kept a rank from meeting the others: {error}")
            raise
        self.wait(work, place)

    # ------------------------------------------------------------------ waiting

    def wait(self, work: dist.Work, place: Place) -> None:
        """Wait for a collective of gloo, and look around while it takes long.

        Raises:
            PeerError: a rank has left, or does not come in time. No meeting is possible any more:
                a collective that was begun cannot be taken back.
        """
        self._waits += 1
        began = time.monotonic()
        try:
            while not torch_private.is_over(work, LOOK):
                self._look(place, time.monotonic() - began)
        except PeerError:
            raise
        except RuntimeError as error:
            first = next(iter(str(error).splitlines()), "")
            self._give_up(f"the connection to another rank broke ({first[:160]})", place)
        except BaseException as error:
            self.lose(f"{type(error).__name__} ended the wait for the other ranks")
            raise

    def _look(self, place: Place, waited: float) -> None:
        """Look whether there is still somebody to wait for."""
        self._notes.wait(self._waits)
        left = self._notes.left(self._waits)
        if left:
            self._give_up("; ".join(f"rank {r} has left: {why}" for r, why in left.items()), place)
        if waited > self._timeout:
            self._give_up(f"no answer within {self._timeout:g} s{self._who()}", place)

    def _who(self) -> str:
        """Return in words who does not answer, as far as it can be known."""
        missing = ", ".join(map(str, self._notes.missing(self._waits)))
        if self._notes.silent:
            return ", nor from the store of the job: this machine may be cut off from rank 0's"
        return f": rank {missing} did not come" if missing else ""

    def _give_up(self, why: str, place: Place) -> None:
        """End the waiting for good."""
        left = self._notes.left(self._waits)
        if left and "has left" not in why:
            why += "".join(f"; rank {rank} has left: {text}" for rank, text in left.items())
        self.broken = (
            f"the other ranks cannot be reached {_WORDS[place]} (batch {self.batch}): {why}. {_END}"
        )
        self._waits -= 1  # those who wait here hear that this rank does not any more
        self.leave(f"it gave up: {why}"[:_TEXT])
        raise PeerError(self.broken)

    def lose(self, why: str) -> None:
        """Note that no meeting is possible any more, and tell the others."""
        self.broken = f"the ranks cannot go on together: {why.rstrip(': ')}. {_END}"
        self.leave(why)

    def leave(self, why: str) -> None:
        """Leave a note for those who still wait; wait for nobody. The first note stays."""
        if self._gone:
            return
        self._gone = True
        self._notes.leave(self._waits, why)

    @property
    def about(self) -> Mapping[str, object]:
        """The words of a run log about this rank; none where there is no other."""
        if self.size == 1:
            return {}
        return {"job": self.job, "rank": self.rank, "ranks": self.size}

    @property
    def left(self) -> bool:
        """True once this rank has left a note."""
        return self._gone
