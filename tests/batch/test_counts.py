"""Counts are read once, and their weights add up to one for every split."""

import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from elastic_mbs import ElasticMBS, MemoryOptions, Warned, cut
from elastic_mbs.batch.counts import Counts, count_tokens, looks_like_token_labels
from elastic_mbs.batch.pieces import partition
from elastic_mbs.batch.reader import first_look
from elastic_mbs.batch.schedule import Range, Schedule
from elastic_mbs.batch.view import BatchView
from elastic_mbs.errors import CountError
from tests.helpers.batches import splits


def view_of(n: int) -> BatchView:
    return BatchView(torch.zeros(n))


def read(values: Any, n: int | None = None) -> Counts:
    return Counts.read(lambda batch: values, view_of(len(values) if n is None else n))


whole_numbers = st.lists(st.integers(0, 2**70), min_size=1, max_size=20).filter(any)
floats = st.lists(
    st.one_of(st.floats(0, 1e300, allow_nan=False), st.sampled_from([0.1, 5e-324, 1e17, 3])),
    min_size=1,
    max_size=20,
).filter(any)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_the_weights_of_any_split_are_its_shares_and_add_up_to_one(
    data: st.DataObject,
) -> None:
    values = data.draw(st.one_of(whole_numbers, floats))
    counts, ranges = read(values), data.draw(splits(len(values)))
    exact = [sum(map(Fraction, values[start:stop])) for start, stop in ranges]
    added = 0.0
    for (start, stop), terms in zip(ranges, exact, strict=True):
        weights, share = counts.weights(start, stop), float(Fraction(terms) / sum(exact))
        assert weights[None] == share, "correctly rounded"
        assert counts.weights(start, stop, reduction="sum") == {None: 1.0}
        added += weights[None]
    assert added == pytest.approx(1, rel=1e-14)


def test_samples_count_one_each_and_a_mask_what_is_true() -> None:
    assert read(torch.tensor([True, False, True])).total == 2
    for counts in (Counts.samples(17), Counts.read(None, view_of(17))):
        assert (counts.n, counts.names, counts.total) == (17, None, 17)
        assert counts.weights(16, 17) == {None: 1 / 17}, (
            "a division by the number of pieces would give 1/2"
        )
        assert counts.weights(2, 2) == {None: 0.0}


