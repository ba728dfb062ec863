"""What a user tells us: what the shapes do not say of a batch (`dims`), and how a type of theirs is measured, cut and moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from torch import Tensor

from elastic_mbs.errors import BatchError


class Reading(Enum):
    """How a list is read when its type does not say."""

    ITEMS = auto()
    FIELDS = auto()


Dims = Mapping[Any, int | Reading | None]
"""Name, dotted path or index → dimension of the samples, None (pass whole) or a `Reading`. The empty name is the batch itself."""


def whole(*names: str | int) -> dict[str, Any]:
    """`dims` for parts that every piece gets whole: `dims=whole("class_weights")`."""
    return {str(name): None for name in names}


def items(*names: str | int) -> dict[str, Any]:
    """`dims` for lists or tuples that hold one item per sample: `dims=items("images")`; without a name, the batch itself."""
    return {str(name): Reading.ITEMS for name in names or ("",)}


def fields(*names: str | int) -> dict[str, Any]:
    """`dims` for lists whose elements each hold all samples: `dims=fields("views")`; without a name, the batch itself."""
    return {str(name): Reading.FIELDS for name in names or ("",)}


def checked(dims: Any) -> dict[str, Any]:
    """`dims` with every key as text."""
    if not isinstance(dims, Mapping):
        raise BatchError(f'dims must be a mapping such as {{"position_ids": 1}} or whole("mask"), not {dims!r}')
    for key, value in dims.items():
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise BatchError(f"dims has the key {key!r}: a key is a name, a dotted path or an index")
        if isinstance(value, bool) or not (value is None or isinstance(value, int | Reading)):
            raise BatchError(f"dims says {value!r} of {key!r}: say a dimension (an int), whole({key!r}), items({key!r}) or fields({key!r})")
    return {str(key): value for key, value in dims.items()}


def type_name(cls: type) -> str:
    """The name to show for a type: `dict`, `collections.UserDict`, `mine.Batch`."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


@dataclass(frozen=True, slots=True)
class Splitter:
    """How a registered type is measured, cut and moved; the results of the user's functions are checked here."""

    cls: type
    length_of: Callable[[Any], int]
    slice_of: Callable[[Any, int, int], Any]
    tensors_of: Callable[[Any], Iterable[Tensor]] | None
    move: Callable[[Any, Callable[[Tensor], Tensor]], Any] | None

    def length(self, value: Any) -> int:
        """Samples in `value`."""
        size = self.length_of(value)
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise BatchError(f"the length function registered for {type_name(self.cls)} returned {size!r}: it must return an int ≥ 0")
        return size

    def cut(self, value: Any, start: int, stop: int) -> Any:
        """Samples `start` to `stop` of `value`."""
        piece = self.slice_of(value, start, stop)
        # The piece may be of another type (a plain tensor, say), which the registered length function does not know.
        if piece is None or (isinstance(piece, self.cls) and self.length(piece) != stop - start):
            got = "None" if piece is None else f"{self.length(piece)} samples"
            raise BatchError(
                f"the slice function registered for {type_name(self.cls)} returned {got} for samples {start}:{stop}: "
                f"it must return the {stop - start} samples from start to stop"
            )
        return piece

    def tensors(self, value: Any) -> list[Tensor]:
        """Every tensor inside `value`."""
        if self.tensors_of is None:
            return []
        found = list(self.tensors_of(value))
        for each in found:
            if not isinstance(each, Tensor):
                got = type_name(type(each))
                raise BatchError(f"the tensors function registered for {type_name(self.cls)} gave something of type {got}: it must give tensors only")
        return found

    def mapped(self, value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
        """`value` with `fn` applied to its tensors; the same object when `fn` changes none of them."""
        if self.move is None:
            return value
        changed = False

        def traced(tensor: Tensor) -> Tensor:
            nonlocal changed
            new = fn(tensor)
            changed = changed or new is not tensor
            return new

        moved = self.move(value, traced)
        if moved is None:
            raise BatchError(f"the move function registered for {type_name(self.cls)} returned None: it must return the rebuilt object")
        return moved if changed else value
