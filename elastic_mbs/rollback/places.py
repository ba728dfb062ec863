"""Places where a module keeps state, and snapshots of what hangs in them.

A place is a name in an owner: the buffers of a module, its parameters, its own attributes, or the
gradients of its buffers. A look at many places is one loop in C.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext, suppress
from itertools import repeat
from operator import is_
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from elastic_mbs.rollback import copies

ABSENT: Any = object()  # hangs where there is nothing
Key = tuple[int, str]


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
        numbers: numbers, flags and strings of modules.
        containers: lists, deques, sets and dicts of modules.
    """

    places: Places
    tensors: list[Any]
    copies: list[Tensor | None]
    versions: list[int]
    numbers: Numbers
    containers: list[Contents]

    def followed_by(self, other: Snapshot) -> Snapshot:
        """Return both snapshots as one, without numbers and containers of the other."""
        return self._replace(
            places=Places.of([*self.places.all, *other.places.all]),
            tensors=[*self.tensors, *other.tensors],
            copies=[*self.copies, *other.copies],
            versions=[*self.versions, *other.versions],
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
            elif copy.shape != tensor.shape:
                # It was resized in place: the one case that takes memory.
                tensor.data = copy.to(tensor.device, copy=True)
            else:
                # `data` has a version of its own. Graphs that saved an unchanged buffer stay valid.
                tensor.data.copy_(copy)
        self.numbers.put_back()
        for contents in self.containers:
            contents.put_back()
        return lost


# ---------------------------------------------------------------------- attributes

PLAIN = (bool, int, float, str, type(None))
_PLAIN_TYPES = frozenset((*PLAIN, type(ABSENT)))
CONTAINERS = (list, deque, dict, set)
_TORCHS = frozenset(vars(nn.Module()))


class Contents(NamedTuple):
    """A list, deque, set or dict of a module, and what is in it.

    Its items are kept as they are: what changes inside an item is not put back.
    """

    module: nn.Module
    name: str
    container: Any
    items: Any  # a container of the same kind

    @classmethod
    def of(cls, module: nn.Module, name: str) -> Contents:
        """Return the contents as they are now."""
        container = vars(module)[name]
        kind = next(kind for kind in CONTAINERS if isinstance(container, kind))
        return cls(module, name, container, kind(container))

    @property
    def key(self) -> Key:
        """The place, as what is learned of it is kept."""
        return id(vars(self.module)), self.name

    def changed(self) -> bool:
        """Return whether another container hangs there, or other items are in it."""
        now, then = vars(self.module).get(self.name), self.items
        if now is not self.container or len(now) != len(then):
            return True
        if isinstance(then, set):
            return bool(now != then)
        if isinstance(then, dict):
            if list(map(id, now)) != list(map(id, then)):
                return True
            now, then = now.values(), then.values()
        return not all(map(is_, now, then))

    def put_back(self) -> None:
        """Put the container back with its items."""
        if not self.changed():
            return
        vars(self.module)[self.name] = self.container
        self.container.clear()
        put = "extend" if isinstance(self.container, list | deque) else "update"
        getattr(self.container, put)(self.items)


# Of torch's own the mode is the caller's to set. The other says that transformers has put its hooks
# in place. They stay where they are: it would do so again, and take every output twice.
_LEFT = _TORCHS | {"_output_capturing_hooks_installed"}


def _is_plain(name: str, value: Any) -> bool:
    return isinstance(value, PLAIN) and name not in _LEFT


class Numbers(NamedTuple):
    """The numbers, flags and strings of some modules at one moment, as columns.

    A look takes 0.2 µs for each module, so they are kept for each piece: one can raise a flag and
    lower it again, and fail in between.

    Attributes:
        modules: the modules.
        own: the attributes of each module.
        sizes: the number of attributes of each module. Names that come later are at the end.
        owners: the attributes of the module that has each number.
        names: the name of each number.
        values: each number; ABSENT where it is none any more.
    """

    modules: Sequence[nn.Module]
    own: list[dict[str, Any]]
    sizes: list[int]
    owners: list[dict[str, Any]]
    names: list[str]
    values: list[Any]

    @classmethod
    def of(cls, modules: Sequence[nn.Module]) -> Numbers:
        """Return the numbers of these modules as they are now."""
        own = list(map(vars, modules))
        sizes = list(map(len, own))
        found = [(each, *item) for each in own for item in each.items() if _is_plain(*item)]
        owners, names, values = map(list, zip(*found, strict=True)) if found else ([], [], [])
        return cls(modules, own, sizes, owners, names, values)

    def now(self) -> Numbers:
        """Return the numbers of the same modules as they are now."""
        if list(map(len, self.own)) != self.sizes:
            return Numbers.of(self.modules)
        values = list(map(dict.get, self.owners, self.names, repeat(ABSENT)))
        if not _PLAIN_TYPES.issuperset(map(type, values)):
            # Features that a module puts in the place of a number must not be kept alive.
            values = [value if isinstance(value, PLAIN) else ABSENT for value in values]
        return self._replace(values=values)

    def changed(self) -> list[nn.Module]:
        """Return the modules with another number, or with a new one."""
        moved = {
            id(owner)
            for owner, name, value in zip(self.owners, self.names, self.values, strict=True)
            if value is not ABSENT and not _is_same(owner.get(name, ABSENT), value)
        }
        return [
            module
            for module, own, size in zip(self.modules, self.own, self.sizes, strict=True)
            if id(own) in moved or _new(own, size)
        ]

    def put_back(self) -> None:
        """Put every number back, and remove new ones."""
        for own, size in zip(self.own, self.sizes, strict=True):
            for name in _new(own, size):
                del own[name]
        for owner, name, value in zip(self.owners, self.names, self.values, strict=True):
            if value is not ABSENT and owner.get(name, ABSENT) is not value:
                owner[name] = value


def _is_same(now: Any, then: Any) -> bool:
    return now is then or (isinstance(now, PLAIN) and now == then)


def _new(own: dict[str, Any], size: int) -> list[str]:
    """Return the names of numbers that were set since there were so many attributes."""
    return [name for name in list(own)[size:] if _is_plain(name, own[name])]


NOWHERE = Places.of([])
NOTHING = Snapshot(NOWHERE, [], [], [], Numbers.of([]), [])


def is_torchs(module: nn.Module) -> bool:
    """Return whether the class of a module is one of torch's own."""
    return type(module).__module__.startswith("torch.nn.")


def keeps_statistics(module: nn.Module) -> bool:
    """Return whether a module is one of torch's own with running statistics.

    A module of the user's can put new tensors in their place, or count in an attribute.
    """
    return "running_mean" in module._buffers and type(module).__module__.startswith(
        "torch.nn.modules."
    )


def tensors_of(module: nn.Module) -> list[str]:
    """Return the names of attributes that are tensors without a graph."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and not value.requires_grad
    ]


def containers_of(module: nn.Module) -> list[str]:
    """Return the names of the user's own attributes that are containers of items."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, CONTAINERS) and name not in _TORCHS
    ]


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
    return now.shape == then.shape or _has_grown(then, now)


def _has_grown(then: Tensor, now: Tensor) -> bool:
    """Return whether the rows of one tensor are the first or the last ones of a longer one."""
    if not (copyable(then) and copyable(now)):
        return False
    if not then.numel():
        return True  # torch joins an empty one to rows of any width
    if not 0 < then.ndim == now.ndim:
        return False
    rows, kept = len(then), then.detach().to("cpu")
    return rows < len(now) and any(same_bits(kept, each) for each in (now[:rows], now[-rows:]))


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
