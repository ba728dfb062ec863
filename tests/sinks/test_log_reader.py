"""A long log: exact sums, and a bounded number of events."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_mbs import CallDone, UsageError
from elastic_mbs.cli.report import render
from elastic_mbs.cli.report.data import MARKS
from elastic_mbs.cli.watch.follow import CHUNK, Follower
from elastic_mbs.events import CallFailed, Event
from elastic_mbs.sinks import log_reader
from elastic_mbs.sinks.log_reader import MOST, Reader, read_log, read_runs
from elastic_mbs.sinks.run_log import checked_path, event_line
from tests.helpers.events import ANY_EVENT, done, failure, log_of

CALLS = 5 * MOST


def long_log() -> list[tuple[float, Event]]:
    """Return calls of two tracks and modes, failures, and a call that ended by an error."""
    told: list[tuple[float, Event]] = []
    for i in range(CALLS):
        t = float(i)
        call = done(mode="eval" if i % 3 == 0 else "train", micro_batch_size=8 + i % 5)
        call = replace(
            call, key=f"step {i % 2}", seconds=0.25 + i % 7, peak_reserved=10**9 + i % 11
        )
        if i % 100 == 7:
            told.append((t, failure()))
            call = replace(call, ooms=1, replayed_samples=4, seconds_lost=0.125)
        told.append((t, call))
    return [*told, (float(CALLS), CallFailed("run", "k", "ValueError", "no", 0, 1.5, 0.5))]


def test_a_long_log_is_thinned_out_and_its_sums_are_exact() -> None:
    told = long_log()
    (run,) = read_runs(log_of(told).splitlines(keepends=True))
    totals = run.totals
    calls = [event for _, event in told if isinstance(event, CallDone)]
    assert len(run.entries) <= 2 * MOST
    assert totals.calls == len(calls) == CALLS
    assert totals.samples == sum(call.samples for call in calls)
    assert totals.evaluations == sum(call.mode == "eval" for call in calls)
    assert totals.survived == totals.events["OutOfMemory"] == sum(call.ooms for call in calls)
    assert totals.replayed == sum(call.replayed_samples for call in calls)
    assert totals.seconds == pytest.approx(sum(call.seconds or 0.0 for call in calls))
    assert totals.ended_seconds == pytest.approx(totals.seconds + 1.5)
    assert totals.lost == pytest.approx(sum(call.seconds_lost for call in calls) + 0.5)
    assert totals.peak == 10**9 + 10
    assert totals.sizes == {call.key: call.micro_batch_size for call in calls[-2:]}
    assert (totals.least["train"], totals.most["train"]) == (8, 12)
    assert totals.t == CALLS
    # What is kept lies evenly over the run, and the last of each kind is there.
    kept = sorted(entry.t for entry in run.entries if isinstance(entry.event, CallDone))
    assert max(b - a for a, b in pairwise(kept)) <= 16
    assert kept[-1] == CALLS - 1
    assert isinstance(run.entries[-1].event, CallFailed)


def test_a_skimmed_line_counts_as_a_parsed_one() -> None:
    lines = log_of(long_log()[: 2 * MOST]).splitlines(keepends=True)
    parsed, skimmed = Reader(), Reader()
    for line in lines:
        parsed.feed(line)
    for begin in range(0, len(lines), 100):
        skimmed.skim(b"".join(lines[begin : begin + 100]))
    ours, theirs = (next(iter(each.runs.values())).totals for each in (skimmed, parsed))
    for name in ("calls", "samples", "evaluations", "survived", "replayed", "peak", "sizes"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.seconds == pytest.approx(theirs.seconds)


def test_watch_and_report_of_a_long_log_show_its_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_mbs.cli.watch.follow.CHUNK", CHUNK // 16)
    path = tmp_path / "run.jsonl"
    path.write_bytes(log_of(long_log()))
    follower = Follower(path)
    follower.read()
    assert follower.current is not None
    assert follower.current.run.totals.calls == CALLS
    assert len(follower.current.losses) > 100
    page = render(path)
    assert f"{CALLS:,}" in page
    assert len(page) <= 2 * 1024**2


def test_a_page_shows_a_thousand_events_and_says_how_many_there_were(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    message = "x" * 5000
    path.write_bytes(log_of([(i / 7, replace(failure(), message=message)) for i in range(3000)]))
    page = render(path)
    assert "3,000 events, " in page
    assert page.count("<tr>") <= MARKS + 1
    assert len(page) <= 2 * 1024**2


@pytest.mark.parametrize("t", ["1e308", "-1e308", "Infinity", "NaN", '"Infinity"'])
@pytest.mark.parametrize("name", [b'"t":', b'"time":'])
def test_a_line_of_an_impossible_time_is_passed_over(t: str, name: bytes, tmp_path: Path) -> None:
    good = event_line(done(), "run", 2.0, 1.7e9)
    begin, end = good.split(name)
    bad = begin + name + t.encode() + b"," + end.partition(b",")[2]
    path = tmp_path / "run.jsonl"
    path.write_bytes(log_of([(1.0, done())]) + bad)
    (run,) = read_log(path)
    assert run.totals.calls == 1
    render(path)


def test_sums_of_calls_leave_out_times_that_no_call_takes() -> None:
    (run,) = read_runs(log_of([(1.0, done(seconds=1e308)), (2.0, done(seconds=0.5))]).splitlines())
    assert run.totals.seconds == 0.5


def test_a_path_that_is_too_long_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 300)
    for refused in (lambda: checked_path(path), lambda: read_log(path)):
        with pytest.raises(UsageError, match="name too long"):
            refused()


def test_whole_numbers_out_of_range_are_no_facts_of_an_event() -> None:
    line = event_line(done(), "run", 1.0, 1.7e9).replace(b'"samples":64', b'"samples":%d' % 10**400)
    reader = Reader()
    run = reader.feed(line)
    assert run is not None
    assert run.entries[0].event is None
    assert log_reader.plausible(None) is None


@pytest.mark.parametrize("block", [1, 3, 1000])
def test_lines_of_calls_count_the_same_in_blocks_of_any_length(block: int) -> None:
    odd: list[Event] = [
        done(key='größe "x" \\ {}'),
        done(key="", seconds=None, loss=None, peak_reserved=None, peak_allocated=None),
        done(seconds=2e-5, loss=float("nan"), reserved=None),
        done(seconds=3.0, loss=1e-9, mode="eval", micro_batch_size=3),
        done(samples=10**30),
        failure(),
    ]
    lines = [event_line(event, run, 1.0, 1.7e9) for run in "ab" for event in odd * 3]
    lines[4:4] = [b"torn\n", b"\n", lines[0][:50] + b"\n"]
    parsed, counted, kept = Reader(), Reader(), Reader()
    for line in lines:
        parsed.feed(line)
    for begin in range(0, len(lines), block):
        counted.skim(b"".join(lines[begin : begin + block]))
        kept.thin(b"".join(lines[begin : begin + block]))
    for run, wanted in parsed.runs.items():
        for ours in (counted.runs[run].totals, kept.runs[run].totals):
            for name in vars(wanted.totals).keys() - {"t", "time", "events"}:
                assert getattr(ours, name) == pytest.approx(getattr(wanted.totals, name)), name


# What may stand in the place of a value: JSON, nearly JSON, and what reaches beyond the value.
TOKENS = [
    *b"0 1 -1 01 1.5 1. .5 00.5 -0.0 +1 1e5 1E5 1e-5 1.5e999 1_0 null true NaN".split(),
    *b'"NaN" "1" [1.5 1.5] [1] {} 1} {"a":1 "x 1,1 1,"ooms":1 1,"ooms":1,"x":1'.split(),
    *b'"CallDone" "Call\\u0044one" "\\u00e4" "\\x" "\\" "\xc3\xa4" "\xff" \xc3\xa4 "\0" \0'.split(),
    *(b"", b" 1.5", b"1\n", b"1.5\n", b'"a\n"', b'"a\tb"', b"1.5\r", b"1\r", b'"x,', b'"'),
    *(b"9" * n for n in (18, 19, 400)),
]
FIELDS = ["event", "run", "time", "t", "level", *(each.name for each in fields(CallDone))]


def with_token(line: bytes, field: str, token: bytes) -> bytes:
    """Return a line in which these bytes stand in the place of a field's value."""
    value = re.compile(rb'("%b":)("[^"]*"|[^,}]*)' % field.encode())
    return value.sub(lambda match: bytes(match[1]) + token, line, count=1)


