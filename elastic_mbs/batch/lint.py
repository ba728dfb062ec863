"""A linter for the first batch of a loss function: each mistake that it shows is one warning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from elastic_mbs.batch.token_counts import looks_like_token_labels
from elastic_mbs.batch.view import BatchView


def first_look(
    view: BatchView, *, training: bool, counted: bool, arguments: Iterable[Any] = (), named: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, str]]:
    """(topic, sentence) of each warning. It can read labels, so it is for the first batch only. `counted`: the loss is right without counts."""
    label = looks_like_token_labels(view) if training and not counted else None
    if label is not None:
        yield (
            "count",
            f"{label!r} has labels of -100 and no count= was given, so every sample weighs the same, however many labels it has: "
            f"give count=count_tokens({label!r}), with shift=True for a causal language model that shifts its labels itself, "
            "and verify(loss_fn, batch) to check",
        )
    others = [(f"argument {place} after the batch", value) for place, value in enumerate(arguments, 1)]
    others += [(f"{name}=", value) for name, value in (named or {}).items()]
    for what, value in others:
        if isinstance(value, Tensor) and value.ndim and len(value) == view.length > 1:
            yield (
                "beside",
                f"{what} has {view.length} rows, as many as the batch has samples, but only the first argument is cut: every piece gets all of it. "
                "What belongs to the samples goes into the batch, as in backward(loss_fn, (x, y))",
            )
            return