@pytest.mark.parametrize(
    "vector",
    [
        [2, 0, 3],
        (2, 0, 3),
        torch.tensor([2, 0, 3]),
        torch.tensor([2, 0, 3], dtype=torch.uint8),
        [torch.tensor(2), torch.tensor(0), torch.tensor(3)],
        [torch.tensor(2), torch.tensor(0, dtype=torch.int32), 3],
        np.array([2, 0, 3]),
        list(np.array([2, 0, 3])),
        [2, False, 3],
        [2.0, 0, 3],
        torch.tensor([2.0, 0, 3]),
        np.array([2.0, 0, 3]),
        [Fraction(2), 0, np.float32(3)],
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_vector_of_numbers_is_read_and_keeps_whole_numbers_whole(vector: Any) -> None:
    counts = read(vector)
    assert counts.total == 5
    assert isinstance(counts.total, float) == any(
        "float" in str(getattr(value, "dtype", type(value))) for value in vector
    )
    assert counts.weights(1, 2) == {None: 0.0}
    assert counts.weights(2, 3) == {None: 0.6}


def test_losses_by_name_have_counts_by_name() -> None:
    counts = Counts.read(
        {"mlm": lambda batch: [0, 2, 6], "nsp": None, "aux": lambda batch: [0, 0.5, 0.5]},
        view_of(3),
    )
    assert counts.names == ("mlm", "nsp", "aux")
    assert counts.total == {"mlm": 8, "nsp": 3, "aux": 1.0}
    assert counts.weights(0, 1) == {"mlm": 0.0, "nsp": 1 / 3, "aux": 0.0}
    assert counts.weights(0, 2) == {"mlm": 0.25, "nsp": 2 / 3, "aux": 0.5}
    assert counts.weights(0, 1, reduction="sum") == {"mlm": 1.0, "nsp": 1.0, "aux": 1.0}
    assert not counts.void


def test_of_several_losses_some_may_have_no_term_in_the_whole_batch() -> None:
    count = {"boxes": lambda batch: [0, 0], "labels": lambda batch: [1, 3]}
    counts = Counts.read(count, view_of(2))
    assert counts.total == {"boxes": 0, "labels": 4}
    assert set(counts.void) == {"boxes"}
    assert counts.weights(0, 1) == {"boxes": 0.0, "labels": 0.25}
    none = {"boxes": count["boxes"], "masks": count["boxes"]}
    with pytest.raises(CountError, match="each function of count is zero for all 2 samples"):
        Counts.read(none, view_of(2))
    # a sum over nothing is 0, so there is nothing to refuse
    for found in (none, count["boxes"]):
        assert Counts.read(found, view_of(2), "sum").void


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, -2, 3], "count of sample 1 is -2: counts are not negative"),
        ([1.0, 2.0, float("nan")], "count of sample 2 is nan: counts are finite"),
        ([1, float("inf"), 1], "count of sample 1 is inf: counts are finite"),
        (torch.tensor([1.0, float("-inf"), 1.0]), "count of sample 1 is -inf"),
        (
            [1, 2],
            "count returned 2 counts for a batch of 3 samples: it must return one count per sample",
        ),
        (torch.ones(4), "count returned 4 counts for a batch of 3 samples"),
        ([], "count returned 0 counts for a batch of 3"),
        (
            7,
            r"count returned 7 \(of type int\): it must return one count per "
            r"sample\n.*torch.full\(\(N,\), count\)",
        ),
        (
            torch.tensor(7),
            r"count returned a tensor of shape \(\): it must return one count per "
            r"sample\n.*torch.full\(\(N,\), count\)",
        ),
        (
            torch.ones(3, 2),
            r"count returned a tensor of shape \(3, 2\): .*one count per sample\n  where mask",
        ),
        (np.ones((3, 2)), r"count returned a tensor of shape \(3, 2\)"),
        (None, r"count returned None \(of type NoneType\): it must return one number per sample"),
        ("123", r"count returned '123' \(of type str\)"),
        ([1, "2", 3], r"count of sample 1 is '2' \(of type str\): counts are numbers"),
        ([1, 2j, 3], "count of sample 1 is 2j"),
        ([1, Decimal(2), 3], "count of sample 1 is Decimal"),
        (
            [1, torch.ones(2), 3],
            r"count of sample 1 is a tensor of shape \(2,\): counts are numbers",
        ),
        ({"mlm": [1, 2, 3]}, "count returned a dict: give a dict of functions instead.*'mlm'"),
        ([1e308, 1e308, 1e308], "count adds up to more than a float can hold"),
        ([10**400, 1.0, 1], "count adds up to more than a float can hold"),
    ],
)
def test_counts_that_make_no_sense_are_named(values: Any, message: str) -> None:
    with pytest.raises(CountError, match=message):
        read(values, 3)
    if not isinstance(values, dict):
        with pytest.raises(CountError, match=message.replace("count", r"count\['mlm'\]", 1)):
            Counts.read({"nsp": None, "mlm": lambda batch: values}, view_of(3))


@pytest.mark.parametrize("wrong", [7, torch.ones(4), torch.ones(3, 2)], ids=repr)
@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 4), (3, 4, 2), (3, 2, 2, 2)], ids=repr)
def test_the_count_that_an_error_advises_is_right_for_labels_of_any_shape(
    wrong: Any, shape: tuple[int, ...]
) -> None:
    with pytest.raises(CountError) as refused:
        read(wrong, 3)
    (advised,) = re.findall(r"mask\.reshape.*", str(refused.value))
    labels = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(1)) - 100
    mask, view = labels != -100, BatchView({"labels": labels})
    each = [sum(np.ravel(sample).tolist()) for sample in mask.numpy()]
    advice = Counts.read(lambda batch: eval(advised, {"mask": mask}), view, "sum")
    tokens = Counts.read(count_tokens(key="labels"), view, "sum")
    assert [advice.weights(i, i + 1, "mean")[None] for i in range(3)] == [
        n / sum(each) for n in each
    ]
    assert advice.total == tokens.total == sum(each) > 0


