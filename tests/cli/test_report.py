"""The report: what a page shows of a run log, and that nothing in the log can break it."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_mbs.cli.command import main
from elastic_mbs.cli.report import render, scale, svg
from elastic_mbs.cli.report.data import RunData, read_run
from elastic_mbs.cli.report.page import page
from elastic_mbs.cli.report.scale import Point, decimate
from elastic_mbs.events import CallDone, CallFailed, Event, Resized, SensorLost, Warned
from elastic_mbs.sinks.log_reader import Entry, Run, read_runs
from tests.helpers.events import ANY_EVENT, GROWN, KEY, MIB, ONE_OF_EACH, RUN, done, failure, log_of

Events = list[tuple[float, Event]]


def run_of(events: Events, **header: Any) -> RunData:
    (run,) = read_runs(log_of(events, **header).splitlines())
    return read_run(run)


class Elements(HTMLParser):
    """The elements and texts of a page; checks that they are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


points = st.lists(st.tuples(st.floats(0, 1e6), st.none() | st.floats(-1e6, 1e6)), max_size=300).map(
    lambda found: sorted(found, key=lambda p: p[0])
)


@given(points, st.integers(4, 40))
def test_a_decimated_line_is_short_and_keeps_its_ends_and_extremes(
    line: list[Point], limit: int
) -> None:
    kept = decimate(line, limit)
    assert len(kept) <= max(limit, 0)
    if len(line) <= limit:
        assert kept == line
        return
    rest = iter(line)
    assert all(point in rest for point in kept)  # in order, and none made up
    assert (kept[0], kept[-1]) == (line[0], line[-1])
    values, remaining = (
        [value for _, value in found if value is not None] for found in (line, kept)
    )
    assert min(values, default=None) == min(remaining, default=None)
    assert max(values, default=None) == max(remaining, default=None)


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(
    st.one_of(
        st.builds(lambda a, b: (scale.linear(a, b), a, b), finite, finite),
        st.builds(lambda b: (scale.seconds(b), 0.0, b), st.floats(0, 1e12)),
        st.builds(lambda b: (scale.bytes_from_zero(b), 0.0, b), st.floats(0, 2**52)),
        st.builds(
            lambda a, b: (scale.powers(2.0, min(a, b), max(a, b)), a, b),
            st.integers(1, 2**40),
            st.integers(1, 2**40),
        ),
        st.builds(
            lambda a, ratio: (scale.powers(10.0, a, a * ratio), a, a * ratio),
            st.floats(1e-12, 1e12),
            st.floats(1, 1e12),
        ),
    )
)
def test_every_axis_holds_its_values_and_has_a_few_ticks_with_labels(
    case: tuple[scale.Scale, float, float],
) -> None:
    axis, low, high = case
    first, last = (min(1e300, max(-1e300, end)) for end in (min(low, high), max(low, high)))
    rounding = 1e-6 * (axis.high - axis.low)
    assert axis.low - rounding <= first
    assert axis.high + rounding >= last
    assert axis.low < axis.high
    assert 1 <= len(axis.ticks) <= 12
    assert all(tick.label and 0 <= axis.place(tick.value) <= 1 for tick in axis.ticks)


def test_the_head_shows_what_the_run_was_and_what_it_survived() -> None:
    assert run_of(RUN).tiles == (
        ("calls", "4", "1 of them eval"),
        ("samples", "256", "73.1 per second"),
        ("OOMs survived", "1", ""),
        ("samples replayed", "16", "6.25% of all"),
        ("time lost", "28.95%", "1.38 s of 4.75 s"),
        ("final micro-batch", "16", "between 8 and 16"),
        ("peak memory", "40.0 MiB", "of 100.0 MiB"),
    )


FATAL = CallFailed(
    "run", KEY, "MicroBatchFloorError", "a micro-batch of 1 does not fit", 1, 3.0, 2.0
)


