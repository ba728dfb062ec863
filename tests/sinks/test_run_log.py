"""The run log: events come back as written, and no trouble with the file reaches a step."""

import errno
import json
import logging
import os
import subprocess
import sys
import threading
from dataclasses import fields
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic_mbs import (
    CallDone,
    ElasticMBS,
    Event,
    MemoryBudget,
    MemoryOptions,
    OutOfMemory,
    Policy,
    RecoveryOptions,
    SensorBack,
    UsageError,
    Warned,
)
from elastic_mbs.doors.log import describe
from elastic_mbs.options import Settings
from elastic_mbs.sinks import run_log
from elastic_mbs.sinks.log_reader import Reader, read_log, read_runs
from elastic_mbs.sinks.run_log import (
    SCHEMA,
    RunLog,
    checked_path,
    event_line,
    header_line,
)
from tests.helpers.device_sim import Clock
from tests.helpers.events import ANY_EVENT, KINDS, ONE_OF_EACH, any_event, done, failure, log_of
from tests.helpers.room import ROOT


def events_in(path: Path) -> list[Event | None]:
    return [entry.event for run in read_log(path) for entry in run.entries]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the monotonic clock; the wall clock stands still at 10⁹ s."""
    clock = Clock(50.0)
    monkeypatch.setattr(run_log, "time", SimpleNamespace(monotonic=clock, time=Clock(1e9)))
    return clock


def test_a_header_says_who_runs_what_and_how(path: Path, clock: Clock) -> None:
    settings = Settings(
        name="my run",
        micro_batch_size=8,
        policy=Policy(margin=0.2, align=4),
        recovery=RecoveryOptions(on_fatal=print),
    )
    about = describe(settings, lambda: [torch.device("cpu")])
    log = RunLog(path, lambda: about)
    log.begin()
    log.close()
    header = json.loads(path.read_text())
    expected = {
        "kind": "run",
        "schema": SCHEMA,
        "run": log.run,
        "time": 1e9,
        "monotonic": 50.0,
        "pid": os.getpid(),
        "name": "my run",
    }
    assert {key: header[key] for key in expected} == expected
    assert header["versions"]["torch"] == torch.__version__
    assert header["settings"]["micro_batch_size"] == 8
    assert header["settings"]["align"] == 4
    assert "on_fatal" not in header["settings"]  # a function is neither a number nor a text
    assert header["policy"]["margin"] == 0.2


def test_times_count_from_the_header_and_a_call_has_the_time_of_its_end(
    path: Path, clock: Clock
) -> None:
    log = RunLog(path)
    log.begin()
    clock.now = 53.0
    log(SensorBack("run", "nvml"))
    log(done(ended=51.5))
    (run,) = read_log(path)
    assert [(entry.t, entry.record["time"]) for entry in run.entries] == [
        (3.0, 1e9 + 3),
        (1.5, 1e9 + 1.5),
    ]


# ---------------------------------------------------------------------- the file


class Disk(FileIO):
    """A file that records its writes, on a disk that can be full."""

    written: list[bytes] = []  # noqa: RUF012  # of all files
    full = ""

    def write(self, data: Any) -> int:
        self.written.append(data)
        if self.full == "error":
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data[: len(data) // 2] if self.full == "half" else data)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> type[Disk]:
    monkeypatch.setattr(run_log, "FileIO", Disk)
    monkeypatch.setattr(Disk, "written", [])
    return Disk


def test_each_line_is_one_write(path: Path, disk: type[Disk]) -> None:
    log = RunLog(path)
    for event in ONE_OF_EACH:
        log(event)
    assert len(disk.written) == 1 + len(ONE_OF_EACH)
    assert path.read_bytes() == b"".join(disk.written)
    assert events_in(path) == ONE_OF_EACH


@pytest.mark.parametrize("how", ["error", "half"])
def test_a_full_disk_is_said_once_and_the_log_goes_on_when_there_is_room(
    how: str,
    path: Path,
    disk: type[Disk],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = RunLog(path)
    log(Warned("run", "a", "before"))
    monkeypatch.setattr(disk, "full", how)
    for _ in range(3):
        log(Warned("run", "b", "lost"))
    monkeypatch.setattr(disk, "full", "")
    log(Warned("run", "c", "after"))
    assert events_in(path) == [Warned("run", "a", "before"), Warned("run", "c", "after")]
    (record,) = caplog.records
    assert (
        f"the run log {path} misses events, and training goes on: OSError: " in record.getMessage()
    )


def test_runs_in_one_file_are_told_apart_even_at_the_same_time(path: Path) -> None:
    before = torch.get_rng_state()
    logs = [RunLog(path) for _ in range(20)]
    # their ids are not drawn from the user's stream
    assert torch.equal(torch.get_rng_state(), before)
    for _ in range(3):
        for number, log in enumerate(logs):
            log(SensorBack(f"run {number}", "nvml"))
    assert [[entry.event for entry in run.entries] for run in read_log(path)] == [
        [SensorBack(f"run {i}", "nvml")] * 3 for i in range(20)
    ]


def test_after_a_kill_the_next_run_begins_a_line_of_its_own(path: Path) -> None:
    path.write_bytes(log_of([(1.0, failure()), (2.0, failure())])[:-20])
    RunLog(path)(SensorBack("next", "nvml"))
    assert events_in(path) == [failure(), SensorBack("next", "nvml")]


@pytest.mark.skipif(sys.platform == "win32", reason="an open file cannot be deleted there")
def test_a_deleted_file_is_made_again_with_its_header(path: Path) -> None:
    log = RunLog(path, lambda: {"name": "mine"})
    log(Warned("run", "a", "gone with the file"))
    path.unlink()
    log(Warned("run", "b", "kept"))
    (run,) = read_log(path)
    assert [entry.event for entry in run.entries] == [Warned("run", "b", "kept")]
    assert run.header["name"] == "mine"


def test_a_header_that_cannot_be_made_raises_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lost() -> dict[str, object]:
        raise RuntimeError("CUDA error: device lost")

    log = RunLog(path, lost)
    log.begin()
    log(failure())
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_events_of_several_threads_do_not_mix(path: Path) -> None:
    log = RunLog(path)

    def emit(topic: str) -> None:
        for _ in range(50):
            log(Warned("run", topic, "x" * 500))

    threads = [threading.Thread(target=emit, args=(str(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(event.topic for event in events_in(path) if isinstance(event, Warned)) == sorted(
        "0123" * 50
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (7, "log=7 is no path"),
        ("", "log='' is no path"),
        (b"run.jsonl", "is no path"),
        ("no/such/folder/run.jsonl", "there is no folder 'no/such/folder'"),
        (".", "is a folder"),
    ],
)
def test_a_path_that_cannot_be_a_log_is_refused_when_it_is_given(given: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        ElasticMBS(nn.Linear(1, 1), log=given)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_refused_because_it_could_wait_for_ever(path: Path) -> None:
    os.mkfifo(path)
    with pytest.raises(UsageError, match="no ordinary file"):
        checked_path(path)


def test_the_log_stays_where_it_was_when_the_run_changes_its_folder(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log = RunLog("run.jsonl")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    log(failure())
    assert events_in(path) == [failure()]


# ---------------------------------------------------------------------- with a runtime


def test_a_run_through_failures_is_logged_in_full(path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4)).double()
    batch = torch.randn(64, 32, dtype=torch.float64)
    heard: list[Event] = []
    with (
        MemoryBudget("1GiB", [model]) as budget,
        ElasticMBS(
            model,
            log=path,
            on_event=heard.append,
            memory=MemoryOptions(monitor_interval=0, wait_for_memory=0),
            policy=Policy(seed=0),
        ) as mbs,
    ):
        mbs.backward(lambda x: model(x).square().mean(), batch)
        model.zero_grad()
        budget.limit = budget.live + 60_000
        result = mbs.backward(lambda x: model(x).square().mean(), batch)
        loss = float(result)
        model.zero_grad()
        budget.limit = "1GiB"
        mbs.evaluate(model, batch)
    assert result.ooms > 0
    (run,) = read_log(path)
    assert [entry.event for entry in run.entries] == heard
    first, second, third = (event for event in heard if isinstance(event, CallDone))
    assert (first.mode, second.mode, third.mode) == ("train", "train", "eval")
    assert (second.ooms, second.replayed_samples, second.pieces) == (
        result.ooms,
        result.replayed_samples,
        len(result.partition),
    )
    assert second.loss == pytest.approx(loss, rel=1e-14)
    assert third.loss is None
    failures = [event for event in heard if isinstance(event, OutOfMemory)]
    assert len(failures) == result.ooms
    assert second.seconds_lost == pytest.approx(
        sum(event.seconds_lost or 0.0 for event in failures)
    )
    assert second.seconds is not None
    assert 0 < second.seconds_lost < second.seconds
    assert all(
        event.key == second.key and event.requested and event.held_by_others is not None
        for event in failures
    )
    assert run.header["device"] == "cpu"


def test_the_log_is_closed_on_exit_and_the_next_call_goes_on_with_it(
    path: Path, disk: type[Disk]
) -> None:
    model = nn.Linear(3, 1)
    mbs = ElasticMBS(model, log=path, micro_batch_size=4)
    for _ in range(2):
        with mbs:
            mbs.backward(lambda x: model(x).mean(), torch.ones(4, 3))
        path.rename(path.with_name("moved.jsonl"))  # on Windows only a closed file can be moved
        path.with_name("moved.jsonl").rename(path)
    (run,) = read_log(path)
    assert [type(entry.event) for entry in run.entries] == [CallDone, CallDone]
    assert sum(b'"kind":"run"' in line for line in disk.written) == 2


def test_a_disabled_runtime_writes_nothing(path: Path) -> None:
    model = nn.Linear(3, 1)
    with ElasticMBS(model, log=path, enabled=False) as mbs:
        mbs.backward(lambda x: model(x).mean(), torch.ones(4, 3))
    assert not path.exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_writes_nothing(path: Path) -> None:
    # in a subprocess of its own: fork and the threads of a test runner do not mix
    script = """
