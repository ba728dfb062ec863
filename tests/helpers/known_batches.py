"""Random batches whose meaning is known, cut by hand: rows per sample, object and token, lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from random import Random
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.batch.cut import ListLayout
from elastic_mbs.batch.ragged.relations import Member

# The way in which a part is cut: "items", "fields", 0, 1, "whole", or a relation of rows and
# samples with its source, such as ("INDEX", "owner").
Meaning = Any


@dataclass
class Part:
    """A part of a batch, and its piece for samples `start` to `stop`."""

    value: Any
    piece: Callable[[int, int], Any]
    meaning: Meaning = 0
    # rows of which no shape and no key tells that they are no samples, where there are as many
    unsaid: bool = False


@dataclass
class Known:
    """A batch of N samples.

    Attributes:
        batch: the batch.
        samples: N.
        piece: samples `start` to `stop`, cut by hand.
        meanings: how each part is cut, by its name.
        hidden: it can be read in another way, of which nothing tells.
    """

    batch: Any
    samples: int
    piece: Callable[[int, int], Any]
    meanings: Mapping[str, Meaning] = field(default_factory=dict)
    hidden: bool = False


def meaning_of(reading: Any) -> Meaning:
    """Return the meaning of a value of `dims`."""
    if isinstance(reading, Member):
        relation = reading.relation
        by = relation.column if relation.how.name == "COLUMN" else relation.by
        return relation.how.name, by
    if isinstance(reading, ListLayout):
        return reading.name.lower()
    return "whole" if reading is None else reading


class Maker:
    """A maker of batches, each from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.n = random.randint(1, 6)
        one_each = random.random() < 0.25  # one object in each picture
        self.counts = [1 if one_each else random.randint(0, 3) for _ in range(self.n)]
        self.starts = [0, *accumulate(self.counts)]
        self.names = 0
        self.channels = list[int]()  # of pictures

    def known(self) -> Known:
        """Return a batch."""
        if self.random.random() < 0.15:
            return self._samples()
        groups = self.random.sample(_GROUPS, self.random.randint(1, 3))
        parts: dict[str, Part] = {}
        for group in groups:
            parts |= group(self)
        return self._container(parts)

    def _samples(self) -> Known:
        """Return a list of samples."""
        kinds: list[Callable[[], Any]] = [
            lambda: {"a": self.floats(self.size(), 2)},
            lambda: (self.floats(3, self.size()), self.size()),
            lambda: self.floats(self.size(), 4),
        ]
        sample = self.random.choice(kinds)
        batch = [sample() for _ in range(self.n)]
        hidden = isinstance(batch[0], Tensor) and len({len(each) for each in batch}) == 1
        return Known(batch, self.n, lambda i, j: batch[i:j], {"": "items"}, hidden)

    def _container(self, parts: dict[str, Part]) -> Known:
        kind = self.random.choice([dict, dict, tuple, list])
        keys: list[Any] = list(parts)
        if kind is not dict:
            index = {name: str(place) for place, name in enumerate(keys)}
            for part in parts.values():
                if isinstance(part.meaning, tuple) and part.meaning[1] in index:
                    part.meaning = (part.meaning[0], index[part.meaning[1]])
            parts = {index[name]: part for name, part in parts.items()}

        def built(values: Sequence[Any]) -> Any:
            return dict(zip(keys, values, strict=True)) if kind is dict else kind(values)

        return Known(
            built([part.value for part in parts.values()]),
            self.n,
            lambda i, j: built([part.piece(i, j) for part in parts.values()]),
            {name: part.meaning for name, part in parts.items()},
            # a list of one list can be one sample, which is never split
            self._hidden(parts, keyed=kind is dict) or (kind is list and len(parts) == 1),
        )

    def _hidden(self, parts: Mapping[str, Part], *, keyed: bool) -> bool:
        key = "batch_idx" if keyed and "batch_idx" in parts else None
        loose = [
            len(part.value)
            for part in parts.values()
            if part.unsaid and not (key and part.meaning == ("INDEX", key))
        ]
        # as many rows as samples, as a picture has channels, or as there are rows with a key
        taken = {self.n, *self.channels, *([len(parts[key].value)] if key else [])}
        cut = [part for part in parts.values() if part.meaning != "whole"]
        # a single list of tensors, all there is: taken for fields by habit
        alone = len(cut) == 1 and cut[0].meaning == "items"
        nothing = all(part.unsaid for part in parts.values())
        return bool(taken.intersection(loose)) or alone or nothing or self.n == 1

    # ------------------------------------------------------------------ values

    def size(self) -> int:
        return self.random.randint(1, 5)

    def name(self, word: str) -> str:
        self.names += 1
        return f"{word}{self.names}"

    def floats(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def ints(self, *shape: int) -> Tensor:
        return torch.randint(5, shape, generator=self.generator)

    def of_samples(self, value: Any) -> Part:
        return Part(value, lambda i, j: value[i:j])

    def of_rows(self, value: Tensor, meaning: Meaning) -> Part:
        at = self.starts
        return Part(value, lambda i, j: value[at[i] : at[j]], meaning, unsaid=True)

    # ------------------------------------------------------------------ groups of parts

    def plain(self) -> dict[str, Part]:
        values = [
            self.floats(self.n, self.size(), self.size()),
            self.ints(self.n, self.size()),
            self.floats(self.n),
            [f"text {i}" for i in range(self.n)],
        ]
        chosen = self.random.sample(values, self.random.randint(1, 3))
        return {self.name("plain"): self.of_samples(value) for value in chosen}

    def pictures(self) -> dict[str, Part]:
        channels, size = self.random.choice([1, 3, self.n]), self.size()
        self.channels.append(channels)
        alike = self.random.random() < 0.5
        kind = self.random.choice([list, tuple])
        pictures = kind(
            self.floats(channels, size if alike else self.size(), size) for _ in range(self.n)
        )
        return {self.name("pictures"): self.items(pictures)}

    def targets(self) -> dict[str, Part]:
        kind = self.random.choice([list, tuple])
        targets = kind(
            {"boxes": self.floats(count, 4), "labels": self.ints(count)} for count in self.counts
        )
        return {self.name("targets"): self.items(targets)}

    def both(self) -> dict[str, Part]:
        """Return what `zip(*samples)` makes."""
        return self.pictures() | self.targets()

    def items(self, value: Any) -> Part:
        return Part(value, lambda i, j: value[i:j], "items")

    def views(self) -> dict[str, Part]:
        size = self.size()
        views = [self.floats(self.n, size) for _ in range(self.random.randint(2, 4))]
        return {
            self.name("views"): Part(views, lambda i, j: [view[i:j] for view in views], "fields")
        }

    def boxes(self) -> dict[str, Part]:
        """Return boxes with the number of their picture."""
        owner = torch.repeat_interleave(torch.arange(self.n), torch.tensor(self.counts))
        index, at = self.random.choice(["batch_idx", self.name("owner")]), self.starts
        owner = owner.double() if self.random.random() < 0.5 else owner
        total = len(owner)
        found = {
            name: self.of_rows(value, ("INDEX", index))
            for name, value in (("bboxes", self.floats(total, 4)), ("cls", self.ints(total, 1)))
        }
        found[index] = Part(
            owner, lambda i, j: owner[at[i] : at[j]] - i, ("INDEX", index), unsaid=True
        )
        return found | self.plain()

    def tokens(self) -> dict[str, Part]:
        """Return concatenated tokens, with the number of each sample's, or its first one."""
        total, at = self.starts[-1], self.starts
        if self.random.random() < 0.5:
            source = self.name("lengths")
            told = self.of_samples(torch.tensor(self.counts))
            meaning = ("LENGTHS", source)
        else:
            source = self.name("first")
            first = torch.tensor(at[:-1])
            meaning = ("OFFSETS", source)
            told = Part(first, lambda i, j: first[i:j] - at[i], meaning)
        return {self.name("tokens"): self.of_rows(self.ints(total), meaning), source: told}

    def column(self) -> dict[str, Part]:
        """Return boxes with the number of their picture in front, and pictures."""
        owner = torch.repeat_interleave(torch.arange(self.n), torch.tensor(self.counts))
        table, at = torch.cat([owner[:, None].float(), self.floats(len(owner), 3)], 1), self.starts

        def piece(i: int, j: int) -> Tensor:
            part = table[at[i] : at[j]].clone()
            part[:, 0] -= i
            return part

        boxes = {self.name("table"): Part(table, piece, ("COLUMN", 0), unsaid=True)}
        return boxes | self.plain()

    def unsaid(self) -> dict[str, Part]:
        """Return rows of which nothing tells to whom they belong."""
        rows = self.floats(self.starts[-1], self.size())
        return {self.name("rows"): self.of_rows(rows, "unsaid")}

    def stack(self) -> dict[str, Part]:
        """Return position ids of some axes beside ids."""
        width = self.size()
        ids, axes = (
            self.ints(self.n, width),
            self.ints(self.random.choice([3, self.n]), self.n, width),
        )
        return {
            self.name("positions"): Part(axes, lambda i, j: axes[:, i:j], 1),
            self.name("ids"): self.of_samples(ids),
        }

    def shared(self) -> dict[str, Part]:
        size = self.size()
        table = self.random.choice([self.floats(size, size), self.floats(size)])
        return {self.name("shared"): Part(table, lambda i, j: table, "whole", unsaid=True)}


_GROUPS: list[Callable[[Maker], dict[str, Part]]] = [
    Maker.plain,
    Maker.plain,
    Maker.pictures,
    Maker.targets,
    Maker.both,
    Maker.views,
    Maker.boxes,
    Maker.tokens,
    Maker.column,
    Maker.unsaid,
    Maker.stack,
    Maker.shared,
]


def same(one: Any, other: Any) -> bool:
    """Return whether two pieces are equal, types and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def ranges(samples: int) -> list[tuple[int, int]]:
    """Return every range of samples."""
    return [(i, j) for i, j in product(range(samples + 1), repeat=2) if i < j]