def assert_read_as_json_reads(text: bytes) -> None:
    parsed, counted, kept = Reader(), Reader(), Reader()
    for line in text.split(b"\n"):
        parsed.feed(line)
    counted.skim(text)
    kept.thin(text)
    assert list(parsed.runs) == list(counted.runs) == list(kept.runs), text
    for run, wanted in parsed.runs.items():
        found, known = ([entry.record for entry in of.entries] for of in (kept.runs[run], wanted))
        assert str(found) == str(known), text  # NaN is not itself
        for ours in (counted.runs[run].totals, kept.runs[run].totals):
            for name in vars(wanted.totals).keys() - {"t", "time", "events"}:
                assert getattr(ours, name) == pytest.approx(getattr(wanted.totals, name)), name
            assert list(ours.sizes) == list(wanted.totals.sizes), text


@pytest.mark.parametrize("field", FIELDS)
def test_whatever_stands_in_the_place_of_a_value_counts_as_json_reads_it(field: str) -> None:
    good = [event_line(done(2.0, key=key), "a", 1.5, 1.7e9) for key in "xyx"]
    for token in TOKENS:
        one, two = with_token(good[1], field, token), with_token(good[1], field, b"1.5]")
        assert_read_as_json_reads(b"".join([*good, one, *good]))
        assert_read_as_json_reads(b"".join([*good, one, two]))
        assert_read_as_json_reads(good[0] + one)