@pytest.mark.parametrize("values", [[0, 0, 0], torch.zeros(3)])
def test_a_mean_over_no_term_in_the_whole_batch_is_refused(values: Any) -> None:
    message = r"count is zero for all 3 samples.*\(is every label ignored\?\)"
    with pytest.raises(CountError, match=message):
        read(values, 3)


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (3, r"count is 3 \(of type int\): it must be None \(samples\), a function"),
        (torch.ones(3), r"count is a tensor of shape \(3,\): it must be"),
        ({}, r"count is the dict \{\}"),
        ({"mlm": 3}, r"count\['mlm'\] is 3"),
        ({1: None}, r"count is the dict \{1: None\}: its keys are the names"),
    ],
)
def test_a_count_of_the_wrong_kind_is_named(count: Any, message: str) -> None:
    with pytest.raises(CountError, match=message):
        Counts.read(count, view_of(3))


def test_errors_of_the_count_function_pass_through() -> None:
    def broken(batch: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Counts.read(broken, view_of(3))


LABELS = torch.tensor([[5, -100, 7, 8], [-100, -100, -100, -100], [1, 2, 3, -100]])


@pytest.mark.parametrize(
    ("counter", "batch", "expected"),
    [
        (count_tokens(), {"ids": torch.zeros(3, 4), "labels": LABELS}, [3, 0, 3]),
        (count_tokens(shift=True), {"labels": LABELS}, [2, 0, 2]),
        (count_tokens(ignore_index=7), {"labels": LABELS}, [3, 4, 4]),
        (count_tokens("deep.y"), {"deep": {"y": LABELS}}, [3, 0, 3]),
        (count_tokens("y"), {"deep": {"y": LABELS}}, [3, 0, 3]),
        (count_tokens(1), (LABELS[:, 0], LABELS), [3, 0, 3]),
        (count_tokens(lambda given: given["labels"][:, :2]), {"labels": LABELS}, [1, 0, 2]),
        (count_tokens(), {"labels": LABELS.reshape(3, 2, 2)}, [3, 0, 3]),
        (count_tokens(), {"labels": torch.tensor([1, -100, 0])}, [1, 0, 1]),
        (count_tokens(), {"labels": LABELS.numpy()}, [3, 0, 3]),
        (
            count_tokens(),
            {
                "labels": [
                    torch.tensor([1, -100]),
                    torch.tensor([2, 3, 4]),
                    [5, -100, -100],
                    np.array([-100]),
                    (),
                ]
            },
            [1, 3, 1, 0, 0],
        ),
        (
            count_tokens(shift=True),
            {"labels": [torch.tensor([1, -100]), [2, 3, 4], np.array([-100])]},
            [0, 2, 0],
        ),
        (count_tokens(), {"labels": [3, -100]}, [1, 0]),
    ],
)
def test_labels_that_are_not_ignored_are_counted_per_sample(
    counter: Any, batch: Any, expected: list[int]
) -> None:
    assert [int(count) for count in counter(batch)] == expected


def terms(counter: Any, view: BatchView) -> list[float]:
    """Return the labels of each sample, as the weights show them."""
    counts = Counts.read(counter, view)
    assert isinstance(counts.total, int)
    shares = [counts.weights(i, i + 1) for i in range(view.length)]
    return [round(share[None] * counts.total) for share in shares]


@pytest.mark.parametrize(
    "kind", [lambda labels: labels, lambda labels: labels.numpy()], ids=["tensor", "numpy"]
)
def test_tokens_are_counted_along_the_dimension_that_holds_the_samples(
    kind: Callable[[torch.Tensor], Any],
) -> None:
    labels = torch.full((4, 4), -100)  # (T, N), as many steps as samples
    labels[:, 0], labels[:2, 1], labels[0, 2] = 1, 1, 1
    view = BatchView({"x": torch.zeros(4, 4, 3), "labels": kind(labels)}, {"x": 1, "labels": 1})
    assert terms(count_tokens(), view) == [4, 2, 1, 0]
    assert terms(count_tokens(shift=True), view) == [3, 1, 0, 0]


def test_labels_in_a_list_of_fields_are_not_counted_as_samples() -> None:
    column = torch.tensor([1, -100, 1, 1])
    # what default_collate makes of lists of four
    view = BatchView({"x": torch.zeros(4), "labels": [column] * 4}, cut.fields("labels"))
    with pytest.raises(CountError, match="found 4 fields of 4 samples each"):
        Counts.read(count_tokens(), view)
    assert terms(count_tokens(lambda batch: torch.stack(batch["labels"], 1)), view) == [4, 0, 4, 4]
    with pytest.raises(CountError, match="found 2 fields of 2 samples each"):
        pair = BatchView([column[:2], column[:2]], cut.fields())
        Counts.read(count_tokens(lambda batch: batch), pair)


@pytest.mark.parametrize(
    ("counter", "batch", "message"),
    [
        (
            count_tokens(),
            {"ids": LABELS, "y": LABELS},
            r"no 'labels': dict has the parts 'ids', 'y'\n.*count_tokens\(key=\.\.\.\)",
        ),
        (count_tokens("a.b"), {"a": {"c": LABELS}}, r"no 'a\.b': dict has the parts 'a', 'a\.c'"),
        (count_tokens(), LABELS, "no 'labels': .*Tensor has no named parts"),
        (count_tokens("m"), [{"m": LABELS}, {"m": LABELS}], "'m' is not unique"),
        (
            count_tokens(shift=True),
            {"labels": LABELS[:, 0]},
            r"found labels of shape \(3,\): they must be \(N, L, \.\.\.\)",
        ),
        (
            count_tokens(),
            {"labels": torch.tensor(1)},
            r"found labels of shape \(\): they must be \(N, \.\.\.\)",
        ),
        (count_tokens(), {"labels": "text"}, r"found 'text' \(of type str\): labels are a tensor"),
        (count_tokens(), {"labels": ["a", "b"]}, "found a list with 'a'"),
        (count_tokens(shift=True), {"labels": [1, 2]}, r"found a list with a tensor of shape \(\)"),
    ],
)
def test_labels_that_are_not_found_are_named(
    counter: Callable[[Any], Any], batch: Any, message: str
) -> None:
    with pytest.raises(CountError, match=message):
        counter(batch)


@pytest.mark.parametrize(
    ("batch", "name"),
    [
        ({"ids": LABELS, "labels": LABELS}, "labels"),
        ({"deep": {"target": LABELS.int()}}, "deep.target"),
        ((LABELS, LABELS), "1"),
        ([torch.zeros(3), LABELS], "1"),
        ({"ids": LABELS}, None),
        ({"labels": LABELS.clamp(min=0)}, None),
        ({"labels": LABELS.double()}, None),
        ({"labels": LABELS.to("meta")}, None),
        ({1: LABELS}, None),
        ({"labels": ["a", "b"]}, None),
        (LABELS, None),
    ],
)
def test_token_labels_are_noticed_by_name_on_the_host_only(batch: Any, name: str | None) -> None:
    assert looks_like_token_labels(BatchView(batch)) == name


def counted(values: list[int]) -> Counts:
    return Counts.read(lambda batch: values, BatchView([0] * len(values)))


@given(st.data())
def test_every_sample_is_handed_out_once_whether_it_counts_or_not(
    data: st.DataObject,
) -> None:
    values = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=40).filter(any))
    align = data.draw(st.integers(1, 3))
    schedule = Schedule(counted(values), align=align)
    done: list[tuple[int, int]] = []
    size = data.draw(st.integers(1, 40))
    while (piece := schedule.next(size)) is not None:
        if len(piece) > align and data.draw(st.booleans()):
            schedule.push(Range(piece.start, piece.stop))  # failed: comes again in halves
            assert schedule
            size = max(1, len(piece) // 2)
            continue
        assert piece.weights == {None: sum(values[piece.start : piece.stop]) / sum(values)}
        done.append((piece.start, piece.stop))
        size = data.draw(st.sampled_from([size, size, 2 * size, max(1, size // 2)]))
    assert not schedule
    assert schedule.missing() == []
    samples = [sample for start, stop in done for sample in range(start, stop)]
    assert sorted(samples) == list(range(len(values)))


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 4), st.integers(1, 4))
def test_a_batch_that_nothing_happens_to_is_cut_as_partition_says(
    samples: int, size: int, minimum: int, align: int
) -> None:
    schedule = Schedule(Counts.samples(samples), minimum=minimum, align=align)
    pieces = []
    while (piece := schedule.next(size)) is not None:
        pieces.append((piece.start, piece.stop))
    assert tuple(pieces) == partition(0, samples, size, minimum=minimum, align=align)


def test_a_piece_that_failed_comes_before_the_others() -> None:
    schedule = Schedule(Counts.samples(12))
    first = schedule.next(4)
    assert first is not None
    schedule.push(Range(first.start, first.stop))
    assert sorted((rest.start, rest.stop) for rest in schedule.missing()) == [(0, 4), (4, 12)]
    again = [schedule.next(2) for _ in range(3)]
    assert [(p.start, p.stop) for p in again if p is not None] == [(0, 2), (2, 4), (4, 6)]


def test_a_restart_forgets_what_was_handed_out() -> None:
    schedule = Schedule(counted([0, 1, 1]))
    assert schedule.next(1) == Range(0, 1, {None: 0.0})
    assert schedule.next(1) == Range(1, 2, {None: 0.5})
    schedule.restart()
    assert [(r.start, r.stop) for r in schedule.missing()] == [(0, 3)]


def kinds(batch: Any, *, training: bool = True, counted: bool = False, **others: Any) -> list[str]:
    return [
        kind
        for kind, _ in first_look(BatchView(batch), training=training, counted=counted, **others)
    ]


IGNORED = {"x": torch.zeros(2, 3), "labels": torch.tensor([[1, -100], [1, 1]])}


def test_ignored_labels_without_a_count_are_warned_about() -> None:
    assert kinds(IGNORED) == ["count"]
    assert kinds(IGNORED, counted=True) == kinds(IGNORED, training=False) == []
    assert kinds(torch.zeros(1, 2), arguments=(torch.zeros(1),)) == [], (
        "of one sample nothing can be told"
    )


@pytest.mark.parametrize(("reduction", "told"), [("mean", ["count"]), ("sum", [])])
def test_sums_need_no_count(reduction: Literal["mean", "sum"], told: list[str]) -> None:
    model, events = nn.Linear(3, 4), list[Any]()

    def loss_fn(batch: Any) -> Tensor:
        return functional.cross_entropy(
            model(batch["x"]), batch["labels"][:, 1], reduction=reduction
        )

    ElasticMBS(
        model, reduction=reduction, on_event=events.append, memory=MemoryOptions(monitor_interval=0)
    ).backward(loss_fn, IGNORED)
    assert [event.topic for event in events if isinstance(event, Warned)] == told


@pytest.mark.parametrize(
    ("beside", "named", "told"),
    [
        ((torch.zeros(4),), {}, "argument 1 after the batch"),
        (("epoch", torch.zeros(4, 2)), {}, "argument 2 after the batch"),
        ((), {"y": torch.zeros(4)}, "y="),
        ((torch.zeros(4), torch.zeros(4)), {"z": torch.zeros(4)}, "argument 1 after the batch"),
        ((torch.zeros(3), torch.tensor(4.0), 4, None), {"lengths": [1, 2, 3, 4]}, None),
    ],
)
def test_what_has_as_many_rows_as_the_batch_but_is_not_cut_is_told_of(
    beside: tuple[Any, ...], named: dict[str, Any], told: str | None
) -> None:
    found = list(
        first_look(
            BatchView(torch.zeros(4, 2)),
            training=True,
            counted=False,
            arguments=beside,
            named=named,
        )
    )
    assert [kind for kind, _ in found] == ([] if told is None else ["beside"])
    assert told is None or found[0][1].startswith(told)


def test_it_is_said_once_a_function_and_before_anything_fails() -> None:
    model, events = nn.Linear(2, 3), list[Any]()

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(model(x), y)

    with ElasticMBS(model, micro_batch_size=2, on_event=events.append) as mbs:
        for _ in range(2):
            with pytest.raises(ValueError, match="batch_size"):
                mbs.backward(loss_fn, torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))
    assert [
        (event.topic, "backward(loss_fn, (x, y))" in event.message)
        for event in events
        if isinstance(event, Warned)
    ] == [("beside", True)]
