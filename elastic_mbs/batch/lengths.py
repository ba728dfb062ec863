"""Samples sorted by length, so that a piece has no padding that only other pieces need.

In each piece a tensor or array is trimmed to its longest sample, along

1. the dimension that `trim` names; with None it is never trimmed;
2. else its first dimension beside that of the samples, under two conditions. The dimension is as
   long as the mask (with a function: not shorter than the longest sample). And beyond the length of
   each sample the tensor holds one and the same value.

So only padding is lost, even where class scores or a target sequence have the same shape by
accident. A tensor that once held more than padding is never trimmed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elastic_mbs.batch.agreement.texts import place_of
from elastic_mbs.batch.containers import (
    Path,
    Role,
    dotted,
    kind_of,
    lookup,
    own_array,
    suffixes,
    tensors_in,
)
from elastic_mbs.batch.layout import Cut, Node, where
from elastic_mbs.batch.pieces import PaddedCosts
from elastic_mbs.errors import BatchError, UsageError

Length = str | int | Callable[[Any], Any] | None
Trim = Mapping[Any, int | None]

_BY_RULE: Any = object()


@dataclass(eq=False)
class Sorted:
    """A batch whose samples are taken by length, the longest first."""

    order: list[int]  # of the batch's samples
    lengths: list[int]  # in this order
    costs: PaddedCosts
    trims: dict[int, int]  # by the id of a node: the dimension along which it is trimmed
    # the order, on each device of the batch
    _indices: dict[torch.device, Tensor] = field(default_factory=dict)

    def piece(self, root: Node, start: int, stop: int) -> Any:
        """Return samples `start` to `stop` in this order, trimmed: copies in new containers."""
        return root.rebuilt(lambda end: self._gathered(end, start, stop))

    def _gathered(self, end: Node, start: int, stop: int) -> Any:
        value, dim = end.value, self.trims.get(id(end))
        if end.cut is Cut.WHOLE:
            return end.piece(start, stop)
        if end.cut is Cut.ITEMS:
            return end.with_items([value[i] for i in self.order[start:stop]])
        if dim is not None and self.lengths[start] < value.shape[dim]:
            value = value[(*(slice(None),) * dim, slice(self.lengths[start]))]
        if end.cut is Cut.COPY:
            return own_array(value.take(self.order[start:stop], end.dim))
        if value.device not in self._indices:
            self._indices[value.device] = torch.tensor(self.order, device=value.device)
        return value.index_select(end.dim, self._indices[value.device][start:stop])


class Lengths(NamedTuple):
    """The lengths of a batch's samples."""

    sorted: Sorted | None  # None where nothing is to be sorted or trimmed
    longest: int  # positions of the longest sample; where nothing is trimmed, of each sample