def test_each_spelling_of_the_same_seconds_counts() -> None:
    call = event_line(done(2.0), "a", 1.5, 1.7e9)
    spelled = [with_token(call, "seconds_lost", token) for token in (b"0.5", b"0.50", b"5e-1")]
    assert_read_as_json_reads(b"".join([call, *spelled]))


_CALLS = st.builds(
    done,
    samples=st.integers(0, 99),
    micro_batch_size=st.integers(1, 3),
    ooms=st.integers(0, 1),
    seconds=st.none() | st.floats(0, 1e3),
    seconds_lost=st.sampled_from([0.0, 0.5]),
    loss=st.none() | st.floats(),
    key=st.text(max_size=3),
    reserved=st.none() | st.integers(0, 10**12),
)


@st.composite
def damaged_logs(draw: st.DrawFn) -> bytes:
    """Return lines of events in which some values and bytes stand in the place of others."""
    told = draw(st.lists(_CALLS | _CALLS | ANY_EVENT, min_size=1, max_size=12))
    runs = st.sampled_from("aaab")
    lines = [event_line(each, draw(runs), draw(st.floats(1, 1e3)), 1.7e9) for each in told]
    field = draw(st.sampled_from(FIELDS))
    for i in draw(st.lists(st.integers(0, len(lines) - 1), max_size=3)):
        lines[i] = with_token(lines[i], field, draw(st.sampled_from(TOKENS)))
    text = b"".join([event_line(done(), "a", 1.5, 1.7e9), *lines])
    for _ in range(draw(st.integers(0, 1))):
        at, size = draw(st.integers(0, len(text))), draw(st.integers(0, 8))
        text = text[:at] + draw(st.sampled_from(TOKENS)) + text[at + size :]
    return text


@given(damaged_logs())
def test_lines_read_many_at_a_time_count_as_json_reads_them(text: bytes) -> None:
    assert_read_as_json_reads(text)


@pytest.mark.parametrize("cut", [1, 60, 300])
def test_a_torn_line_of_a_frequent_event_is_passed_over(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    log = log_of([(float(i), failure(message="no {memory}")) for i in range(MOST + 2)])
    path.write_bytes(log + log.splitlines()[-1][:-cut])
    (run,) = read_log(path)
    assert run.totals.events["OutOfMemory"] == MOST + 2
    render(path)
