from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.schedule import Range, Schedule
from elastic_mbs.batch.view import BatchView
from elastic_mbs.controller.partition import partition


def counted(values: list[int]) -> Counts:
    return Counts.read(lambda batch: values, BatchView([0] * len(values)))


@settings(deadline=None)
@given(st.data())
def test_every_sample_is_handed_out_or_skipped_once_whatever_sizes_and_failures(data: st.DataObject) -> None:
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
    samples = [sample for start, stop in [*done, *schedule.skipped] for sample in range(start, stop)]
    assert sorted(samples) == list(range(len(values)))
    assert all(not any(values[start:stop]) for start, stop in schedule.skipped)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 4), st.integers(1, 4))
def test_a_batch_that_nothing_happens_to_is_cut_as_partition_says(samples: int, size: int, minimum: int, align: int) -> None:
    schedule = Schedule(Counts.samples(samples), minimum=minimum, align=align)
    pieces = []
    while (piece := schedule.next(size)) is not None:
        pieces.append((piece.start, piece.stop))
    assert tuple(pieces) == partition(0, samples, size, minimum=minimum, align=align)


def test_a_piece_that_failed_comes_before_the_others_and_keeps_its_marks() -> None:
    schedule = Schedule(Counts.samples(12))
    first = schedule.next(4)
    assert first is not None
    schedule.push(Range(first.start, first.stop, frozenset({7})))
    assert sorted((rest.start, rest.stop) for rest in schedule.missing()) == [(0, 4), (4, 12)]
    again = [schedule.next(2) for _ in range(3)]
    assert [(p.start, p.stop, p.committed) for p in again if p is not None] == [(0, 2, {7}), (2, 4, {7}), (4, 6, frozenset())]


def test_a_restart_forgets_what_was_handed_out_and_skipped() -> None:
    schedule = Schedule(counted([0, 1, 1]))
    assert schedule.next(1) == Range(1, 2, frozenset(), {None: 0.5})
    assert schedule.skipped == [(0, 1)]
    schedule.restart()
    assert schedule.skipped == []
    assert [(r.start, r.stop) for r in schedule.missing()] == [(0, 3)]
