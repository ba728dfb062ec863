"""The live panel: what a frame shows, and how it follows a file that grows."""

import importlib.util
import io
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from elastic_mbs.cli import command
from elastic_mbs.cli.watch.follow import EVENTS, Follower, State
from elastic_mbs.cli.watch.panel import panel
from elastic_mbs.events import Event, Warned
from elastic_mbs.sinks.log_reader import Entry, read_runs
from elastic_mbs.sinks.run_log import event_line
from tests.helpers.events import ANY_EVENT, KEY, RUN, done, failure, log_of


def frame(state: State, now: float = 0.0, width: int = 120) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(panel(state, now))
    return out.getvalue()


def state_of(told: list[tuple[float, Event]]) -> State:
    (run,) = read_runs(log_of(told).splitlines())
    state = State(run)
    for entry in run.entries:
        state.add(entry)
    return state


def test_a_frame_shows_size_memory_throughput_loss_and_the_last_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(log_of(RUN[:5], name="my run"))
    monkeypatch.setattr(time, "time", lambda: 1.7e9 + 7.0)
    monkeypatch.setenv("COLUMNS", "120")
    assert command.main(["watch", str(path), "--once"]) == 0
    out, err = capsys.readouterr()
    assert not err
    assert "\x1b" not in out  # no terminal, no colours
    for told in (
        "my run · cpu",
        f"micro-batch  8      {KEY}",
        "ours 12.0 MiB, peak 40.0 MiB, free 52.0 MiB, others 36.0 MiB",
        "64 samples/s",
        "█▃▁  2.5",
        "1 OOMs, 16 samples replayed (8.3%), 250 ms lost (8.3%)",
        "3 calls, 192 samples in 3 s; last line 4 s ago",
        "1.5 s  out of memory in backward of samples 16:32: micro-batch 16 → 8",
        "2.9 s  micro-batch 8 → 16 (grow)",
    ):
        assert told in out, told


def test_a_frame_is_as_wide_as_the_terminal_and_each_event_one_line() -> None:
    lines = frame(state_of([(float(i), failure()) for i in range(20)]), width=40).splitlines()
    assert {len(line) for line in lines} == {40}
    assert sum("out of" in line for line in lines[-EVENTS - 2 :]) == EVENTS


@given(st.lists(ANY_EVENT, max_size=5))
def test_every_event_there_can_be_is_shown(told: list[Event]) -> None:
    state = state_of([(float(i), event) for i, event in enumerate(told)])
    assert "last events" in frame(state)
    state.add(Entry(None, 1.0, {"event": "Teleported", "time": 5.0}))  # of a later version
    assert "Teleported" in frame(state)


def test_a_run_that_has_only_begun_is_shown_and_markup_as_it_is() -> None:
    assert "unknown until a call has finished" in frame(state_of([]))
    assert "[red]careful[/red] [/]" in frame(
        state_of([(1.0, Warned("run", "t", "[red]careful[/red] [/]"))])
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    path.write_bytes(log_of([(1.0, done())]))
    return path


def calls_of(follower: Follower) -> int:
    follower.read()
    return 0 if follower.current is None else follower.current.run.totals.calls


def test_lines_count_when_they_are_whole(path: Path) -> None:
    follower, line = Follower(path), event_line(done(2.0), f"{0:012x}", 2.0, 1.7e9)
    assert calls_of(follower) == 1
    for part, calls in ((line[:20], 1), (line[20:] + line, 3), (b"\n", 3)):
        with path.open("ab") as file:
            file.write(part)
        assert calls_of(follower) == calls


@pytest.mark.parametrize("how", ["cut", "replaced"])
def test_a_log_that_was_cut_or_replaced_is_read_from_its_start(how: str, path: Path) -> None:
    follower = Follower(path)
    path.write_bytes(log_of([(1.0, done()), (2.0, done())]) + b"{")
    assert calls_of(follower) == 2
    if how == "cut":
        path.write_bytes(log_of([(1.0, done())]))
    else:
        other = path.with_name("other")
        other.write_bytes(log_of([(1.0, done())], [(1.0, failure()), (2.0, done())] * 3))
        other.replace(path)
    assert calls_of(follower) == (1 if how == "cut" else 3)


def test_the_run_that_wrote_last_is_shown(path: Path) -> None:
    lines = log_of([(1.0, done())], [(1.0, failure())]).splitlines(keepends=True)
    path.write_bytes(b"".join(lines))
    follower = Follower(path)
    assert calls_of(follower) == 0
    path.write_bytes(b"".join([*lines, lines[1]]))
    assert calls_of(follower) == 2


def test_the_panel_follows_the_file_until_ctrl_c(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100, height=40)
    monkeypatch.setattr("rich.console.Console", lambda: terminal)

    def grow() -> None:
        with path.open("ab") as file:
            file.write(event_line(done(2.0, loss=1.25), f"{0:012x}", 2.0, 1.7e9 + 2))

    def begin() -> None:
        path.write_bytes(log_of([(1.0, done(loss=0.75))], name="another run"))

    def interrupt() -> None:
        raise KeyboardInterrupt

    moves = [grow, lambda: path.write_bytes(b""), begin, interrupt]
    monkeypatch.setattr(time, "sleep", lambda seconds: moves.pop(0)())
    assert command.main(["watch", str(path), "--interval", "0.1"]) == 130
    shown = terminal.file.getvalue()  # type: ignore[attr-defined]  # it is a StringIO
    for told in ("1 calls, 64 samples", "2 calls, 128 samples", "1.25", "another run", "0.75"):
        assert told in shown
    assert "\x1b[?25h" in shown  # the cursor is back
    assert "Traceback" not in capsys.readouterr().err


def test_without_rich_it_says_which_extra_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "rich" else find(name)
    )
    assert command.main(["watch", str(tmp_path / "run.jsonl")]) == 2
    assert "pip install 'elastic-mbs[tui]'" in capsys.readouterr().err


def test_what_a_log_holds_does_not_steer_the_terminal() -> None:
    state = state_of([(1.0, done()), (2.0, Warned("run", "topic", "\x1b[2J\x9b31m\rgone\a"))])
    state.run.header = {"name": "\x1b]0;title\x07", "host": "\x1b[31mred"}
    state.run.totals.sizes = {"\x1b[5m": 4}
    shown = frame(state)
    assert not [sign for sign in shown if not sign.isprintable() and sign != "\n"]
    assert "gone" in shown
