"""The reading of a runtime's batches: samples, counts, and warnings at the first look."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from torch import Tensor

from elastic_mbs.batch.containers import dotted, unmatched, walk
from elastic_mbs.batch.counts import CountFn, Counts, looks_like_token_labels
from elastic_mbs.batch.cut import Dims
from elastic_mbs.batch.lengths import ByLength
from elastic_mbs.batch.ragged.relations import Placeholders
from elastic_mbs.batch.view import BatchView, check_graphs
from elastic_mbs.errors import BatchError, UsageError

_NAMED = 8  # names of a batch in a warning

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
        sequence_first: Callable[[], str | None],
        placeholders: Placeholders = dict,
        alone: bool = True,
    ) -> None:
        if not (count is None or callable(count) or isinstance(count, Mapping)):
            raise UsageError(
                f"count={count!r} is no function batch → counts per sample: give one, "
                "count_tokens(...), or a dict of those"
            )
        self._dims, self._count, self._by_length = dims, count, by_length
        self._placeholders = placeholders  # tokens that stand for pictures, as the model says
        self._reduction = reduction
        # the loss is right without counts
        self._counted = reduction == "sum" or count is not None
        self._warn_once = warn_once  # takes the kind of a warning and its text
        self._alone = alone  # False: other ranks have a part of each batch, and its loss terms
        # names a module that has the samples on dim 1
        self._sequence_first = sequence_first
        self._known_lists: dict[str, Any] = {}  # by the name of the loss function, see `BatchView`
        self._looked_at: set[str] = set()

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
        try:
            view = self.plain_view(batch, self._known_lists.get(name), self._by_length)
        except BatchError as error:
            module = None if self._dims else self._sequence_first()
            if module is not None:
                error.add_note(
                    f"{module} takes sequences of shape (S, N, …): a part that has its samples on "
                    "dim 1 is named in dims=, with 1"
                )
            raise
        self._known_lists[name] = view.known_lists
        if name not in self._looked_at:
            for kind, sentence in first_look(
                view,
                training=training,
                counted=self._counted,
                arguments=args,
                named=kwargs,
                sequence_first=None if self._dims else self._sequence_first(),
            ):
                self._warn_once(kind, sentence)
            for option, said in (
                ("dims", self._dims or ()),
                ("trim", self._by_length.trimmed if self._by_length else ()),
            ):
                for missing, sentence in absent(option, said, batch):
                    self._warn_once(f"{option} {name} {missing}", sentence)
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
        view = self.plain_view(batch)
        return view, Counts.read(self._count, view, self._reduction)

    def some(self, view: BatchView, start: int, samples: int) -> tuple[BatchView, Counts]:
        """Return some samples of a batch as one of their own, with their counts."""
        known = view.known_lists
        piece = view.piece(start, min(start + max(1, samples), view.length))
        few = self.plain_view(piece, known, self._by_length)
        if few.sorted is not None:  # a batch that lies in its order, which a report can read
            few = self.plain_view(few.piece(0, few.length), known, self._by_length)
        return few, Counts.read(self._count, few, self._reduction)

    def whole(self, batch: Any, *, counted: bool) -> Counts | None:
        """Return the counts of a batch that is not to be cut; None where it cannot be.

        Without `counted` they are its samples.
        """
        try:
            view = self.plain_view(batch)
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
    sequence_first: str | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield (topic, sentence) of each warning about a batch.

    It may read the labels, so it is for the first batch only.

    Args:
        view: the batch.
        training: whether gradients are wanted.
        counted: the loss is right without counts.
        arguments: positional arguments of the loss function after the batch.
        named: its keyword arguments.
        sequence_first: a module that takes (S, N, …), where `dims` says nothing.
    """
    label = looks_like_token_labels(view) if training and not counted else None
    if label is not None:
        yield (
            "count",
            f"{label!r} has labels of -100 and no count= was given, so every sample weighs the "
            "same, however many labels it has. "
            f"If the loss is a mean over labels: count=count_tokens({label!r}), with shift=True "
            "for a causal language model that shifts its labels itself. If it is a mean over "
            "samples (ctc_loss), that is right. verify(loss_fn, batch) tells",
        )
    if sequence_first is not None:
        yield from _along_time(view, sequence_first)
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


def absent(option: str, said: Iterable[Any], batch: Any) -> Iterator[tuple[str, str]]:
    """Yield (name, sentence) of each name said in an option that the batch does not have.

    It is no error: some batches of a loader can lack a field.
    """
    missing = unmatched(map(str, said), batch) if said else []
    if not missing:
        return
    names = list(dict.fromkeys(dotted(path) for path, _ in walk(batch)))
    for name in missing:
        near = get_close_matches(name, names, 3) or names[:_NAMED]
        has = f"which has {', '.join(map(repr, near))}" if near else "which has no named parts"
        more = " and others" if set(names) - set(near) and near else ""
        yield (
            name,
            f"{option} names {name!r}, which stands for nothing in the batch, {has}{more}: it says "
            "nothing there. If the field can be absent, that is right",
        )


def _along_time(view: BatchView, module: str) -> Iterator[tuple[str, str]]:
    """Yield the warning about a batch that can be (S, N, …); none where it says that it is not.

    Parts that are all (S, N) or (S, N, D) agree on N, too. One value per sample says N, unless it
    is S by chance.
    """
    tensors = [(name, tensor) for name, tensor in view.named_tensors() if tensor.ndim]
    wide = [(name, tuple(tensor.shape)) for name, tensor in tensors if tensor.ndim in (2, 3)]
    second = {shape[1] for _, shape in wide}
    flat = any(tensor.ndim == 1 for _, tensor in tensors)
    if len(second) != 1 or view.length == 1 or (flat and second != {view.length}):
        return
    name, shape = wide[0]
    yield (
        "sequence_first",
        f"{module} takes sequences of shape (S, N, …), with batch_first=False, and "
        f"{repr(name) if name else 'the batch'}, of shape {shape}, is cut along dim 0, into "
        f"{view.length} samples. "
        f"If the samples lie on dim 1: dims={dict.fromkeys(dict(wide), 1)}. "
        f"If dim 0 is right: dims={{{name!r}: 0}}",
    )
