"""Types that are measured, cut and moved by functions: the user's, and those of other packages.

Batches of graphs of PyTorch Geometric and TensorDicts are known by what they can do: neither
package is imported.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from elastic_mbs.batch.foreign.graphs import (
    Places,
    is_batch_of_graphs,
    nodes_of_graphs,
    number_of_graphs,
    some_graphs,
)
from elastic_mbs.errors import BatchError


def type_name(cls: type) -> str:
    """Return the name to show for a type: `dict`, `collections.UserDict`, `mine.Batch`."""
    return (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    )


@dataclass(frozen=True, slots=True)
class Splitter:
    """The functions of a registered type, with their results checked.

    Attributes:
        keeps_type: whether a piece of a value of some type is of that type, as far as it was seen.
    """

    cls: type
    length_of: Callable[[Any], int]
    slice_of: Callable[[Any, int, int], Any]
    tensors_of: Callable[[Any], Iterable[Tensor]] | None
    move: Callable[[Any, Callable[[Tensor], Tensor]], Any] | None
    # the rows that each sample brings (its nodes), by which its memory is modelled; None: all bring
    # the same
    rows_of: Callable[[Any], list[int] | None] = lambda value: None
    # what is known of a value is found once, for all of its pieces: `slice_of` gets it
    opened: Callable[[Any], Any] = lambda value: value
    keeps_type: WeakKeyDictionary[type, bool] = field(
        default_factory=WeakKeyDictionary, compare=False
    )

    def __post_init__(self) -> None:
        if not isinstance(self.cls, type):
            raise BatchError(f"register_splitter needs a class, not {self.cls!r}")
        if self.cls in (
            object,
            Tensor,
            dict,
            list,
            tuple,
            str,
            bytes,
            int,
            float,
            bool,
            type(None),
        ):
            raise BatchError(
                f"{type_name(self.cls)} is cut by elastic_mbs itself: register a class of your "
                "own (a subclass will do)"
            )
        for name, function in (
            ("length", self.length_of),
            ("slice", self.slice_of),
            ("tensors", self.tensors_of),
            ("move", self.move),
        ):
            if not callable(function) and (function is not None or name in ("length", "slice")):
                raise BatchError(
                    f"register_splitter({self.cls.__name__}): {name} must be a function, not "
                    f"{function!r}"
                )
        if (self.tensors_of is None) != (self.move is None):
            raise BatchError(
                f"register_splitter({self.cls.__name__}): tensors= and move= need each other: "
                "tensors that are found must be movable"
            )

    def _error(self, function: str, problem: str) -> BatchError:
        return BatchError(f"the {function} function registered for {type_name(self.cls)} {problem}")

    def length(self, value: Any) -> int:
        size = self.length_of(value)
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise self._error("length", f"returned {size!r}: it must return an int ≥ 0")
        return size

    def cut(self, value: Any, opened: Any, start: int, stop: int) -> Any:
        """Return a piece; the value itself where that is all of it and pieces are of its type."""
        if start == 0 and stop > 1 and stop == self.length(opened):
            kind = type(value)
            if kind not in self.keeps_type:  # a look at one sample, once
                self.keeps_type[kind] = type(self._cut(opened, 0, 1)) is kind
            if self.keeps_type[kind]:
                return value
        return self._cut(opened, start, stop)

    def _cut(self, opened: Any, start: int, stop: int) -> Any:
        piece = self.slice_of(opened, start, stop)
        # A piece of another type (a plain tensor, say) is none that the length function knows.
        if piece is None or (isinstance(piece, self.cls) and self.length(piece) != stop - start):
            got = "None" if piece is None else f"{self.length(piece)} samples"
            raise self._error(
                "slice",
                f"returned {got} for samples {start}:{stop}: it must return the {stop - start} "
                "samples from start to stop",
            )
        return piece

    def tensors(self, value: Any) -> list[Tensor]:
        found = [] if self.tensors_of is None else list(self.tensors_of(value))
        for each in found:
            if not isinstance(each, Tensor):
                raise self._error(
                    "tensors",
                    f"gave something of type {type_name(type(each))}: it must give tensors only",
                )
        return found

    def mapped(self, value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
        """Return `value` with `fn` applied to its tensors."""
        moved = value if self.move is None else self.move(value, fn)
        if moved is None:
            raise self._error("move", "returned None: it must return the rebuilt object")
        return moved


def splitter_of(cls: type) -> Splitter | None:
    """Return the splitter of a type of another package; None for one that is not known."""
    if is_batch_of_graphs(cls):
        return Splitter(
            _origin(cls, is_batch_of_graphs),
            number_of_graphs,
            some_graphs,
            lambda batch: _tensors_in(batch.to_dict()),
            lambda batch, fn: copy.copy(batch).apply(fn),
            rows_of=nodes_of_graphs,
            opened=Places,
        )
    if _is_tensordict(cls):
        return Splitter(
            _origin(cls, _is_tensordict),
            _length_of_tensordict,
            lambda batch, start, stop: batch[start:stop],
            lambda batch: _tensors_in(batch.to_dict()),
            _moved_tensordict,
        )
    return None


def _is_tensordict(cls: type) -> bool:
    return all(hasattr(cls, name) for name in ("batch_size", "batch_dims", "auto_batch_size_"))


def _origin(cls: type, is_known: Callable[[type], bool]) -> type:
    """Return the first of the known classes that `cls` inherits from: no splitter holds `cls`."""
    return next(base for base in reversed(cls.__mro__) if is_known(base))


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in _tensors_in(part)]
    return [value] if isinstance(value, Tensor) else []


def _length_of_tensordict(batch: Any) -> int:
    if not batch.batch_dims:
        raise BatchError(
            f"a {type_name(type(batch))} has the batch size {tuple(batch.batch_size)}: give it the "
            "number of samples, as in batch.auto_batch_size_(1)"
        )
    return int(batch.batch_size[0])


def _moved_tensordict(batch: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    moved = batch.apply(fn)
    devices = {tensor.device for tensor in _tensors_in(moved.to_dict())}
    return moved.to(devices.pop()) if len(devices) == 1 and batch.device is not None else moved
