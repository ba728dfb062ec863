"""Everything that the step of an optimizer of the user's can change: what is reached from it.

An optimizer may keep its state where it likes: in `optimizer.state`, in attributes, in objects (a
projector, a preconditioner, an average of the weights as a module), in optimizers that it wraps, in
the variables of a function. Containers and objects are put back as they were, by their contents;
tensors are copied by the snapshot.
"""

from __future__ import annotations

import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from elastic_mbs.errors import UsageError
from elastic_mbs.rollback.by_class import ByClass
from elastic_mbs.rollback.random_streams import RandomStreams

# attributes of an optimizer that the scaler and the guard set for one step, and put back themselves
HUNG = ("step", "grad_scale", "found_inf", "param_groups")

# They cannot be changed, or hold nothing that a step computes with.
_ATOMS: tuple[type, ...] = (
    *(bool, int, float, complex, str, bytes, type(None), type, range, slice, type(...), Enum),
    *(types.ModuleType, types.CodeType, types.GenericAlias, types.UnionType, property),
    *(types.WrapperDescriptorType, types.MethodDescriptorType, types.GetSetDescriptorType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Stream, torch.Event),
)
_HARMLESS = (
    *("logging", "threading", "_thread", "_io", "io", "datetime", "decimal", "fractions", "uuid"),
    *("pathlib", "re", "typing", "torch._ops", "torch._C._distributed_c10d", "torch._dynamo"),
)
_EMPTY = object.__basicsize__  # of an object that has no attributes

_Found = tuple[Any, Any, Any]  # a value, its name or (its key,), and the holder, found before it
_Reader = Callable[["Reach", Any, _Found], None]


class Reach:
    """The contents of all containers and objects that are reached from an optimizer.

    Attributes:
        tensors: the plain tensors reached, each once.
    """

    def __init__(self, optimizer: Optimizer, roots: Iterable[object], *, deep: bool) -> None:
        """Walk from the roots.

        Args:
            optimizer: the one whose step is to be rolled back.
            roots: what its step changes. Of the optimizer itself state and groups are reached.
            deep: the parameters, gradients and attributes of what is reached are reached, too.

        Raises:
            UsageError: something is reached whose contents cannot be read and put back.
        """
        self.tensors: list[Tensor] = []
        self._optimizer = optimizer
        self._deep = deep
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []  # with their contents
        self._others: list[Callable[[], object]] = []  # each puts the contents of one back
        self._generators: list[Any] = []
        self._left: list[_Found] = [(root, "optimizer", None) for root in roots]
        self._walk()
        if self._generators:
            streams = RandomStreams(self._generators, ())
            self._others.append(partial(streams.restore, streams.read(hosts=True)))

    def keep_gradients(self, leaves: Iterable[Tensor]) -> None:
        """Note which tensors are the gradients of these leaves, to be put back too."""
        self._gradients += [(leaf, leaf.grad) for leaf in leaves]

    def restore(self) -> None:
        """Put the contents of all containers and objects back. May be called again."""
        for own, content in self._dicts:
            if list(own) != list(content) or any(own[key] is not content[key] for key in own):
                own.clear()
                own.update(content)
        for put_back in self._others:
            put_back()
        for leaf, gradient in self._gradients:
            leaf.grad = gradient

    # ------------------------------------------------------------------ the walk

    def _walk(self) -> None:
        readers: dict[type, _Reader | None] = {}
        seen: dict[int, Any] = {}  # with the values, so that no other one gets an id
        left = self._left
        while left:
            found = left.pop()
            value = found[0]
            kind = type(value)
            if kind not in readers:
                readers[kind] = _reader_of(kind)
            read = readers[kind]
            if read is not None and id(value) not in seen:
                seen[id(value)] = value
                read(self, value, found)

    def _tensor(self, tensor: Tensor, found: _Found) -> None:
        if type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__:
            self.tensors.append(tensor)
        elif is_traceable_wrapper_subclass(tensor):
            names = tensor.__tensor_flatten__()[0]
            parts = [(getattr(tensor, name), name, found) for name in names]
            # a DTensor has its mesh among them, which no step changes
            self._left += [part for part in parts if isinstance(part[0], Tensor)]
        else:
            self._refuse(found)
        if self._deep:
            self._attributes(tensor, found)
            if tensor.is_leaf:
                self.keep_gradients([tensor])
                self._left.append((tensor.grad, "grad", found))

    def _of_optimizer(self, optimizer: Optimizer, found: _Found) -> None:
        outer = optimizer is self._optimizer
        own = vars(optimizer)

        def kept() -> dict[str, Any]:
            return {
                name: value
                for name, value in own.items()
                if "hook" not in name and not (outer and name in HUNG)
            }

        content = kept()

        def put_back() -> None:
            for name in kept().keys() - content.keys():
                del own[name]
            own.update(content)

        self._others.append(put_back)
        self._left.append((optimizer.state, "state", found))
        if self._deep:
            self._left.append((optimizer.param_groups, "param_groups", found))
            self._left += [(value, name, found) for name, value in content.items()]
            return
        for group in optimizer.param_groups:
            self._dicts.append((group, dict(group)))
            parts = group.items()
            self._left += [(value, name, found) for name, value in parts if name != "params"]

    def _dict(self, own: dict[Any, Any], found: _Found) -> None:
        self._dicts.append((own, dict(own)))
        self._left += [(value, (key,), found) for key, value in own.items()]
        if self._deep:
            self._left += [(key, (), found) for key in own]
        if type(own) is not dict:
            self._attributes(own, found)

    def _list(self, own: Any, found: _Found) -> None:
        self._others.append(partial(own.__setitem__, slice(None), own[:]))
        self._items(own, found)

    def _collection(self, own: Any, found: _Found) -> None:
        content = tuple(own)

        def put_back() -> None:
            own.clear()
            (own.update if isinstance(own, set) else own.extend)(content)

        self._others.append(put_back)
        self._items(own, found)

    def _items(self, own: Iterable[Any], found: _Found) -> None:
        self._left += [(value, (k,), found) for k, value in enumerate(own)]
        if type(own) not in (list, tuple, set, frozenset, deque, bytearray):
            self._attributes(own, found)

    def _function(self, function: types.FunctionType, found: _Found) -> None:
        cells = zip(function.__closure__ or (), function.__code__.co_freevars, strict=False)
        self._left += [(cell, name, found) for cell, name in cells]
        self._left.append((function.__defaults__, "__defaults__", found))
        self._attributes(function, found)

    def _cell(self, cell: types.CellType, found: _Found) -> None:
        try:
            content = cell.cell_contents
        except ValueError:  # it is empty
            return
        self._others.append(partial(setattr, cell, "cell_contents", content))
        self._left.append((content, "cell_contents", found))

    def _method(self, method: Any, found: _Found) -> None:
        self._left += [(method.__self__, "__self__", found), (method.__func__, "__func__", found)]

    def _builtin(self, function: types.BuiltinFunctionType, found: _Found) -> None:
        if type(function.__self__).__name__ != "PyCapsule":  # it is not an extension's function
            self._left.append((function.__self__, "__self__", found))

    def _partial(self, own: partial[Any], found: _Found) -> None:
        self._left += [(own.func, "func", found), (own.args, "args", found)]
        self._left.append((own.keywords, "keywords", found))

    def _reference(self, reference: weakref.ref[Any], found: _Found) -> None:
        self._left.append((reference(), "__call__()", found))

    def _random(self, generator: Any, found: _Found) -> None:
        self._generators.append(generator)

    def _iterator(self, generator: types.GeneratorType[Any, Any, Any], found: _Found) -> None:
        if generator.gi_frame is not None:  # it has not ended
            self._refuse(found)

    def _array(self, array: Any, found: _Found) -> None:
        if array.dtype.hasobject:
            self._refuse(found)
        self._others.append(partial(array.__setitem__, ..., array.copy()))

    def _object(self, value: Any, found: _Found) -> None:
        if not self._attributes(value, found) and type(value).__basicsize__ != _EMPTY:
            self._refuse(found)

    def _attributes(self, value: Any, found: _Found) -> bool:
        """Note the attributes of an object; return whether it can have any."""
        slots = [name for name in _slots_of(type(value)) if hasattr(value, name)]
        for name in slots:
            part = getattr(value, name)
            self._others.append(partial(object.__setattr__, value, name, part))
            self._left.append((part, name, found))
        own = getattr(value, "__dict__", None)
        if not isinstance(own, dict):
            return bool(slots)
        self._dicts.append((own, dict(own)))
        # Hooks of modules belong to whoever has set them.
        hooked = isinstance(value, torch.nn.Module)
        self._left += [
            (part, name, found) for name, part in own.items() if not (hooked and "hook" in name)
        ]
        return True

    def _refuse(self, found: _Found) -> None:
        kind = type(found[0])
        names = []
        link: _Found | None = found
        while link is not None:
            names.append(_named(link[1]))
            link = link[2]
        raise UsageError(
            f"optimizer_step() cannot roll back a step of {type(self._optimizer).__name__}: "
            f"{''.join(reversed(names))[1:]} is a {kind.__module__}.{kind.__qualname__}, whose "
            "contents cannot be read and put back. Call optimizer.step() itself"
        )


