"""Types that the user registers: how each is measured, cut and moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

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
    keeps_type: dict[type, bool] = field(default_factory=dict, compare=False)

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

    def cut(self, value: Any, start: int, stop: int) -> Any:
        """Return a piece; the value itself where that is all of it and pieces are of its type."""
        if start == 0 and stop > 1 and stop == self.length(value) and self._keeps_type(value):
            return value
        return self._cut(value, start, stop)

    def _keeps_type(self, value: Any) -> bool:
        kind = type(value)
        if kind not in self.keeps_type:  # a look at one sample, once
            self.keeps_type[kind] = type(self._cut(value, 0, 1)) is kind
        return self.keeps_type[kind]

    def _cut(self, value: Any, start: int, stop: int) -> Any:
        piece = self.slice_of(value, start, stop)
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