import os, sys
from elastic_mbs.events import Warned
from elastic_mbs.sinks import PrometheusTextfile
from elastic_mbs.sinks.run_log import RunLog
sinks = [RunLog(sys.argv[1]), PrometheusTextfile(sys.argv[1] + ".prom", every=0)]
for sink in sinks:
    sink(Warned("run", "a", "parent"))
    sink._lock.acquire()  # as a thread of the parent may have at the fork
if os.fork() == 0:
    for sink in sinks:
        sink.begin()
        sink(Warned("run", "b", "child"))
        sink.close()
    os._exit(0)
assert os.wait()[1] == 0
for sink in sinks:
    sink._lock.release()
    sink(Warned("run", "c", "parent"))
"""
    process = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert [event.message for event in events_in(path) if isinstance(event, Warned)] == [
        "parent",
        "parent",
    ]
    assert (
        'elastic_mbs_warnings_total{name="run"} 2.0' in path.with_name("run.jsonl.prom").read_text()
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_event_comes_back_as_it_was(kind: type[Event], data: st.DataObject) -> None:
    event = data.draw(any_event(kind))
    line = event_line(event, "abc", 1.5, 1e9)
    assert line.count(b"\n") == 1
    # "NaN" is no JSON
    assert json.loads(line, parse_constant=pytest.fail)["event"] == kind.__name__
    (run,) = read_runs([line])
    (entry,) = run.entries
    assert repr(entry.event) == repr(event)  # NaN equal to itself
    assert (entry.t, run.id) == (1.5, "abc")


def test_the_samples_of_these_tests_are_one_of_each_kind() -> None:
    assert {type(event) for event in ONE_OF_EACH} | {Event} == set(KINDS)
    ours = {"event", "run", "time", "t", "level"}  # of a line
    assert not [kind for kind in KINDS if ours & {item.name for item in fields(kind)}]


@given(st.lists(ANY_EVENT, max_size=12), st.data())
def test_a_log_that_ends_anywhere_gives_all_its_whole_lines(
    events: list[Event], data: st.DataObject
) -> None:
    text = log_of([(float(i), event) for i, event in enumerate(events)])
    cut = text[: data.draw(st.integers(0, len(text)))]
    whole = cut.count(b"\n")
    reader = Reader()
    for line in cut.splitlines(keepends=True):
        reader.feed(line)
    found = [entry.event for run in reader.runs.values() for entry in run.entries]
    assert repr(found[: max(0, whole - 1)]) == repr(events[: max(0, whole - 1)])
    # a last line may lack nothing but its end
    assert len(found) + len(reader.runs) - whole in {0, 1}


@given(
    st.lists(
        st.binary(max_size=60)
        | st.builds(lambda event, i: event_line(event, "r", i, i), ANY_EVENT, st.floats(0, 9)),
        max_size=6,
    ),
    st.data(),
)
def test_garbled_lines_are_passed_over_or_named_and_nothing_else(
    lines: list[bytes], data: st.DataObject
) -> None:
    mixed = []
    for line in lines:
        where, what = (
            data.draw(st.integers(0, max(0, len(line) - 1))),
            data.draw(st.binary(max_size=3)),
        )
        mixed.append(
            line[:where] + what + line[where + len(what) :] if data.draw(st.booleans()) else line
        )
    try:
        read_runs(mixed)
    except UsageError as error:
        assert len(str(error).splitlines()) == 1


STRANGE = [b"epoch,loss", b"[1, 2]", b'{"kind":"dog"}', b"\xff\xfe\x00", b"", b'{"kind":"ru']
STRANGE += [
    json.dumps(json.loads(event_line(failure(), "r", 1.0, 1.0)) | changes).encode()
    for changes in ({"t": None}, {"time": None})
]


@pytest.mark.parametrize("line", STRANGE)
def test_torn_and_foreign_lines_are_passed_over_and_a_log_needs_others(
    line: bytes,
) -> None:
    (run,) = read_runs([*log_of([(1.0, failure())]).splitlines(), line])
    assert [entry.event for entry in run.entries] == [failure()]
    with pytest.raises(UsageError, match="no line of a run log"):
        read_runs([line])


def test_a_log_of_a_later_schema_is_named() -> None:
    with pytest.raises(UsageError, match="schema 99, and this elastic_mbs reads schema 1"):
        read_runs([header_line("r", 0.0, 0.0, {"schema": 99})])


def test_a_torn_line_between_two_runs_is_passed_over() -> None:
    first, second = log_of([(1.0, failure())]), log_of([], [(2.0, SensorBack("run", "nvml"))])
    reader = Reader()
    for line in [*first[:-30].splitlines(), *second.splitlines()]:
        reader.feed(line)
    assert [len(run.entries) for run in reader.runs.values()] == [0, 1]


@pytest.mark.parametrize(
    "changes",
    [{"event": "Teleported"}, {"source": 7}, {"source": None}, {"name": True}, {"source": []}],
    ids=["unknown", "number", "null", "bool", "list"],
)
def test_an_event_that_this_version_does_not_know_is_kept_as_its_line(
    changes: dict[str, Any],
) -> None:
    record = json.loads(event_line(SensorBack("run", "nvml"), "r", 1.0, 1.0)) | changes
    (run,) = read_runs([json.dumps(record, separators=(",", ":")).encode()])
    assert run.entries[0].event is None
    assert run.entries[0].record == record
    assert run.header == {}  # the log was cut at its beginning


@pytest.mark.parametrize("missing", ["key", "message"])
def test_a_field_with_a_default_may_be_missing_and_no_other(
    missing: str,
) -> None:
    record = json.loads(event_line(failure(), "r", 1.0, 1.0))
    del record[missing]
    (run,) = read_runs([json.dumps(record).replace(" ", "").encode()])
    known = run.entries[0].event
    assert (
        (known is None)
        if missing == "message"
        else (isinstance(known, OutOfMemory) and known.key == "")
    )