class ByLength:
    """The way to sort and trim the batches of one runtime."""

    def __init__(
        self, length: Length, trim: Trim | None, warn_once: Callable[[str, str], None]
    ) -> None:
        if not (
            callable(length) or (isinstance(length, str | int) and not isinstance(length, bool))
        ):
            raise UsageError(
                f"length={length!r}: pieces='by_length' needs the name of an attention mask in "
                "the batch, or a function batch → lengths"
            )
        for name, dim in (trim or {}).items():
            if isinstance(dim, bool) or not isinstance(dim, int | None):
                raise UsageError(
                    f"trim says {dim!r} of {name!r}: say the dimension of its padding, or None to "
                    "pass it as it is"
                )
        self._length, self._trim = length, {str(name): dim for name, dim in (trim or {}).items()}
        self.trimmed = tuple(self._trim)  # names that `trim` says something of
        self._warn_once = warn_once
        self._untrimmed: set[Path] = set()  # places that once held more than padding

    @classmethod
    def of(
        cls, pieces: str, length: Length, trim: Trim | None, warn_once: Callable[[str, str], None]
    ) -> ByLength | None:
        """Return the sorting that the options of a runtime ask for; None for none."""
        if pieces == "in_order" and (length is not None or trim is not None):
            raise UsageError(
                "length= and trim= say how samples are sorted by length: they go with "
                "pieces='by_length'"
            )
        return cls(length, trim, warn_once) if pieces == "by_length" else None

    def read(self, batch: Any, ends: Sequence[Node], samples: int) -> Lengths:
        """Return the batch in order of length, where there is something to sort or trim."""
        for end in ends:
            if end.cut in (Cut.CUSTOM, Cut.RAGGED):
                ragged = end.cut is Cut.RAGGED
                raise BatchError(
                    f"{where(end.path)} is cut into ranges of "
                    f"{'rows' if ragged else 'samples, by register_splitter'}, and cannot be put "
                    f"in order of length: {'leave out pieces=' if ragged else 'make it a list'}"
                )
        lengths, width = self._lengths(batch, ends, samples)
        longest, shortest = int(lengths.max()), int(lengths.min())
        if shortest == width:
            return Lengths(None, longest)
        trims = {
            id(end): dim for end in ends if (dim := self._dim_of(end, lengths, width)) is not None
        }
        widths = {end.value.shape[trims[id(end)]] for end in ends if id(end) in trims}
        nothing_to_trim = longest == shortest and widths <= {longest}
        if nothing_to_trim or self._little_evidence(ends, trims, lengths):
            return Lengths(None, max(widths, default=longest))
        ordered, order = torch.sort(lengths, descending=True, stable=True)
        each = ordered.tolist()
        costs = PaddedCosts(_elements(ends, trims, each))
        return Lengths(Sorted(order.tolist(), each, costs, trims), longest)

    def _little_evidence(
        self, ends: Sequence[Node], trims: Mapping[int, int], lengths: Tensor
    ) -> bool:
        """Return whether one position alone was found to be padding: all tensors have such a one.

        There is nothing to gain either.
        """
        total = int(lengths.sum())
        return any(
            end.value.shape[trims[id(end)]] * len(lengths) - total == 1
            for end in ends
            if id(end) in trims and not any(name in self._trim for name in suffixes(end.path))
        )

    def _lengths(self, batch: Any, ends: Sequence[Node], samples: int) -> tuple[Tensor, int | None]:
        """Return the samples' lengths, at least 1, on the host, and the width of a mask."""
        if not callable(self._length):
            return self._read_mask(batch, ends)
        given = self._length(batch)
        listed = isinstance(given, Tensor | Sequence) or kind_of(type(given)).role is Role.ARRAY
        lengths = (
            torch.as_tensor(given, device="cpu")
            if listed and not isinstance(given, str)
            else torch.empty(0)
        )
        if lengths.shape != (samples,) or lengths.is_floating_point() or int(lengths.min()) < 0:
            raise BatchError(
                f"length= returned {given!r:.80} for a batch of {samples} samples: it must return "
                "a whole number for each, 0 or more"
            )
        return lengths.long().clamp(min=1), None

    def _read_mask(self, batch: Any, ends: Sequence[Node]) -> tuple[Tensor, int]:
        name = self._length
        try:
            value = lookup(batch, name)  # type: ignore[arg-type]  # it is no function
        except LookupError as error:
            raise BatchError(f"length={name!r}: {error}") from error
        end = next((end for end in ends if end.value is value), None)
        mask = (
            torch.as_tensor(value)
            if end is not None and end.cut in (Cut.NARROW, Cut.COPY)
            else None
        )
        if (
            mask is None
            or end is None
            or mask.ndim != 2
            or not mask.numel()
            or mask.is_floating_point()
        ):
            raise BatchError(
                f"length={name!r} is no mask of shape (N, L) with whole numbers or bools; a "
                "function batch → N lengths would do, too"
            )
        valid = mask.movedim(end.dim, 0) != 0
        if not bool(valid[:, 0].all()):
            raise BatchError(
                f"length={name!r}: some samples begin with 0, and only padding at the end is "
                "trimmed: pad on the right, or, if 1 means padding: "
                f"length=lambda b: ({place_of(end.path, batch)} == 0).sum({1 - end.dim})"
            )
        width = valid.shape[1]
        positions = torch.arange(1, width + 1, device=valid.device)
        return torch.where(valid, positions, 0).amax(1).cpu(), width

    def _dim_of(self, end: Node, lengths: Tensor, width: int | None) -> int | None:
        """Return the dimension along which a value is trimmed; None where it is not."""
        if end.cut not in (Cut.NARROW, Cut.COPY):
            return None
        shape, longest = tuple(end.value.shape), int(lengths.max())
        fitting = [
            dim
            for dim, size in enumerate(shape)
            if dim != end.dim and (size >= longest if width is None else size == width)
        ]
        given = next(
            (self._trim[name] for name in suffixes(end.path) if name in self._trim), _BY_RULE
        )
        if given is None:
            return None
        if given is not _BY_RULE:
            if given not in fitting and given + len(shape) not in fitting:
                wanted = f"at least {longest}" if width is None else width
                raise BatchError(
                    f"trim says dim {given} of {where(end.path)}, of shape {shape}: the padded "
                    f"length there should be {wanted}"
                )
            return given % len(shape)
        first = int(end.dim == 0)
        if first in fitting and end.path not in self._untrimmed:
            if _is_padding(end, first, lengths):
                return first
            name = dotted(end.path)
            self._warn_once(
                f"trim {name}",
                f"{where(end.path)} is as long as the padded samples, but holds more than padding "
                "beyond their lengths, so pieces get all of its "
                f"dim {first}: if it has to be trimmed with them, trim={{{name!r}: {first}}}; if "
                f"not, trim={{{name!r}: None}} says so",
            )
        self._untrimmed.add(end.path)
        return None


def _is_padding(end: Node, dim: int, lengths: Tensor) -> bool:
    """Return whether a tensor holds one and the same value beyond the length of each sample."""
    value = torch.as_tensor(end.value).movedim((end.dim, dim), (0, 1))
    least, shortest = (int(found) for found in lengths.min(0))
    if least >= value.shape[1]:
        return True
    value, lengths = value[:, least:], lengths.to(value.device)
    beyond = torch.arange(least, least + value.shape[1], device=value.device) >= lengths[:, None]
    differs = value != value[shortest, -1]
    return not bool((differs & beyond.reshape(*beyond.shape, *(1,) * (value.ndim - 2))).any())


def _elements(ends: Sequence[Node], trims: Mapping[int, int], lengths: Sequence[int]) -> list[int]:
    """Return the elements of each sample once it is trimmed to its length."""
    by_position = by_sample = 0.0
    for end in ends:
        if end.cut is Cut.ITEMS:  # assumed to grow with the length
            by_position += sum(tensor.numel() for tensor in tensors_in(end.value)) / sum(lengths)
        elif end.cut is not Cut.WHOLE:
            elements = end.value.numel() if end.cut is Cut.NARROW else end.value.size
            dim = trims.get(id(end))
            if dim is None:
                by_sample += elements / len(lengths)
            else:
                by_position += elements / len(lengths) / end.value.shape[dim]
    return [ceil(by_sample + (by_position or 1.0) * length) for length in lengths]
