"""Places where a module keeps state, and snapshots of what hangs in them.

A place is a name in an owner: the buffers of a module, its parameters, its own attributes, or the
gradients of its buffers. A look at many places is one loop in C.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from itertools import repeat
from operator import is_
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from elastic_mbs.rollback import copies
from elastic_mbs.rollback.attributes import ABSENT, Contents, Key, Numbers, tensors_of


class Changing:
    """The state of modules that is known to change, as long as the modules are there."""

    def __init__(self) -> None:
        self._keys = WeakIdKeyDictionary()  # of each module

    def add(self, module: nn.Module, key: Key) -> None:
        """Take over a place of a module."""
        self._keys.setdefault(module, set()).add(key)

    def has(self, module: nn.Module, key: Key | None = None) -> bool:
        """Return whether a place of a module is known to change; without a key, any of them."""
        keys = self._keys.get(module, ())
        return bool(keys) if key is None else key in keys

    def attributes(self, module: nn.Module) -> list[str]:
        """Return the names of a module's attributes that are known to change, there or not."""
        own = id(vars(module))
        return sorted(name for owner, name in self._keys.get(module, ()) if owner == own and name)


class GradientsOf:
    """The gradients of a module's buffers, by the buffers' names.

    Some codebooks accumulate in them.
    """

    def __init__(self, buffers: dict[str, Tensor | None]) -> None:
        self.buffers = buffers

    def __contains__(self, name: str) -> bool:
        return False

    def get(self, name: str, default: Any = None) -> Any:
        """Return the gradient of a buffer; None where there is none."""
        buffer = self.buffers.get(name)
        return None if buffer is None or not buffer.is_leaf else buffer.grad

    def __setitem__(self, name: str, grad: Tensor | None) -> None:
        if self.get(name) is not grad:
            self.buffers[name].grad = grad  # type: ignore[union-attr]  # it has one, or gets one


class Place(NamedTuple):
    """A name in an owner, with what it is called in an error."""

    module: nn.Module
    owner: Any  # a dict, or `GradientsOf`
    name: str
    kind: str = "buffer"

    @property
    def key(self) -> Key:
        """The place, as what is learned of it is kept."""
        if isinstance(self.owner, GradientsOf):
            return id(self.owner.buffers), f"{self.name}.grad"
        return id(self.owner), self.name

    @property
    def label(self) -> str:
        """The name to show."""
        return f"the {self.kind} {type(self.module).__name__}.{self.name}"


class Places(NamedTuple):
    """Places, as columns."""

    all: list[Place]
    owners: list[Any]
    names: list[str]
    get: Callable[[Any, str, Any], Any]  # dict.get where all owners are dicts, because it is faster

    @classmethod
    def of(cls, places: Iterable[Place]) -> Places:
        """Return these places."""
        every = list(places)
        owners = [place.owner for place in every]
        plain = all(isinstance(owner, dict) for owner in owners)
        return cls(every, owners, [place.name for place in every], dict.get if plain else _get)

    def hanging(self) -> list[Any]:
        """Return what hangs in each place."""
        return list(map(self.get, self.owners, self.names, repeat(ABSENT)))

    def keys(self) -> set[Key]:
        """Return the keys of all places."""
        return {place.key for place in self.all}


def _get(owner: Any, name: str, default: Any) -> Any:
    return owner.get(name, default)