@pytest.mark.parametrize(
    ("events", "tile"),
    [
        ([], ("final micro-batch", "none", "")),
        ([(1.0, failure())], ("OOMs survived", "0", "and 1 in a call that did not finish")),
        (
            [(1.0, done()), (2.0, Resized("run", 16, 4, "thrash", KEY))],
            ("final micro-batch", "4", ""),
        ),
        ([(1.0, done(seconds=None))], ("time lost", "0 %", "")),
        (
            [(1.0, done(total=None, peak_allocated=None, peak_reserved=None, reserved=None))],
            ("peak memory", "unknown", ""),
        ),
        (
            [(1.0, done()), (2.0, failure()), (4.0, FATAL)],
            ("ended by", "MicroBatchFloorError", "a micro-batch of 1 does not fit"),
        ),
        ([(1.0, done(seconds=1.0)), (4.0, FATAL)], ("time lost", "50.00%", "2 s of 4 s")),
    ],
)
def test_the_head_is_right_where_little_is_known_or_the_run_failed(
    events: Events, tile: tuple[str, str, str]
) -> None:
    assert tile in run_of(events).tiles
    assert "ended by" not in {name for name, _, _ in run_of([*events, (5.0, done(5.0))]).tiles}


def test_sizes_follow_failures_and_growths_and_lost_time_is_a_share() -> None:
    assert [share for _, share in run_of(RUN).lost] == [0.0, 0.0, 0.25, 0.0, 0.0]
    assert run_of([(1.0, done(seconds=0.1, seconds_lost=5.0))]).lost[-1] == (1.0, 1.0)
    assert run_of(RUN).sizes[KEY] == [(0.0, 16), (1.0, 16), (1.5, 8), (2.9, 16)]
    late = done(2.5, seconds=0.5, ooms=1)  # as on CUDA, where the device is behind the host
    assert run_of([(1.5, failure()), (2.5, late), (2.4, GROWN)]).sizes[KEY] == [(1.5, 8), (2.4, 16)]


def test_memory_comes_from_calls_and_failures_and_ends_with_the_sensor() -> None:
    memory = run_of(
        [
            (1.0, done(held_by_others=20 * MIB)),
            (2.0, failure(held_by_others=60 * MIB)),
            (3.0, failure(held_by_others=None)),
            (4.0, SensorLost("run", "gone")),
            (5.0, done(held_by_others=None, allocated=None)),
            (6.0, done(total=80 * MIB, held_by_others=10 * MIB)),
        ]
    ).memory
    assert memory.total == 100 * MIB
    assert memory.capacity == [
        (0.0, 80 * MIB),
        (1.0, 80 * MIB),
        (2.0, 40 * MIB),
        (4.0, None),
        (5.0, None),
        (6.0, 70 * MIB),
    ]
    assert memory.margin[:2] == [(0.0, 72 * MIB), (1.0, 72 * MIB)]
    assert memory.allocated == [(0.5, 10 * MIB), (1.0, 10 * MIB), (5.0, None), (6.0, 10 * MIB)]


MARKS: list[tuple[Event, str]] = [
    (GROWN, "grow"),
    (Resized("run", 16, 8, "limit", KEY), "shrink"),
    (Resized("run", 16, 8, "thrash", KEY), "thrash"),
    (failure(phase="{0}"), "oom"),
    (ONE_OF_EACH[-1], "oom"),
    *((event, "note") for event in [FATAL, *ONE_OF_EACH[3:-1]]),
]


def test_each_kind_of_event_has_a_mark_of_its_own_with_what_is_known_of_it() -> None:
    later = Entry(
        None,
        9.0,
        {
            "event": "Teleported",
            "run": "r",
            "time": 1.0,
            "t": 9.0,
            "level": "INFO",
            "name": "run",
            "where": "Mars",
        },
    )
    marks = run_of([(1.0, event) for event, _ in MARKS]).marks
    assert [(mark.kind, mark.line) for mark in marks] == [
        (kind, event.line()) for event, kind in MARKS
    ]
    assert all(mark.title and mark.kind in svg.GLYPHS for mark in marks)
    (mark,) = read_run(Run("r", {}, [later])).marks  # of a later version
    assert (mark.title, mark.facts) == ("teleported", (("where", "Mars"),))
    facts = dict(run_of([(1.5, failure(holders=""))]).marks[0].facts)
    assert (facts["cause"], facts["asked"], facts["free"]) == (
        "CUDA out of memory. Tried to allocate 2.00 GiB.",
        "2.0 GiB",
        "5.0 MiB",
    )
    assert "who" not in facts


