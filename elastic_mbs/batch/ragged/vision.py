"""Pictures and videos of the vision-language models of transformers.

Their processors join the pictures of all samples: `pixel_values` has a row for each patch (Qwen's
models, with `image_grid_thw`), or for each picture or tile of one. The number of pictures in each
sample is in `batch_num_images` or `num_images`, or follows from the placeholder tokens of each
sample, which `mm_token_type_ids` or the model's configuration tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from elastic_mbs.batch.ragged.relations import How, Member, Part, Placeholders, Relation
from elastic_mbs.batch.ragged.rows import whole_numbers
from elastic_mbs.errors import BatchError


@dataclass(frozen=True)
class Medium:
    """The keys of pictures, or of videos.

    Attributes:
        name: "image" or "video".
        pixels: the key of their pixels.
        grid: the key of their patches in time, height and width.
        type_id: of their tokens in `mm_token_type_ids`.
        numbers: keys of the number of them in each sample.
        beside: keys with a row for each of them.
    """

    name: str
    pixels: str
    grid: str
    type_id: int
    numbers: tuple[str, ...]
    beside: frozenset[str]


MEDIA = (
    Medium(
        "image",
        "pixel_values",
        "image_grid_thw",
        1,
        ("batch_num_images", "num_images"),
        frozenset({"image_sizes", "image_position_ids", "pixel_attention_mask", "spatial_shapes"}),
    ),
    Medium(
        "video",
        "pixel_values_videos",
        "video_grid_thw",
        2,
        ("num_videos",),
        frozenset({"second_per_grid_ts", "image_sizes_videos", "video_position_ids"}),
    ),
)
_NAMED = 8  # samples in an error
KEYS = tuple(key for medium in MEDIA for key in (medium.pixels, medium.grid))


def pictures(parts: Mapping[Any, Any], placeholders: Placeholders) -> dict[Any, Any]:
    """Return how pictures and videos go with their samples, by key.

    Args:
        parts: of a container.
        placeholders: the tokens of the model, by the names "image" and "video".

    Raises:
        BatchError: nothing tells which samples they belong to.
    """
    ids = parts.get("input_ids")
    found = dict[Any, Member]()
    if isinstance(ids, Tensor) and ids.ndim == 2:
        for medium in MEDIA:
            pixels, grid = parts.get(medium.pixels), parts.get(medium.grid)
            if isinstance(pixels, Tensor) and pixels.ndim:
                reader = _Reader(medium, parts, pixels, len(ids), placeholders)
                found |= reader.by_picture() if grid is None else reader.by_patch(grid)
    return found


class _Reader:
    """The reading of one medium in one batch."""

    def __init__(
        self,
        medium: Medium,
        parts: Mapping[Any, Any],
        pixels: Tensor,
        samples: int,
        placeholders: Placeholders,
    ) -> None:
        self._medium, self._parts, self._pixels = medium, parts, pixels
        self._samples, self._placeholders = samples, placeholders

    def by_patch(self, grid: Any) -> dict[Any, Member]:
        """Return how patches go with their samples."""
        medium = self._medium
        shape = tuple(getattr(grid, "shape", ()))
        if len(shape) != 2 or shape[1] != 3:
            return {}
        patches = whole_numbers(torch.as_tensor(grid).prod(1), f'"{medium.grid}"')
        total = int(patches.sum())
        if total != len(self._pixels):
            raise BatchError(
                f'"{medium.grid}" tells of {total} patches, and "{medium.pixels}" has '
                f"{len(self._pixels)}"
            )
        numbers = self._given()
        if numbers is None:
            tokens = self._tokens
            numbers = None if tokens is None else _by_size(patches.tolist(), tokens)
        if numbers is None:
            raise self._unknown()
        ends = [0, *accumulate(numbers)]
        sums = [0, *accumulate(patches.tolist())]
        if ends[-1] != len(patches):
            raise self._unknown()
        rows = [sums[stop] - sums[start] for start, stop in pairwise(ends)]
        return self._members(numbers, len(patches)) | {
            medium.grid: _member(numbers),
            medium.pixels: _member(rows),
        }

    def by_picture(self) -> dict[Any, Member]:
        """Return how pictures, or tiles of them, go with their samples."""
        medium, count = self._medium, len(self._pixels)
        numbers, told = self._given(), False
        if numbers is None:
            tiled = "image_sizes" in self._parts or "image_sizes_videos" in self._parts
            if self._pixels.ndim == 5 and not tiled:
                return self._by_sample()
            if (tokens := self._tokens) is not None:
                told = bool(tokens.any())
                if count == self._samples and bool(tokens.any(1).all()):
                    self._check_tokens([1] * count)
                    return {}  # each sample has a picture, so it has one
                numbers = _by_number(count, tokens)
        if numbers is None or sum(numbers) != count:
            if count == self._samples and not told:
                return {}
            raise self._unknown()
        self._check_tokens(numbers)
        return self._members(numbers, count) | {medium.pixels: _member(numbers)}

    def _by_sample(self) -> dict[Any, Member]:
        """Return how rows with all pictures of a sample are cut (Idefics, SmolVLM)."""
        tokens, count = self._tokens, len(self._pixels)
        if tokens is None or count != self._samples:
            return {}
        pictures, keys = tokens.any(1).tolist(), self._medium.beside & set(self._parts)
        member = _member([1] * count, pictures)
        return {self._medium.pixels: member} | {
            key: member for key in keys if len(self._parts[key]) == count
        }

    def _given(self) -> list[int] | None:
        """Return the numbers that a key gives; None where it does not, or means something else."""
        for key in self._medium.numbers:
            if key not in self._parts:
                continue
            numbers = whole_numbers(self._parts[key], f'"{key}"')
            tokens = self._tokens
            # of pictures in a flat list processors of LLaVA-OneVision say 1 for each picture
            if len(numbers) == self._samples and (
                tokens is None or torch.equal(tokens.any(1), numbers > 0)
            ):
                return numbers.tolist()
        return None

    @cached_property
    def _tokens(self) -> Tensor | None:
        """Return where the placeholder tokens are, of shape (N, L); None where it is unknown."""
        ids, types = self._parts["input_ids"], self._parts.get("mm_token_type_ids")
        if isinstance(types, Tensor) and types.shape == ids.shape:
            return (types == self._medium.type_id).cpu()
        token = self._placeholders().get(self._medium.name)
        return None if token is None else (ids == token).cpu()

    def _members(self, numbers: list[int], count: int) -> dict[Any, Member]:
        beside = self._medium.beside | set(self._medium.numbers)
        found = {key: _member(numbers) for key in beside & set(self._parts)}
        return {
            key: member
            for key, member in found.items()
            if len(self._parts[key]) == count
            and (key in self._medium.beside or count != self._samples)
        }

    def _check_tokens(self, numbers: list[int]) -> None:
        """Refuse a text that was cut off among the tokens of a picture, before anything runs.

        Pictures of one size have the same number of tokens, where nothing else tells of their size.
        """
        tokens = self._tokens
        if tokens is None or self._pixels.ndim != 4 or self._medium.beside & set(self._parts):
            return
        each = [
            many / number if number else 0.0
            for many, number in zip(tokens.sum(1).tolist(), numbers, strict=True)
        ]
        fewer = [n for n in self._cut_off() if numbers[n] and each[n] < max(each)]
        if fewer:
            raise self._misfit(fewer)

    def _cut_off(self) -> list[int]:
        """Return the samples whose text ends with a token of a picture, as truncated ones do."""
        tokens = self._tokens
        return [] if tokens is None else tokens[:, -1:].any(1).nonzero().flatten().tolist()

    def _unknown(self) -> BatchError:
        if cut := self._cut_off():
            return self._misfit(cut)
        known = "" if self._tokens is None else " (a text that was cut off has too few)"
        return BatchError(
            f"nothing tells to which of the {self._samples} samples the {len(self._pixels)} rows "
            f'of "{self._medium.pixels}" belong: neither {self._medium.numbers[0]}, nor the '
            f"placeholder tokens of input_ids{known}, by mm_token_type_ids or the model's "
            f"configuration\n  {self._said()}"
        )

    def _misfit(self, samples: list[int]) -> BatchError:
        return BatchError(
            f"the placeholder tokens of input_ids do not fit the {len(self._pixels)} rows of "
            f'"{self._medium.pixels}"; texts that end with one: sample '
            f"{', '.join(map(str, samples[:_NAMED]))}\n"
            "  if a text was cut off there: a longer max_length, or no truncation, in the call of "
            f"the processor\n  if they are whole: {self._said()}"
        )

    def _said(self) -> str:
        keys = [key for key in (self._medium.pixels, self._medium.grid) if key in self._parts]
        fields = " | ".join([f'cut.ragged("{key}", lengths=…)' for key in keys])
        return f"dims={fields}, a name or a function batch → rows of each sample"


def _member(rows: list[int], pictures: list[int] | None = None) -> Member:
    """Return a field with some rows of each sample; with None where no sample has pictures.

    Models take None for no pictures, and often no empty tensor.
    """
    needed = [0, *accumulate(rows if pictures is None else pictures)]
    return Member(Relation(How.LENGTHS, rows), Part.ROWS, needed=needed)


def _by_size(sizes: list[int], tokens: Tensor) -> list[int] | None:
    """Return the pictures of each sample by their patches; None where they do not add up.

    Each token stands for the same number of patches.
    """
    each = tokens.sum(1).tolist()
    total = sum(each)
    if not total or sum(sizes) % total:
        return None
    merged, numbers, place = sum(sizes) // total, [], 0
    for count in each:
        begin, missing = place, count * merged
        while missing > 0 and place < len(sizes):
            missing -= sizes[place]
            place += 1
        if missing:
            return None
        numbers.append(place - begin)
    return numbers


def _by_number(count: int, tokens: Tensor) -> list[int] | None:
    """Return the pictures of each sample; None where it is not clear.

    Either all have the same number of tokens, or each is a run of tokens.
    """
    each = tokens.sum(1).tolist()
    total = sum(each)
    ways = []
    if count and total and not total % count and not any(one % (total // count) for one in each):
        ways.append([one // (total // count) for one in each])
    before = torch.nn.functional.pad(tokens, (1, 0))[:, :-1]
    runs = (tokens & ~before).sum(1).tolist()
    if sum(runs) == count and runs not in ways:
        ways.append(runs)
    return ways[0] if len(ways) == 1 else None
