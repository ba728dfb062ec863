"""The run log: what is written comes back, and nothing that happens to the file reaches the step."""

import errno
import json
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic_mbs import CallDone, ElasticMBS, Event, MemoryBudget, MemoryOptions, OutOfMemory, Policy, RecoveryOptions, SensorBack, UsageError, Warned
from elastic_mbs.options import Settings, describe
from elastic_mbs.sinks.run_log import SCHEMA, RunLog, checked_path, event_line
from elastic_mbs.sinks.run_log_reader import Reader, Run, open_lines, read_runs
from tests.helpers.events import ANY_EVENT, KINDS, ONE_OF_EACH, any_event, done, failure, log_of

ROOT = Path(__file__).resolve().parents[2]


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def runs_in(path: Path) -> list[Run]:
    return read_runs(open_lines(path))


def events_in(path: Path) -> list[Event | None]:
    return [entry.event for run in runs_in(path) for entry in run.entries]


def same(one: object, other: object) -> bool:
    """Equal, with NaN equal to itself."""
    return repr(one) == repr(other)


# ---------------------------------------------------------------------- the schema


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_event_comes_back_as_it_was(kind: type[Event], data: st.DataObject) -> None:
    event = data.draw(any_event(kind))
    line = event_line(event, "abc", 1.5, 1e9)
    assert line.count(b"\n") == 1
    assert json.loads(line, parse_constant=pytest.fail)["event"] == kind.__name__  # "NaN" is no JSON
    reader = Reader()
    run = reader.feed(line)
    assert run is not None
    (entry,) = run.entries
    assert same(entry.event, event)
    assert (entry.t, run.id) == (1.5, "abc")


def test_the_samples_of_these_tests_are_one_of_each_kind() -> None:
    assert {type(event) for event in ONE_OF_EACH} | {Event} == set(KINDS)


def test_no_field_of_an_event_hides_one_of_the_line() -> None:
    ours = {"event", "run", "time", "t", "level"}
    assert not [kind for kind in KINDS if ours & {item.name for item in fields(kind)}]


def test_a_header_tells_who_runs_what_and_how(tmp_path: Path) -> None:
    settings = Settings(name="my run", micro_batch_size=8, policy=Policy(margin=0.2, align=4), recovery=RecoveryOptions(on_fatal=print))
    about = describe(settings, lambda: [torch.device("cpu")])
    log = RunLog(tmp_path / "run.jsonl", lambda: about, clock=Clock(50.0), wall=Clock(1e9))
    log.begin()
    log.close()
    header = json.loads((tmp_path / "run.jsonl").read_text())
    assert {key: header[key] for key in ("kind", "schema", "run", "time", "monotonic", "pid", "name", "device")} == {
        "kind": "run",
        "schema": SCHEMA,
        "run": log.run,
        "time": 1e9,
        "monotonic": 50.0,
        "pid": os.getpid(),
        "name": "my run",
        "device": "cpu",
    }
    assert header["versions"]["torch"] == torch.__version__
    assert header["settings"]["micro_batch_size"] == 8
    assert header["settings"]["align"] == 4
    assert "on_fatal" not in header["settings"]  # a function is neither a number nor a text
    assert header["policy"]["margin"] == 0.2


def test_times_are_counted_from_the_header_and_a_call_has_the_time_when_it_ended(tmp_path: Path) -> None:
    clock = Clock(100.0)
    log = RunLog(tmp_path / "run.jsonl", clock=clock, wall=Clock(1e9))
    log.begin()
    clock.now = 103.0
    log(SensorBack("run", "nvml"))
    log(done(ended=101.5))
    (run,) = runs_in(tmp_path / "run.jsonl")
    assert [(entry.t, entry.record["time"]) for entry in run.entries] == [(3.0, 1e9 + 3), (1.5, 1e9 + 1.5)]


# ---------------------------------------------------------------------- reading what is not whole


@given(st.lists(st.tuples(st.integers(0, 2), ANY_EVENT), max_size=12), st.data())
def test_a_log_that_ends_anywhere_gives_all_its_whole_lines(told: list[tuple[int, Event]], data: st.DataObject) -> None:
    text = log_of([(float(i), event) for i, (_, event) in enumerate(told)])
    cut = text[: data.draw(st.integers(0, len(text)))]
    whole = cut.count(b"\n")
    reader = Reader()
    for line in cut.splitlines(keepends=True):
        reader.feed(line)
    found = [entry.event for run in reader.runs.values() for entry in run.entries]
    assert same(found[: max(0, whole - 1)], [event for _, event in told][: max(0, whole - 1)])
    assert len(found) + len(reader.runs) - whole in {0, 1}  # a last line may lack nothing but its end
    assert reader.torn <= 1