def test_the_page_shows_figures_and_events_and_needs_nothing_else() -> None:
    text = page([run_of(RUN)], "run.jsonl")
    shown = set(Elements(text).texts)
    assert {event.line() for _, event in RUN if not isinstance(event, CallDone)} <= shown
    assert {part for name, value, _ in run_of(RUN).tiles for part in (name, value)} <= shown
    for outside in (
        "http",
        "src=",
        "href=",
        "url(",
        "@import",
        "//cdn",
        "<link",
        "<img",
        "<iframe",
        "fetch(",
        "import(",
    ):
        assert outside not in text


EVIL = "</script><b onmouseover=alert(1)>\"'&\n<!--]]>"


def test_nothing_in_the_log_becomes_a_part_of_the_page() -> None:
    events: Events = [
        (1.0, done(name=EVIL, key=EVIL, mode=EVIL)),
        (1.1, done(key=EVIL)),
        (2.0, failure(name=EVIL, key=EVIL, message=EVIL, phase=EVIL, kind=EVIL, mode=EVIL)),
        (3.0, Resized(EVIL, 1, 2, EVIL, EVIL)),
        (4.0, Warned(EVIL, EVIL, EVIL)),
        (5.0, SensorLost(EVIL, EVIL)),
    ]
    header: dict[str, Any] = {
        "name": EVIL,
        "device": EVIL,
        "host": EVIL,
        "versions": {EVIL: EVIL},
        "settings": {"micro_batch_size": EVIL},
    }
    text = page([run_of(events, **header)], EVIL)
    elements = Elements(text)
    assert not any(tag == "b" and attributes for tag, attributes in elements.elements)
    assert sum(tag == "script" for tag, _ in elements.elements) == text.count("</script>") == 2
    assert any(EVIL in part for part in elements.texts)  # shown as the text that it is


HEADERS = st.dictionaries(
    st.sampled_from(["name", "device", "host", "versions", "settings", "policy", "time"]),
    st.none() | st.text() | st.lists(st.integers()),
)


@given(st.lists(st.tuples(st.floats(-1e14, 1e14), ANY_EVENT), max_size=8), HEADERS)
def test_a_page_can_be_made_of_whatever_a_log_holds(events: Events, header: dict[str, Any]) -> None:
    (run,) = read_runs(log_of(events).splitlines())
    run.header = header
    for tag, attributes in Elements(page([read_run(run)], "run.jsonl")).elements:
        for name in ("d", "x", "y", "x1", "x2", "y1", "y2"):
            assert not re.search("nan|inf|None", attributes.get(name) or ""), (tag, attributes)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    path.write_bytes(log_of(RUN) + b'{"event":"CallDo')  # a run that was killed
    return path


def test_the_command_writes_the_page_next_to_the_log_or_to_out(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = log.with_name("other.html")
    assert main(["report", str(log)]) == 0
    assert main(["report", str(log), "-o", str(other)]) == 0
    assert capsys.readouterr().out == f"{log.with_suffix('.html')}\n{other}\n"
    assert (
        log.with_suffix(".html").read_text(encoding="utf-8")
        == other.read_text(encoding="utf-8")
        == render(log)
    )


@pytest.mark.parametrize("command", ["report", "watch"])
@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file or directory"), (b"epoch,loss\n", "there is no line of a run log in it")],
)
def test_what_is_not_a_run_log_is_said_in_one_line(
    command: str,
    content: bytes | None,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = tmp_path / "run.jsonl"
    if content is not None:
        log.write_bytes(content)
    assert main([command, str(log)]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"elastic-mbs: {log}: {words}")
    assert len(err.splitlines()) == 1
    assert not out


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("no/such/run.html", "there is no folder"),
        (".", "is a folder"),
        ("run.jsonl", "is the log itself"),
        ("/dev/full", "No space left on device"),
    ],
)
def test_a_place_where_no_page_can_be_is_refused_in_one_line(
    out: str, words: str, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = log.read_bytes()
    assert main(["report", str(log), "--out", str(log.parent / out)]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1
    assert log.read_bytes() == before