class Snapshot(NamedTuple):
    """State at one moment, as columns.

    Attributes:
        places: the places.
        tensors: the tensor in each place.
        copies: the value of each tensor, where it was kept.
        versions: the version of each tensor, which shows a change where no value was kept.
        addresses: where the memory of each tensor with a copy begins.
        numbers: numbers, flags and strings of modules.
        containers: lists, deques, sets and dicts of modules.
    """

    places: Places
    tensors: list[Any]
    copies: list[Tensor | None]
    versions: list[int]
    addresses: list[int]
    numbers: Numbers
    containers: list[Contents]

    @classmethod
    def of(cls, places: Places, tensors: list[Any], copies: list[Tensor | None]) -> Snapshot:
        """Return the snapshot of tensors of which these copies were made just now."""
        none = all(map(is_, copies, repeat(None)))
        addresses = [0] * len(copies) if none else list(map(_address, tensors, copies))
        return NOTHING._replace(
            places=places,
            tensors=tensors,
            copies=copies,
            versions=versions(tensors),
            addresses=addresses,
        )

    def followed_by(self, other: Snapshot) -> Snapshot:
        """Return both snapshots as one, without numbers and containers of the other."""
        return self._replace(
            places=Places.of([*self.places.all, *other.places.all]),
            tensors=[*self.tensors, *other.tensors],
            copies=[*self.copies, *other.copies],
            versions=[*self.versions, *other.versions],
            addresses=[*self.addresses, *other.addresses],
        )

    def changed(self) -> list[int]:
        """Return the places with another tensor, or with another version of it."""
        now = self.places.hanging()
        seen = versions(now)
        if seen == self.versions and all(map(is_, now, self.tensors)):
            return []
        return [
            i
            for i, tensor in enumerate(now)
            if tensor is not self.tensors[i] or seen[i] != self.versions[i]
        ]

    def full(self) -> set[Key]:
        """Return the keys of the places in which a tensor hangs."""
        every = zip(self.places.all, self.tensors, strict=True)
        return {place.key for place, tensor in every if isinstance(tensor, Tensor)}

    def leave_device(self) -> None:
        """Move the copies to the host."""
        for i, copy in enumerate(self.copies):
            if copy is not None:
                self.copies[i] = copy.to("cpu", copy=True)

    def put_back(self, skip: Collection[int] = ()) -> str | None:
        """Put every tensor back in its place, with its value. Can be repeated after an error.

        Returns:
            The label of a place whose value was not kept, or None.
        """
        lost = None
        for i, (place, tensor, copy) in enumerate(
            zip(self.places.all, self.tensors, self.copies, strict=True)
        ):
            if i in skip:
                continue
            if tensor is ABSENT:
                place.owner.pop(place.name, None)
                continue
            place.owner[place.name] = tensor
            if copy is None:
                lost = place.label if versions([tensor]) != [self.versions[i]] else lost
            elif copy.shape != tensor.shape or _address(tensor, copy) != self.addresses[i]:
                # It was resized in place, or its memory is another tensor's by now, perhaps the
                # batch's: the cases that take memory.
                tensor.data = copy.to(tensor.device, copy=True)
            else:
                # `data` has a version of its own. Graphs that saved an unchanged buffer stay valid.
                tensor.data.copy_(copy)
        self.numbers.put_back()
        for contents in self.containers:
            contents.put_back()
        return lost


NOWHERE = Places.of([])
NOTHING = Snapshot(NOWHERE, [], [], [], [], Numbers.of([]), [])


def places_of(module: nn.Module, also: Iterable[str] = ()) -> Iterator[Place]:
    """Yield every place in which a module keeps tensors.

    Args:
        module: the module.
        also: the names of attributes in which it keeps some at other times.
    """
    for name in module._buffers:
        yield Place(module, module._buffers, name)
    gradients = GradientsOf(module._buffers)
    for name in module._buffers:
        yield Place(module, gradients, name, "gradient of the buffer")
    # An embedding with a largest norm edits its rows before it looks them up: the same each time.
    if getattr(module, "max_norm", None) is None:
        for name in module._parameters:
            yield Place(module, module._parameters, name, "parameter")
    for name in dict.fromkeys([*tensors_of(module), *also]):
        yield Place(module, vars(module), name, "tensor")


def always_changes(place: Place) -> bool:
    """Return whether a place is taken to change without a look.

    A module of the user's can update running statistics by a flag of its own, and BatchNorm raises
    no version.
    """
    module = place.module
    if place.kind != "buffer" or "running_mean" not in module._buffers:
        return False
    updated = module.training or not keeps_statistics(module)
    return updated and copyable(module._buffers[place.name])


def keeps_statistics(module: nn.Module) -> bool:
    """Return whether a module is one of torch's own with running statistics.

    A module of the user's can put new tensors in their place, or count in an attribute.
    """
    return "running_mean" in module._buffers and type(module).__module__.startswith(
        "torch.nn.modules."
    )


# ---------------------------------------------------------------------- tensors


def shapes(tensors: Sequence[Any]) -> list[torch.Size | None]:
    """Return the shape of each tensor; None where there is none."""
    return list(map(getattr, tensors, repeat("shape"), repeat(None)))


def versions(tensors: Sequence[Any]) -> list[int]:
    """Return the version of each tensor; -1 where it has none."""
    try:
        return list(map(getattr, tensors, repeat("_version"), repeat(-1)))
    except RuntimeError:  # inference tensors have no version
        return [
            -1
            if isinstance(tensor, Tensor) and tensor.is_inference()
            else getattr(tensor, "_version", -1)
            for tensor in tensors
        ]


def _address(tensor: Any, copy: Tensor | None) -> int:
    """Return where the memory of a tensor with a copy begins; 0 where there is none."""
    try:
        return 0 if copy is None else int(tensor.data_ptr())
    except RuntimeError:  # some subclasses have no memory of their own
        return 0