@given(st.lists(st.binary(max_size=60) | st.builds(lambda event, i: event_line(event, "r", i, i), ANY_EVENT, st.floats(0, 9)), max_size=6), st.data())
def test_garbled_lines_are_passed_over_or_named_and_nothing_else(lines: list[bytes], data: st.DataObject) -> None:
    mixed = []
    for line in lines:
        where, what = data.draw(st.integers(0, max(0, len(line) - 1))), data.draw(st.binary(max_size=3))
        mixed.append(line[:where] + what + line[where + len(what) :] if data.draw(st.booleans()) else line)
    try:
        read_runs(mixed)
    except UsageError as error:
        assert len(str(error).splitlines()) == 1


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"epoch,loss\n", "line 3 is none of a run log of ElasticMBS(..., log=...): 'epoch,loss'"),
        (b"[1, 2]\n", "line 3"),
        (b'{"kind":"dog"}\n', "line 3"),
        (b"\xff\xfe\x00" * 40, "line 3"),
        (
            b'{"kind":"run","run":"x","time":1,"schema":99}\n',
            "line 3 is of schema 99, and this elastic_mbs reads schema 1: use the version that wrote it",
        ),
    ],
    ids=["csv", "list", "stranger", "binary", "newer"],
)
def test_a_line_that_is_not_ours_is_named(line: bytes, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_runs([*log_of([(1.0, failure())]).splitlines(), line])
    assert told in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("content", [[], [b"\n", b"  \n"], [b'{"kind":"ru']], ids=["empty", "blank", "torn"])
def test_a_log_without_a_run_is_refused(content: list[bytes]) -> None:
    with pytest.raises(UsageError, match="no line of a run log"):
        read_runs(content)


def test_a_torn_line_between_two_runs_is_passed_over() -> None:
    first, second = log_of([(1.0, failure())]), log_of([], [(2.0, SensorBack("run", "nvml"))])
    reader = Reader()
    for line in [*first[:-30].splitlines(), *second.splitlines()]:
        reader.feed(line)
    assert reader.torn == 1
    assert [len(run.entries) for run in reader.runs.values()] == [0, 1]


@pytest.mark.parametrize(
    "changes",
    [{"event": "Teleported"}, {"source": 7}, {"source": None}, {"name": True}],
    ids=["unknown", "number", "null", "bool"],
)
def test_an_event_that_this_version_does_not_know_is_kept_as_its_line(changes: dict[str, Any]) -> None:
    record = json.loads(event_line(SensorBack("run", "nvml"), "r", 1.0, 1.0)) | changes
    (run,) = read_runs([json.dumps(record, separators=(",", ":")).encode()])
    assert run.entries[0].event is None
    assert run.entries[0].record == record
    assert run.header == {}  # the log was cut at its beginning


@pytest.mark.parametrize("missing", ["key", "message"])
def test_a_field_of_a_later_version_may_be_missing_but_none_that_was_always_there(missing: str) -> None:
    record = json.loads(event_line(failure(), "r", 1.0, 1.0))
    del record[missing]
    (run,) = read_runs([json.dumps(record).replace(" ", "").encode()])
    known = run.entries[0].event
    assert (known is None) if missing == "message" else (isinstance(known, OutOfMemory) and known.key == "")


@pytest.mark.parametrize("name", ["t", "time", "run"])
def test_a_line_without_what_each_line_has_counts_as_torn(name: str) -> None:
    record = json.loads(event_line(failure(), "r", 1.0, 1.0))
    del record[name]
    reader = Reader()
    assert reader.feed(json.dumps(record, separators=(",", ":")).encode()) is None
    assert reader.torn == 1


# ---------------------------------------------------------------------- writing


def test_each_line_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    write = os.write

    def noted(fd: int, data: bytes) -> int:
        written.append(data)
        return write(fd, data)

    monkeypatch.setattr(os, "write", noted)
    log = RunLog(tmp_path / "run.jsonl")
    for event in ONE_OF_EACH:
        log(event)
    monkeypatch.undo()
    assert len(written) == 1 + len(ONE_OF_EACH)
    assert (tmp_path / "run.jsonl").read_bytes() == b"".join(written)
    assert same(events_in(tmp_path / "run.jsonl"), ONE_OF_EACH)


def test_runs_in_one_file_are_told_apart_even_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    logs = [RunLog(path) for _ in range(2)]
    for _ in range(3):
        for number, log in enumerate(logs):
            log(SensorBack(f"run {number}", "nvml"))
    assert [[entry.event for entry in run.entries] for run in runs_in(path)] == [[SensorBack(f"run {i}", "nvml")] * 3 for i in range(2)]


def test_after_a_kill_the_next_run_begins_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(log_of([(1.0, failure()), (2.0, failure())])[:-20])
    RunLog(path)(SensorBack("next", "nvml"))
    assert events_in(path) == [failure(), SensorBack("next", "nvml")]


def test_a_file_that_cannot_be_looked_into_is_added_to_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(log_of([(1.0, failure())]))

    def refused(self: Path, *_: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)  # as for a file that may be written and not read
    RunLog(path)(SensorBack("next", "nvml"))
    assert events_in(path) == [failure(), SensorBack("next", "nvml")]


def test_a_closed_log_is_opened_again_by_the_next_event_as_the_same_run(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    log = RunLog(path)
    for _ in range(2):
        log.begin()
        log(failure())
        log.close()
        log.close()
    (run,) = runs_in(path)
    assert [entry.event for entry in run.entries] == [failure(), failure()]
    assert path.read_text().count('"kind":"run"') == 2


@pytest.mark.parametrize("how", ["error", "half"])
def test_a_full_disk_is_said_once_and_the_log_goes_on_when_there_is_room(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, write = tmp_path / "run.jsonl", os.write

    def full(fd: int, data: bytes) -> int:
        if how == "error":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[: len(data) // 2])

    log = RunLog(path)
    log(Warned("run", "a", "before"))
    monkeypatch.setattr(os, "write", full)
    for _ in range(3):
        log(Warned("run", "b", "lost"))
    monkeypatch.undo()
    log(Warned("run", "c", "after"))
    assert events_in(path) == [Warned("run", "a", "before"), Warned("run", "c", "after")]
    (record,) = caplog.records
    assert f"the run log {path} misses events, and training goes on: OSError: " in record.getMessage()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_device_that_is_really_full_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    log = RunLog("/dev/full")
    for event in ONE_OF_EACH:
        log(event)
    assert ["No space left" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.skipif(sys.platform == "win32", reason="an open file cannot be deleted there")
def test_a_deleted_file_is_made_anew_with_its_header(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run.jsonl"
    log = RunLog(path, lambda: {"name": "mine"})
    log(Warned("run", "a", "gone with the file"))
    path.unlink()
    log(Warned("run", "b", "kept"))
    path.unlink()
    log(Warned("run", "c", "kept, too"))
    (run,) = runs_in(path)
    assert [entry.event for entry in run.entries] == [Warned("run", "c", "kept, too")]
    assert run.header["name"] == "mine"
    assert ["is made anew" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.skipif(sys.platform == "win32", reason="an open file cannot be deleted there")
def test_a_folder_that_vanishes_is_said_once_and_raises_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    log = RunLog(folder / "run.jsonl")
    log(failure())
    (folder / "run.jsonl").unlink()
    folder.rmdir()
    for _ in range(3):
        log(failure())
    assert len(caplog.records) == 1
    folder.mkdir()
    log(failure())
    assert events_in(folder / "run.jsonl") == [failure()]


def test_a_header_that_cannot_be_made_raises_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def lost() -> dict[str, object]:
        raise RuntimeError("CUDA error: device lost")

    log = RunLog(tmp_path / "run.jsonl", lost)
    log.begin()
    log(failure())
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_events_of_several_threads_do_not_mix(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run.jsonl")

    def tell(topic: str) -> None:
        for _ in range(50):
            log(Warned("run", topic, "x" * 500))

    threads = [threading.Thread(target=tell, args=(str(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = events_in(tmp_path / "run.jsonl")
    assert sorted(event.topic for event in found if isinstance(event, Warned)) == sorted(str(i) for i in range(4) for _ in range(50))


@pytest.mark.parametrize(
    ("path", "told"),
    [
        (7, "log=7 is no path"),
        ("", "log='' is no path"),
        (b"run.jsonl", "is no path"),
        ("no/such/folder/run.jsonl", "there is no folder 'no/such/folder'"),
        (".", "is a folder"),
    ],
    ids=["number", "empty", "bytes", "missing", "folder"],
)
def test_a_path_that_cannot_be_a_log_is_refused_when_it_is_given(path: Any, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        ElasticMBS(nn.Linear(1, 1), log=path)
    assert told in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_refused_because_it_could_wait_for_ever(tmp_path: Path) -> None:
    pipe = tmp_path / "run.jsonl"
    os.mkfifo(pipe)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    with pytest.raises(UsageError, match="no ordinary file"):
        checked_path(pipe)


def test_the_log_stays_where_it_was_when_the_run_changes_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log = RunLog("run.jsonl")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    log(failure())
    assert events_in(tmp_path / "run.jsonl") == [failure()]


# ---------------------------------------------------------------------- with a runtime


def test_a_run_through_failures_is_told_in_full(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4)).double()
    batch = torch.randn(64, 32, dtype=torch.float64)
    heard: list[Event] = []
    with (
        MemoryBudget("1GiB", [model]) as budget,
        ElasticMBS(model, log=path, on_event=heard.append, memory=MemoryOptions(monitor_interval=0, wait_for_memory=0), policy=Policy(seed=0)) as mbs,
    ):
        mbs.backward(lambda x: model(x).square().mean(), batch)
        model.zero_grad()
        budget.limit = budget.live + 60_000
        result = mbs.backward(lambda x: model(x).square().mean(), batch)
        loss = float(result)
        model.zero_grad()
        budget.limit = "1GiB"
        mbs.eval(model, batch)
    assert result.ooms > 0
    (run,) = runs_in(path)
    assert [entry.event for entry in run.entries] == heard
    first, second, third = (event for event in heard if isinstance(event, CallDone))
    assert (first.mode, second.mode, third.mode) == ("train", "train", "eval")
    assert (second.ooms, second.replayed_samples, second.pieces) == (result.ooms, result.replayed_samples, len(result.partition))
    assert second.loss == pytest.approx(loss, rel=1e-14)
    assert third.loss is None
    failures = [event for event in heard if isinstance(event, OutOfMemory)]
    assert len(failures) == result.ooms
    assert second.seconds_lost == pytest.approx(sum(event.seconds_lost or 0.0 for event in failures))
    assert second.seconds is not None
    assert 0 < second.seconds_lost < second.seconds
    assert all(event.key == second.key and event.requested and event.held_by_others is not None for event in failures)
    assert run.header["device"] == "cpu"


def test_the_log_is_closed_on_exit_and_the_next_call_goes_on_with_it(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    model = nn.Linear(3, 1)
    mbs = ElasticMBS(model, log=path, micro_batch_size=4)
    for _ in range(2):
        with mbs:
            mbs.backward(lambda x: model(x).mean(), torch.ones(4, 3))
        path.rename(tmp_path / "moved.jsonl")  # on Windows only a closed file can be moved
        (tmp_path / "moved.jsonl").rename(path)
    assert [type(event) for event in events_in(path)] == [CallDone, CallDone]


def test_a_disabled_runtime_writes_nothing(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    with ElasticMBS(model, log=tmp_path / "run.jsonl", enabled=False) as mbs:
        mbs.backward(lambda x: model(x).mean(), torch.ones(4, 3))
    assert not (tmp_path / "run.jsonl").exists()


def run_script(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", script, *map(str, arguments)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    # in a subprocess of its own: fork and the threads of a test runner do not mix
    script = """
import os, sys
from elastic_mbs.events import Warned
from elastic_mbs.sinks.run_log import RunLog
log = RunLog(sys.argv[1])
log(Warned("run", "a", "parent"))
log._lock.acquire()  # as a thread of the parent may have at the fork
if os.fork() == 0:
    log.begin()
    log(Warned("run", "b", "child"))
    log.close()
    os._exit(0)
log._lock.release()
assert os.wait()[1] == 0
log(Warned("run", "c", "parent"))
"""
    process = run_script(script, tmp_path / "run.jsonl")
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert [event.message for event in events_in(tmp_path / "run.jsonl") if isinstance(event, Warned)] == ["parent", "parent"]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_a_killed_process_loses_at_most_its_last_line(tmp_path: Path) -> None:
    script = """
import itertools, sys
from elastic_mbs.events import Warned
from elastic_mbs.sinks.run_log import RunLog
log = RunLog(sys.argv[1])
for i in itertools.count():
    log(Warned("run", str(i), "x" * 200))
    print(i, flush=True)
"""
    process = run_script(script, tmp_path / "run.jsonl")
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(100)]
    process.kill()
    said += process.communicate(timeout=600)[0].splitlines()
    last = int([line for line in said if line.strip()][-2])  # what was said last may itself be torn
    found = events_in(tmp_path / "run.jsonl")
    assert [event.topic for event in found if isinstance(event, Warned)] == [str(i) for i in range(len(found))]
    assert len(found) > last


def test_two_logs_of_one_process_have_ids_of_their_own(tmp_path: Path) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    ids = {RunLog(tmp_path / "run.jsonl").run for _ in range(20)}
    assert len(ids) == 20
    assert torch.equal(torch.get_rng_state(), before)


def test_what_an_event_of_ones_own_holds_is_written_as_text(tmp_path: Path) -> None:
    class Odd:
        def __str__(self) -> str:
            return "odd"

    RunLog(tmp_path / "run.jsonl")(replace(SensorBack("run", "nvml"), source=Odd()))  # type: ignore[arg-type]  # that is the point
    assert events_in(tmp_path / "run.jsonl") == [SensorBack("run", "odd")]
