"""Snapshots and rollback of the state that a forward changes in modules.

Running statistics, spectral-norm vectors and codebooks are buffers. Some modules keep state in
attributes, in gradients of buffers, or edit their own parameters. Rollback needs no memory: values
are copied back into the tensors that exist. Source: docs/internals/autograd.md#buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, compress
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from elastic_mbs.rollback.attributes import (
    ABSENT,
    CONTAINERS,
    Contents,
    Key,
    Numbers,
    containers_of,
    is_torchs,
    tensors_of,
)
from elastic_mbs.rollback.places import (
    NOTHING,
    NOWHERE,
    Changing,
    Memory,
    Place,
    Places,
    Snapshot,
    always_changes,
    copyable,
    is_state,
    places_of,
    same_bits,
    switched,
)

_BUFFERS, _TRAINING = attrgetter("_buffers"), attrgetter("training")
_LONG = 100  # items of a container that takes time to copy
_SMALL = 4096  # bytes of a tensor whose copy costs next to nothing


@dataclass(frozen=True)
class _Layout:
    """The state of some modules, and the facts about which of it changes.

    Attributes:
        key: the loss function.
        modes: training mode of each module with buffers: a codebook changes in training only.
        modules: the modules.
        owners: the `_buffers` of each module.
        names: the names of the buffers.
        beside: ids of the modules that were not given: a step can begin to use one in any call.
        known: a clean piece of this loss function in these modes was seen.
        changing: the places that change.
        still: the places that are not known to change.
        numbers: numbers, flags and strings, which go back with the buffers.
        containers: lists, deques, sets and dicts that go back, too.
        open: modules whose attributes are all looked at, in a first call.
    """

    key: object = ABSENT
    modes: tuple[bool, ...] = ()
    modules: Sequence[nn.Module] = ()
    owners: Sequence[dict[str, Tensor | None]] = ()
    names: Sequence[str] = ()
    beside: frozenset[int] = frozenset()
    known: bool = False
    changing: Places = NOWHERE
    still: Places = NOWHERE
    numbers: Numbers = NOTHING.numbers
    containers: Sequence[tuple[nn.Module, str]] = ()
    open: Sequence[nn.Module] = ()

    @cached_property
    def split_shows(self) -> bool:
        """True if state changes in a way that depends on the split.

        Running statistics of groups that are never apart do not.
        """
        return not all(hasattr(place.module, "batch_group") for place in self.changing.all)

    @cached_property
    def watched(self) -> bool:
        """True if a look after each piece can show that something else changes."""
        return bool(self.still.names) or not self.known

    @cached_property
    def small(self) -> list[int]:
        """The places that are not known to change and hold no parameter."""
        return [i for i, place in enumerate(self.still.all) if place.kind != "parameter"]

    @cached_property
    def kept(self) -> bool:
        """True if there is state to keep for each piece."""
        return bool(self.changing.names or self.numbers.own or self.containers)


class BufferCopies:
    """Copies of the state that the forward changes, at the call's start and at the piece's start.

    It is learned for each loss function which state changes, by versions and identities. Its first
    call looks at everything that modules keep, copies buffers and attributes to the host and
    compares values. Running statistics that can change always count as changing, because eager
    BatchNorm does not raise their version. Copies go to the host where they do not fit.

    An attribute that the first clean piece has made (a queue, a centre, a table) is kept until the
    next clean one shows whether it is state.

    A module that was not given can come into use in a later call, or be new there. Its numbers,
    containers and small tensors are kept in every call, and all of its tensors where it is new.
    """

    def __init__(self, on_host: Callable[[], Any] = nullcontext) -> None:
        """Begin without knowledge.

        Args:
            on_host: gives a context in which memory of the host is made.
        """
        self._on_host = on_host
        self._changing = Changing()  # places, containers, and modules with changing numbers
        self._features = Changing()  # attributes that are features, which nothing reads later
        self._learned: set[object] = set()
        self._unproven: set[Key] = set()  # attributes that the latest first clean piece has made
        self._made_in_call: set[Key] = set()  # the ones of the running call
        self._layout = _Layout()
        self._memory = Memory(on_host), Memory(on_host)
        self._still = NOTHING  # state that is not known to change, at the call's start
        self._moved: set[int] = set()  # the places of it that a clean piece has changed
        self._call: Snapshot | None = None  # None where nothing of the call has run
        self._piece: Snapshot | None = None  # None where nothing of the piece has run

    @property
    def watched(self) -> bool:
        """True if a look after each piece can show that another buffer changes."""
        return self._layout.watched

    def begin_call(
        self,
        modules: Sequence[nn.Module],
        key: object = None,
        companions: Sequence[nn.Module] = (),
    ) -> None:
        """Take the snapshot of the call's start.

        Args:
            modules: the modules that were given.
            key: the loss function. The facts about one say nothing of another.
            companions: other modules whose state the loss function can change.
        """
        # None until there is one: a failure before that leaves nothing to put back.
        self._call = self._piece = None
        every = [*modules, *companions] if companions else modules
        owners = list(map(_BUFFERS, every))
        names = list(chain.from_iterable(owners))
        modes = tuple(map(_TRAINING, compress(modules, owners)))
        layout = self._layout
        same = (
            key == layout.key
            and modes == layout.modes
            and names == layout.names
            and every == layout.modules
        )
        new: frozenset[int] = frozenset()
        if not same or not all(map(is_, owners, layout.owners)):
            beside = frozenset(map(id, companions))
            new = beside - layout.beside
            layout = self._look(_Layout(key, modes, list(every), owners, names, beside))
            self._layout = layout
        self._still, self._moved, self._made_in_call = NOTHING, set(), set()
        if layout.still.names:
            self._still = self._kept(layout, new)
        self._call = self._piece = self._take(0)

    def end_call(self) -> None:
        """Drop the snapshots: a call that fails before it has its own leaves the buffers alone."""
        self._call = self._piece = None
        self._still, self._moved = NOTHING, set()  # holds parameters, which can be replaced

    def let_go(self) -> None:
        """Drop all copies, between two calls."""
        self._call = self._piece = None
        self._still, self._moved = NOTHING, set()
        for memory in self._memory:
            memory.let_go()

    def held(self) -> list[Tensor | None]:
        """Return the copies that are kept from one call to the next."""
        return [*self._still.copies, *(copy for each in self._memory for copy in each.held)]

    def leave_device(self) -> None:
        """Put copies on the host from now on: they can be what a piece has no room for.

        Where the host has no room, the ones that are left stay where they are.
        """
        for memory in self._memory:
            memory.leave_device()
        with torch.inference_mode(False), self._on_host():
            for snapshot in (self._call, self._piece):
                if snapshot is not None:
                    snapshot.leave_device()

    # ------------------------------------------------------------------ what there is to copy

    def _look(self, layout: _Layout) -> _Layout:
        """Find out which state of the layout's modules changes."""
        known, learned = (layout.key, layout.modes) in self._learned, self._changing.has
        changing, still = list[Place](), list[Place]()
        for module in layout.modules:
            beside = id(module) in layout.beside
            for place in places_of(module, self._followed(module)):
                # In a first call it is not known yet whether modules that were not given run.
                if learned(module, place.key) or ((known or not beside) and always_changes(place)):
                    changing.append(place)
                elif not known or beside or self._shows(place):
                    still.append(place)
        return replace(
            layout,
            known=known,
            changing=Places.of(changing),
            still=Places.of(still),
            numbers=Numbers.of([each for each in layout.modules if self._counts(layout, each)]),
            containers=[
                (module, name)
                for module in layout.modules
                for name in dict.fromkeys([*containers_of(module), *self._followed(module)])
                if not known or self._follows(layout, module, name)
            ],
            open=() if known else layout.modules,
        )

    def _followed(self, module: nn.Module) -> list[str]:
        """Return the attributes that are or may be state, whatever hangs there now.

        A user can empty one before each batch: a hidden state, a cache of keys and values.
        """
        unproven = [name for owner, name in self._unproven if owner == id(vars(module))]
        return [*self._changing.attributes(module), *unproven]

    def _shows(self, place: Place) -> bool:
        """Return whether a call of a known loss function can tell that a place has changed.

        Trained parameters would take a look at each in every piece, and few steps edit them.
        """
        if place.kind != "tensor":
            hangs = place.owner.get(place.name) if place.kind == "parameter" else None
            return place.kind == "buffer" or (hangs is not None and not hangs.requires_grad)
        return place.key in self._unproven or not self._features.has(place.module, place.key)

    def _counts(self, layout: _Layout, module: nn.Module) -> bool:
        """Return whether a module's numbers go back after a failure.

        The numbers of torch's own modules are settings. A first call looks at them all the same.
        """
        own = is_torchs(module) and (layout.key, layout.modes) in self._learned
        return not own or id(module) in layout.beside or self._changing.has(module)

    def _follows(self, layout: _Layout, module: nn.Module, name: str) -> bool:
        """Return whether a container goes back after a failure, of a loss function that is known.

        A piece can fill one and empty it again, so short ones do whether they were seen to change
        or not.
        """
        if id(module) in layout.beside or self._changing.has(module, (id(vars(module)), name)):
            return True
        container = vars(module).get(name)
        return not isinstance(container, CONTAINERS) or len(container) <= _LONG

    def changes(self, module: nn.Module) -> bool:
        """Return whether state of this module is known to change."""
        keys = {id(module._buffers), id(module._parameters), id(vars(module))}
        return self._changing.has(module) or any(owner in keys for owner, _ in self._unproven)

    def _kept(self, layout: _Layout, new: frozenset[int]) -> Snapshot:
        """Return the state that is not known to change; in a first call with its values.

        Parameters are too large to keep: versions tell of them.

        Args:
            layout: the modules.
            new: ids of the modules that no earlier call has met.
        """
        tensors = layout.still.hanging()
        kept: list[Tensor | None] = [None] * len(tensors)
        if layout.beside or self._unproven or not layout.known:
            for i in layout.small:
                place, tensor = layout.still.all[i], tensors[i]
                if not copyable(tensor):
                    continue
                if not layout.known or id(place.module) in new or place.key in self._unproven:
                    kept[i] = self._host_copy(tensor)
                elif id(place.module) in layout.beside and tensor.nbytes <= _SMALL:
                    with torch.inference_mode(False):
                        kept[i] = tensor.detach().clone()
        return Snapshot.of(layout.still, tensors, kept)

    def _host_copy(self, tensor: Tensor) -> Tensor:
        with torch.inference_mode(False), self._on_host():
            return tensor.detach().to("cpu", copy=True)

    # ------------------------------------------------------------------ around a piece

    def begin_piece(self) -> None:
        """Take the snapshot of the start of a piece that is not the call's first.

        It comes before everything else of the piece that can fail.
        """
        self._piece = None
        self._piece = self._take(1) if self._layout.kept else NOTHING

    def _take(self, memory: int) -> Snapshot:
        """Return the state that changes, with its values."""
        layout = self._layout
        numbers = layout.numbers.now()
        if numbers.sizes is not layout.numbers.sizes:  # modules have other attributes now
            self._layout = replace(layout, numbers=numbers)
        containers = [
            Contents.of(module, name)
            for module, name in layout.containers
            if isinstance(vars(module).get(name), CONTAINERS)
        ]
        changing = layout.changing
        if not changing.names:
            return NOTHING._replace(numbers=numbers, containers=containers)
        tensors = changing.hanging()
        kept = self._memory[memory].take(tensors)
        values = Snapshot.of(changing, tensors, kept)
        return values._replace(numbers=numbers, containers=containers)

    def end_clean_piece(self) -> bool:
        """Learn from a clean piece which state the forward changes.

        After the first clean piece of a loss function values are compared on the host, which shows
        a change that raises no version. Buffers that the forward has made are included.

        Returns:
            Whether it changes state in a way that depends on the split.
        """
        layout, still = self._layout, self._still
        moved = set(still.changed()) - self._moved
        if layout.known and self._unproven:  # the ones that have moved are state, or features
            self._unproven -= still.full()
        if layout.known and not moved:
            return layout.split_shows
        made, containers = list[Place](), layout.containers
        if not layout.known:
            made = self._made()
            late, more = self._late()
            containers = [*containers, *more]
            self._learn_attributes()
            with self._on_host():
                moved.update(
                    i
                    for i, copy in enumerate(still.copies)
                    if copy is not None and not same_bits(copy, still.tensors[i])
                )
            self._follow(late)
        moved |= switched(still, moved)
        new = Places.of([*self._state_in(still, sorted(moved - self._moved)), *made])
        for place in new.all:
            self._changing.add(place.module, place.key)
        self._learned.add((layout.key, layout.modes))
        # The next call looks again.
        self._layout = replace(
            layout,
            key=ABSENT,
            known=True,
            changing=Places.of([*layout.changing.all, *new.all]),
            still=self._still.places,
            containers=[each for each in containers if self._follows(layout, *each)],
        )
        self._moved = self._moved | moved
        return self._layout.split_shows

    def _state_in(self, still: Snapshot, moved: Sequence[int]) -> list[Place]:
        """Return which of the places that have moved hold state; the others hold features."""
        found = list[Place]()
        for i in moved:
            place = still.places.all[i]
            if is_state(still, i):
                found.append(place)
            else:
                self._features.add(place.module, place.key)
        return found

    def _learn_attributes(self) -> None:
        """Learn which numbers and containers the first clean piece has changed."""
        start = self._piece or NOTHING
        for module in start.numbers.changed():
            self._changing.add(module, (id(vars(module)), ""))
        for each in start.containers:
            if each.changed():
                self._changing.add(each.module, each.key)

    def _late(self) -> tuple[Snapshot, list[tuple[nn.Module, str]]]:
        """Return the tensors and the containers in attributes that a first clean piece has made."""
        made = self._made_attributes(since_call=False)
        late = Places.of(
            place for place in made if isinstance(vars(place.module)[place.name], Tensor)
        )
        containers = [(each.module, each.name) for each in made if each not in late.all]
        for module, name in containers:
            self._changing.add(module, (id(vars(module)), name))
        tensors = late.hanging()
        kept = [self._host_copy(tensor) if copyable(tensor) else None for tensor in tensors]
        return Snapshot.of(late, tensors, kept), containers

    def _follow(self, late: Snapshot) -> None:
        """Keep attributes that a clean piece has made, until another one shows what they are."""
        self._still = self._still.followed_by(late)
        self._made_in_call |= late.places.keys()
        self._unproven |= late.places.keys()

    def _made_attributes(self, *, since_call: bool) -> list[Place]:
        """Return tensors and containers in attributes that are not known.

        Args:
            since_call: include the ones that earlier pieces of the call have made.
        """
        layout, start = self._layout, self._call
        if start is None:
            return []
        there = self._still.places.keys() | {each.key for each in start.containers}
        if since_call:
            there = (there - self._made_in_call) | start.places.keys()
        else:
            there |= layout.changing.keys()
            there |= {(id(vars(module)), name) for module, name in layout.containers}
        return [
            Place(module, vars(module), name, "tensor")
            for module in layout.open
            for name in (*tensors_of(module), *containers_of(module))
            if (id(vars(module)), name) not in there
        ]

    def _made(self, *, since_call: bool = False) -> list[Place]:
        """Return the buffers in places where there was none when the call began.

        Args:
            since_call: include the ones that the forward is known to make.
        """
        call = self._call or NOTHING
        there = (
            self._still.places.keys()
            | (call.places if since_call else self._layout.changing).keys()
        )
        return [
            Place(module, module._buffers, name)
            for module in self._layout.modules
            for name in module._buffers
            if (id(module._buffers), name) not in there
        ]

    def restore(self, *, to_call_start: bool) -> str | None:
        """Put all state back, as objects and in value, and remove buffers that were made.

        Can be repeated after an error.

        Args:
            to_call_start: go back to the start of the call; else to the start of the piece.

        Returns:
            The label of state whose earlier value was not kept (it changed for the first time in
            this very call), or None.
        """
        snapshot = self._call if to_call_start else self._piece
        if self._call is None:
            return None
        since_call = snapshot is self._call
        with torch.inference_mode(False), torch.no_grad(), self._on_host():
            lost = self._still.put_back(skip=() if since_call else self._moved)
            for place in self._made_attributes(since_call=since_call):
                del place.owner[place.name]
            if snapshot is not None:
                lost = snapshot.put_back() or lost
        for place in self._made(since_call=since_call):
            if self._layout.known and not to_call_start:
                lost = place.label  # made in this attempt, or in an earlier piece
            del place.owner[place.name]
        if to_call_start:
            self._piece = self._call
        return lost