def copyable(tensor: Any) -> TypeGuard[Tensor]:
    """Return whether a tensor's values can be copied and compared.

    Of others (sparse, nested, meta, expanded, inference) only identity and version are known.
    """
    return (
        isinstance(tensor, Tensor)
        and tensor.layout is torch.strided
        and not (
            tensor.is_meta
            or tensor.is_nested
            or tensor.is_quantized
            or tensor.is_inference()
            or 0 in tensor.stride()
        )
    )


def same_bits(copy: Tensor, tensor: Tensor) -> bool:
    """Return whether both have the same bits. NaN is not equal to itself, so bits are compared."""
    a, b = copy.reshape(-1), tensor.detach().to("cpu").reshape(-1)
    return (
        copy.shape == tensor.shape
        and a.dtype == b.dtype
        and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    )


def is_state(before: Snapshot, i: int) -> bool:
    """Return whether a change is one of state: features that a module stores are none."""
    place, then = before.places.all[i], before.tensors[i]
    if place.kind != "tensor":
        return True
    now = place.owner.get(place.name)
    if not isinstance(now, Tensor) or now.requires_grad:
        return False
    # One that is empty again and again can be a hidden state, and is taken for it.
    return not isinstance(then, Tensor) or now.shape == then.shape or _shares_rows(then, now)


def _shares_rows(then: Tensor, now: Tensor) -> bool:
    """Return whether the first or the last row of a tensor was a row of the one before it.

    So it is where rows were joined to the ones that were there, and the oldest ones cut off.
    """
    if not (copyable(then) and copyable(now)):
        return False
    if not then.numel():
        return True  # torch joins an empty one to rows of any width
    if not now.numel() or not then.ndim or then.shape[1:] != now.shape[1:]:
        return False
    rows, ends = then.detach().to("cpu"), now.detach()[[0, -1]].to("cpu")
    if rows.dtype != ends.dtype:
        return False
    rows, ends = (each.contiguous().view(len(each), -1).view(torch.uint8) for each in (rows, ends))
    return any(bool((rows == end).all(1).any()) for end in ends)


def switched(still: Snapshot, moved: set[int]) -> set[int]:
    """Return the places of modules that the forward has put in training mode.

    One of several running statistics has raised its version there: the count does.
    """
    owners = still.places.owners
    training = {id(owners[i]) for i in moved if "running_mean" in owners[i]}
    return {i for i, owner in enumerate(owners) if id(owner) in training}


class Memory:
    """Memory for copies of tensors, which is filled again and again."""

    def __init__(self, on_host: Callable[[], Any]) -> None:
        self._on_host = on_host  # a context in which host memory is made
        self._host = False  # copies lie on the host for good
        self._where: Callable[[], Any] = nullcontext  # the context of the copies that are there
        self._tensors: list[Any] = []
        self._shapes: list[torch.Size | None] = []
        self._copies: list[Tensor | None] = []
        self._groups: copies.Groups = []

    def take(self, tensors: list[Any]) -> list[Tensor | None]:
        """Copy the values; None for a tensor that cannot be copied."""
        if (
            len(tensors) != len(self._tensors)
            or not all(map(is_, tensors, self._tensors))
            or shapes(tensors) != self._shapes
        ):
            self._prepare(tensors)
        with self._where():
            copies.copy(self._groups)
        return self._copies

    def _prepare(self, tensors: list[Any]) -> None:
        # Empty until it is done: there may be no room.
        self._tensors, self._copies, self._groups = [], [], []
        kept = self._allocated(tensors)
        groups = copies.group(
            (copy, tensor.detach() if tensor.requires_grad else tensor)
            for tensor, copy in zip(tensors, kept, strict=True)
            if copy is not None
        )
        self._copies, self._groups, self._shapes = kept, groups, shapes(tensors)
        # Detached tensors can lie elsewhere the next time.
        if not any(map(getattr, tensors, repeat("requires_grad"), repeat(False))):
            self._tensors = tensors

    def _allocated(self, tensors: list[Any]) -> list[Tensor | None]:
        """Return memory for copies: on the device where there is room, else on the host."""
        with torch.inference_mode(False):
            if not self._host:
                self._where = nullcontext
                with suppress(torch.OutOfMemoryError):
                    return [torch.empty_like(each) if copyable(each) else None for each in tensors]
            self._where = self._on_host
            with self._on_host():
                return [
                    torch.empty_like(each, device="cpu") if copyable(each) else None
                    for each in tensors
                ]

    def leave_device(self) -> None:
        """Put copies on the host from now on, and let go of the ones that are there."""
        self._host = True
        self.let_go()

    def let_go(self) -> None:
        """Drop the memory; the next copies get some of their own."""
        self._tensors, self._copies, self._groups = [], [], []

    @property
    def held(self) -> list[Tensor | None]:
        """The copies that are there."""
        return self._copies
