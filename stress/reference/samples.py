"""A batch as N samples, read without the product: the oracle must not share its mistakes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from fractions import Fraction
from numbers import Number
from typing import Any

import torch
from torch import Tensor

Path = tuple[Any, ...]

_UNSAID: Any = object()
_PLAIN = (str, bytes, bytearray, Number, type(None), Enum, torch.dtype, torch.device, torch.layout)


class Samples:
    """A batch, its length, and its pieces.

    Args:
        batch: tensors, arrays and lists in dicts, tuples, lists and dataclasses.
        options: those of ElasticMBS that say how a batch is cut: dims, pieces, length, trim.
    """

    def __init__(self, batch: Any, options: Mapping[str, Any] | None = None) -> None:
        options = options or {}
        self.batch = batch
        self._dims = _by_text(options.get("dims"))
        self._trim = _by_text(options.get("trim"))
        self.length = self._length()
        self.order = list(range(self.length))
        self._lengths: list[int] | None = None  # of the samples, where they are sorted by it
        if options.get("pieces") == "by_length":
            self._sort(options["length"])

    def _length(self) -> int:
        """Return the length on which the parts agree.

        A list of containers is items or fields by its length: it counts where nothing else does.
        """
        self.length = -1  # not known yet
        sizes: list[int] = []
        containers: list[int] = []

        def note(path: Path, value: Any, dim: int | None) -> None:
            by_length = dim is None and self._said(path) is _UNSAID and not _is_plain(value)
            (containers if by_length else sizes).append(_size(value, dim))

        self._each(self.batch, note)
        found = set(sizes or containers)
        if len(found) != 1:
            raise ValueError(f"the reference cannot cut this batch: its parts have {found} samples")
        return found.pop()

    @property
    def elements(self) -> int:
        """Elements of one sample, rounded up."""
        found: list[int] = []
        self._each(
            self.batch,
            lambda path, value, dim: found.extend(
                each.numel() if isinstance(each, Tensor) else each.size
                for each in ([value] if hasattr(value, "ndim") else tensors_of(value))
            ),
        )
        return max(1, -(-sum(found) // self.length))

    def piece(self, start: int, stop: int) -> Any:
        """Return samples `start` to `stop`, in the order in which they run."""

        def cut(path: Path, value: Any, dim: int | None) -> Any:
            if self._lengths is not None:
                return self._gathered(path, value, dim, self.order[start:stop])
            if dim is None:
                return value[start:stop]
            if isinstance(value, Tensor):
                return value.narrow(dim, start, stop - start)
            return value[(slice(None),) * dim + (slice(start, stop),)].copy()

        return self._each(self.batch, cut)

    def dim_of(self, wanted: Any) -> int:
        """Return the dimension of the samples in a tensor of the batch."""
        found: list[int] = []
        self._each(
            self.batch,
            lambda path, value, dim: found.append(dim or 0) if value is wanted else None,
        )
        return found[0] if found else 0

    def find(self, key: Any) -> Any:
        """Return the value at a name, a dotted path or an index, or of a function of the batch."""
        if callable(key):
            return key(self.batch)
        places = list(_walk(self.batch))
        return next(
            value
            for exact in (True, False)
            for path, value in places
            if str(key) in _names(path)[: 1 if exact else None]
        )

    # ------------------------------------------------------------------ how it is cut

    def _each(
        self,
        value: Any,
        cut: Callable[[Path, Any, int | None], Any],
        path: Path = (),
        inherited: Any = _UNSAID,
    ) -> Any:
        """Return the batch with `cut` in place of each value that has samples.

        `cut` gets the value's path, the value, and its dimension; None for a list of items.
        """
        said = self._said(path)
        said = inherited if said is _UNSAID else said
        if said is None or isinstance(value, _PLAIN):
            return value
        dim = said if isinstance(said, int) else 0
        if hasattr(value, "ndim"):
            return cut(path, value, dim % value.ndim) if value.ndim else value
        if isinstance(value, list | tuple) and self._holds_items(value, getattr(said, "name", "")):
            return cut(path, value, None)
        if not (isinstance(value, Mapping | list | tuple) or dataclasses.is_dataclass(value)):
            raise ValueError(f"the reference cannot cut a {type(value).__name__}")
        below = said if isinstance(said, int) else _UNSAID
        parts = _parts(value)
        return _rebuilt(
            value, {key: self._each(part, cut, (*path, key), below) for key, part in parts.items()}
        )

    def _said(self, path: Path) -> Any:
        return next((self._dims[name] for name in _names(path) if name in self._dims), _UNSAID)

    def _holds_items(self, value: Sequence[Any], said: str) -> bool:
        """Return whether a list or tuple holds one item per sample and not fields."""
        if said:
            return said == "ITEMS"
        if isinstance(value, tuple):
            return bool(value) and all(isinstance(each, str | bytes) for each in value)
        if any(getattr(each, "ndim", 0) > 0 for each in value):
            return False
        return _is_plain(value) or self.length in (-1, len(value))

    # ------------------------------------------------------------------ sorted by length

    def _sort(self, length: Any) -> None:
        """Put the samples in order of their length, the longest first."""
        found = torch.as_tensor(self.find(length))
        if found.ndim == 2:  # a mask
            mask = found.movedim(self.dim_of(self.find(length)), 0)
            self._lengths = [int(row.nonzero().max()) + 1 if row.any() else 1 for row in mask]
            self._width: int | None = mask.shape[1]
        else:
            self._lengths = [max(1, int(each)) for each in found]
            self._width = None
        lengths = self._lengths
        self.order.sort(key=lambda sample: -lengths[sample])

    def _gathered(self, path: Path, value: Any, dim: int | None, samples: list[int]) -> Any:
        """Return some samples of a value, without the padding that none of them needs."""
        assert self._lengths is not None
        if dim is None:
            return [value[i] for i in samples]
        longest = self._lengths[samples[0]]
        along = self._padded_along(path, value, dim)
        if along is not None:
            value = value[(slice(None),) * along + (slice(longest),)]
        if isinstance(value, Tensor):
            return value.index_select(dim, torch.tensor(samples, device=value.device))
        return value.take(samples, dim)

    def _padded_along(self, path: Path, value: Any, dim: int) -> int | None:
        """Return the dimension of a value's padding; None where it has none."""
        assert self._lengths is not None
        said = next((self._trim[name] for name in _names(path) if name in self._trim), _UNSAID)
        if said is not _UNSAID:
            return None if said is None else int(said) % value.ndim
        along = int(dim == 0)
        longest = max(self._lengths)
        if value.ndim < 2 or not (
            value.shape[along] >= longest
            if self._width is None
            else value.shape[along] == self._width
        ):
            return None
        rows = torch.as_tensor(value).movedim((dim, along), (0, 1))
        beyond = torch.cat([row[length:] for row, length in zip(rows, self._lengths, strict=True)])
        return along if bool((beyond == beyond[:1]).all()) else None


