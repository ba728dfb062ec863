"""The reading of a runtime's batches: samples, counts, and warnings at the first look."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from elastic_mbs.batch.counts import CountFn, Counts, looks_like_token_labels
from elastic_mbs.batch.cut import Dims
from elastic_mbs.batch.lengths import ByLength
from elastic_mbs.batch.view import BatchView, check_graphs
from elastic_mbs.errors import BatchError, UsageError

Count = CountFn | Mapping[str, CountFn | None] | None


class BatchReader:
    """The reader of one runtime: batches as samples with counts, as `dims` and `count` say.

    It warns once about the first batch of each loss function.
    """

    def __init__(
        self,
        dims: Dims | None,
        count: Count,
        by_length: ByLength | None,
        *,
        reduction: str,
        warn_once: Callable[[str, str], None],
        alone: bool = True,
    ) -> None:
        if not (count is None or callable(count) or isinstance(count, Mapping)):
            raise UsageError(
                f"count={count!r} is no function batch → counts per sample: give one, "
                "count_tokens(...), or a dict of those"
            )
        self._dims, self._count, self._by_length = dims, count, by_length
        self._reduction = reduction
        # the loss is right without counts
        self._counted = reduction == "sum" or count is not None
        self._warn_once = warn_once  # takes the kind of a warning and its text
        self._alone = alone  # False: other ranks have a part of each batch, and its loss terms
        self._known_lists: dict[str, Any] = {}  # by the name of the loss function, see `BatchView`
        self._looked_at: set[str] = set()

    def view(
        self,
        batch: Any,
        name: str,
        *,
        training: bool,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> BatchView:
        """Return the batch as samples, after a look at the first one of each loss function."""
        view = BatchView(batch, self._dims, self._known_lists.get(name), self._by_length)
        self._known_lists[name] = view.known_lists
        if name not in self._looked_at:
            for kind, sentence in first_look(
                view, training=training, counted=self._counted, arguments=args, named=kwargs
            ):
                self._warn_once(kind, sentence)
            self._looked_at.add(name)
        check_graphs(view)
        return view

    def read(
        self,
        batch: Any,
        name: str,
        given: tuple[tuple[Any, ...], Mapping[str, Any]],
        *,
        training: bool,
    ) -> tuple[BatchView, Counts]:
        """Return the batch as samples, with its counts; an evaluation counts samples.

        May be repeated where memory ran out.
        """
        view = self.view(batch, name, training=training, args=given[0], kwargs=given[1])
        count = self._count if training else None
        return view, Counts.read(count, view, self._reduction, alone=self._alone)

    def nothing(self) -> Counts:
        """Return the counts of a batch of which other ranks have all samples."""
        return Counts.none(self._count if isinstance(self._count, Mapping) else (None,))

    def plain(self, batch: Any) -> tuple[BatchView, Counts]:
        """Return the batch as samples in its own order, with its counts, without a look at it."""
        view = BatchView(batch, self._dims)
        return view, Counts.read(self._count, view, self._reduction)

    def some(self, view: BatchView, start: int, samples: int) -> tuple[BatchView, Counts]:
        """Return some samples of a batch as one of their own, with their counts."""
        few = BatchView(
            view.piece(start, min(start + max(1, samples), view.length)),
            self._dims,
            view.known_lists,
            self._by_length,
        )
        if few.sorted is not None:  # a batch that lies in its order, which a report can read
            few = BatchView(few.piece(0, few.length), self._dims, view.known_lists, self._by_length)
        return few, Counts.read(self._count, few, self._reduction)

    def whole(self, batch: Any, *, counted: bool) -> Counts | None:
        """Return the counts of a batch that is not to be cut; None where it cannot be.

        Without `counted` they are its samples.
        """
        try:
            view = BatchView(batch, self._dims)
        except BatchError:
            return None
        return Counts.read(self._count if counted else None, view, self._reduction)

    def uncut(self, *, counted: bool) -> Counts:
        """Return the counts of a batch that cannot be cut: it is one sample."""
        names = self._count if counted and isinstance(self._count, Mapping) else (None,)
        return Counts.one(names)


def first_look(
    view: BatchView,
    *,
    training: bool,
    counted: bool,
    arguments: Iterable[Any] = (),
    named: Mapping[str, Any] | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield (topic, sentence) of each warning about a batch.

    It may read the labels, so it is for the first batch only.

    Args:
        view: the batch.
        training: whether gradients are wanted.
        counted: the loss is right without counts.
        arguments: positional arguments of the loss function after the batch.
        named: its keyword arguments.
    """
    label = looks_like_token_labels(view) if training and not counted else None
    if label is not None:
        yield (
            "count",
            f"{label!r} has labels of -100 and no count= was given, so every sample weighs the "
            "same, however many labels it has: "
            f"give count=count_tokens({label!r}), with shift=True for a causal language model "
            "that shifts its labels itself, "
            "and verify(loss_fn, batch) to check",
        )
    others = {
        f"argument {place} after the batch": value for place, value in enumerate(arguments, 1)
    }
    for what, value in (
        others | {f"{name}=": value for name, value in (named or {}).items()}
    ).items():
        if isinstance(value, Tensor) and value.ndim and len(value) == view.length > 1:
            yield (
                "beside",
                f"{what} has {view.length} rows, as many as the batch has samples, but only the "
                "first argument is cut: every piece gets all of it. "
                "What belongs to the samples goes into the batch, as in backward(loss_fn, (x, y))",
            )
            return