# Asked of the same few classes in every step.
@ByClass
def _reader_of(kind: Any) -> _Reader | None:
    """Return the method of `Reach` that reads values of a class; None where nothing is to read."""
    module = kind.__module__ or ""
    if issubclass(kind, _ATOMS) or any(
        module == name or module.startswith(f"{name}.") for name in _HARMLESS
    ):
        return None
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.generic | numpy.dtype):
        return None
    if numpy is not None and issubclass(kind, numpy.ndarray):
        return Reach._array
    if numpy is not None and issubclass(kind, numpy.random.Generator | numpy.random.RandomState):
        return Reach._random
    return next((read for base, read in _READERS if issubclass(kind, base)), Reach._object)


_READERS: tuple[tuple[type | types.UnionType, _Reader], ...] = (
    (Tensor, Reach._tensor),
    (Optimizer, Reach._of_optimizer),
    (dict, Reach._dict),
    (list | bytearray, Reach._list),
    (set | deque, Reach._collection),
    (tuple | frozenset, Reach._items),
    (types.FunctionType, Reach._function),
    (types.MethodType, Reach._method),
    (types.BuiltinFunctionType, Reach._builtin),
    (types.CellType, Reach._cell),
    (types.GeneratorType, Reach._iterator),
    (partial, Reach._partial),
    (weakref.ref, Reach._reference),
    (torch.Generator | random.Random, Reach._random),
)


@ByClass
def _slots_of(kind: Any) -> list[str]:
    """Return the names of the attributes that a class has slots for."""
    found = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):
                found.append(f"_{base.__name__.lstrip('_')}{name}")
            elif name not in ("__dict__", "__weakref__"):
                found.append(name)
    return found


def _named(name: str | tuple[Any, ...]) -> str:
    if isinstance(name, str):
        return f".{name}"
    return "".join("[parameter]" if isinstance(key, Tensor) else f"[{key!r}]"[:60] for key in name)