def counts_of(count: Any, samples: Samples) -> dict[Any, list[Fraction]]:
    """Return the loss terms of each sample, in the order in which they run, by loss.

    A single loss has the name None.
    """
    named = count if isinstance(count, Mapping) else {None: count}
    found = {}
    for name, function in named.items():
        if function is None:
            each = [Fraction(1)] * samples.length
        elif hasattr(function, "ignore_index"):  # count_tokens, of which only the fields are read
            each = _labels_that_count(function, samples)
        else:
            each = [Fraction(float(value)) for value in function(samples.batch)]
        found[name] = [each[sample] for sample in samples.order]
    return found


def _labels_that_count(tokens: Any, samples: Samples) -> list[Fraction]:
    labels = samples.find(tokens.key)
    if isinstance(labels, Tensor):
        labels = labels.movedim(samples.dim_of(labels), 0)
    rows = [torch.as_tensor(row) for row in labels]
    return [
        Fraction(int(((row[1:] if tokens.shift else row) != tokens.ignore_index).sum()))
        for row in rows
    ]


def losses_in(value: Any, names: Sequence[str] | None) -> dict[Any, Tensor]:
    """Return the losses in the result of a `loss_fn` by name; a single one has the name None."""
    if isinstance(value, Mapping):
        if "loss" in value and "loss" not in (names or ()):
            value = value["loss"]
    elif isinstance(value, tuple | list):
        value = value[0]
    elif not isinstance(value, Tensor):
        value = value.loss
    found = {None: value} if names is None else {name: value[name] for name in names}
    return {name: loss.reshape(()) for name, loss in found.items()}


# ---------------------------------------------------------------------- containers


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in _parts(value).values() for tensor in tensors_of(part)]


def mapped(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Return the same containers with `fn` applied to each tensor."""
    if isinstance(value, Tensor):
        return fn(value)
    parts = _parts(value)
    return _rebuilt(value, {key: mapped(part, fn) for key, part in parts.items()})


def _parts(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value.items())
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value):
        names = [each.name for each in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names}
    return {}


def _rebuilt(value: Any, parts: dict[Any, Any]) -> Any:
    if not parts:
        return value
    if isinstance(value, tuple):
        made: Any = type(value)
        return made(*parts.values()) if hasattr(value, "_fields") else made(parts.values())
    new = copy.copy(value)
    for key, part in parts.items():
        if isinstance(value, Mapping | list):
            new[key] = part
        else:
            object.__setattr__(new, key, part)
    return new


def _walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, part in _parts(value).items():
        yield (*path, key), part
        yield from _walk(part, (*path, key))


def _names(path: Path) -> list[str]:
    """Return the names of a path, the whole one first; an index counts from the root only."""
    starts = [0, *(i for i in range(1, len(path)) if not isinstance(path[i], int))]
    return [".".join(map(str, path[start:])) for start in starts]


def _by_text(options: Mapping[Any, Any] | None) -> dict[str, Any]:
    return {str(name): value for name, value in (options or {}).items()}


def _is_plain(value: Sequence[Any]) -> bool:
    """Return whether a list holds nothing that has parts of its own."""
    return all(isinstance(each, _PLAIN) or hasattr(each, "ndim") for each in value)


def _size(value: Any, dim: int | None) -> int:
    return len(value) if dim is None else int(value.shape[dim])
