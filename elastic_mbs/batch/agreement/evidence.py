"""The ways to read a part whose rows are not the samples, and what speaks for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elastic_mbs.batch import cut
from elastic_mbs.batch.agreement.texts import some_of
from elastic_mbs.batch.containers import Path, dotted
from elastic_mbs.batch.layout import Cut, Node, call, quoted

WHOLE_NUMBERS = {torch.int64, torch.int32}


@dataclass(frozen=True)
class Way:
    """A way to say how parts are cut."""

    word: str  # of `dims=`; "" for a dimension

    @classmethod
    def items(cls) -> Way:
        return cls("items")

    def text(self, paths: Sequence[Path]) -> str:
        """Return what is pasted after `dims=`."""
        if not self.word:
            return f"{{{', '.join(f'{quoted(path)}: 1' for path in paths)}}}"
        return call(self.word, *paths)

    def meaning(self, paths: Sequence[Path]) -> str:
        """Return when it is right."""
        names = some_of(paths)
        return {
            "items": f"one per entry of {names}",
            "": f"on dim 1 of {names}",
        }[self.word]

    def dims(self, paths: Sequence[Path]) -> dict[str, Any]:
        """Return the value of `text`."""
        names = [dotted(path) for path in paths]
        if not self.word:
            return dict.fromkeys(names, 1)
        return cut.items(*[name for name in names if name])


def ways_of(leaf: Node, samples_of: Sequence[Node], samples: int) -> Iterator[Way]:
    """Yield the ways that the shapes of other parts speak for; a single size speaks for none.

    Args:
        leaf: a part of another length than the batch.
        samples_of: the parts with one row per sample.
        samples: of the batch.
    """
    if leaf.cut not in (Cut.NARROW, Cut.COPY):
        return
    shape = tuple(leaf.value.shape)
    others = [tuple(each.value.shape) for each in samples_of if each.cut in (Cut.NARROW, Cut.COPY)]
    # a stack of such parts: position ids of three axes
    if leaf.value.dtype in WHOLE_NUMBERS and len(shape) > 2 and shape[1:] in others:
        yield Way("")
