"""The reading of a runtime's batches: samples, counts, and warnings at the first look."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from elastic_mbs.batch.counts import CountFn, Counts, looks_like_token_labels
from elastic_mbs.batch.cut import Dims
from elastic_mbs.batch.lengths import ByLength
from elastic_mbs.batch.ragged.relations import Placeholders
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
        counted: bool,
        warn_once: Callable[[str, str], None],
        placeholders: Placeholders = dict,
    ) -> None:
        if not (count is None or callable(count) or isinstance(count, Mapping)):
            raise UsageError(
                f"count={count!r} is no function batch → counts per sample: give one, "
                "count_tokens(...), or a dict of those"
            )
        self._dims, self._count, self._by_length = dims, count, by_length
        self._placeholders = placeholders  # tokens that stand for pictures, as the model says
        self._counted = counted or count is not None  # the loss is right without counts
        self._warn_once = warn_once  # takes the kind of a warning and its text
        self._known_lists: dict[str, Any] = {}  # by the name of the loss function, see `BatchView`
        self._looked_at: set[str] = set()

    @property
    def count_names(self) -> tuple[str, ...] | None:
        return tuple(self._count) if isinstance(self._count, Mapping) else None

    def plain_view(
        self, batch: Any, known_lists: Any = None, by_length: ByLength | None = None
    ) -> BatchView:
        """Return a batch as samples, without a look at it."""
        return BatchView(batch, self._dims, known_lists, by_length, self._placeholders)

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
        view = self.plain_view(batch, self._known_lists.get(name), self._by_length)
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
        return view, Counts.read(self._count if training else None, view)

    def first(self, batch: Any, samples: int) -> tuple[BatchView, Counts]:
        """Return the first samples of a batch, with their counts."""
        view = self.plain_view(batch)
        piece, known = view.piece(0, max(1, min(samples, view.length))), view.known_lists
        few = self.plain_view(piece, known, self._by_length)
        if few.sorted is not None:  # a batch that lies in its order, which a report can read
            few = self.plain_view(few.piece(0, few.length), known, self._by_length)
        return few, Counts.read(self._count, few)

    def totals(self, batch: Any) -> tuple[Any, int]:
        """Return the total count of a whole batch and its length; 0 where it cannot be cut."""
        try:
            view = self.plain_view(batch)
        except BatchError:
            return 0, 0
        return Counts.read(self._count, view).total, view.length


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
