"""Sinks of this package: what they write, and that nothing that goes wrong in them reaches the step."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastic_mbs import ElasticMBS, MemoryOptions, SensorBack, SensorLost, UsageError, Warned
from elastic_mbs.sinks import PrometheusTextfile, TensorBoard
from tests.helpers.events import ANY_EVENT, GROWN, KEY, ONE_OF_EACH, done, failure

pytestmark = pytest.mark.injectable


class Clock:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Writer:
    """What a `SummaryWriter` is to us."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.texts: list[tuple[str, str, int]] = []
        self.flushes = 0

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.texts.append((tag, text, step))

    def flush(self) -> None:
        self.flushes += 1


# ---------------------------------------------------------------------- Prometheus


def test_the_textfile_is_what_prometheus_reads(tmp_path: Path) -> None:
    sink = PrometheusTextfile(tmp_path / "run.prom", every=0, labels={"rank": "0"}, wall=Clock(1700000000.5))
    for event in (done(ooms=1, replayed_samples=16, seconds_lost=0.125), done(mode="eval", loss=None), *ONE_OF_EACH[1:]):
        sink(event)
    assert (
        (tmp_path / "run.prom").read_text()
        == f"""\
# HELP elastic_mbs_calls_total Calls that finished.
# TYPE elastic_mbs_calls_total counter
elastic_mbs_calls_total{{rank="0",name="run",mode="train"}} 1
elastic_mbs_calls_total{{rank="0",name="run",mode="eval"}} 1
# HELP elastic_mbs_samples_total Samples in calls that finished.
# TYPE elastic_mbs_samples_total counter
elastic_mbs_samples_total{{rank="0",name="run",mode="train"}} 64
elastic_mbs_samples_total{{rank="0",name="run",mode="eval"}} 64
# HELP elastic_mbs_out_of_memory_total Out-of-memory errors.
# TYPE elastic_mbs_out_of_memory_total counter
elastic_mbs_out_of_memory_total{{rank="0",name="run",phase="backward",kind="allocator"}} 1
elastic_mbs_out_of_memory_total{{rank="0",name="run",phase="optimizer",kind="allocator"}} 1
# HELP elastic_mbs_replayed_samples_total Samples that were run again.
# TYPE elastic_mbs_replayed_samples_total counter
elastic_mbs_replayed_samples_total{{rank="0",name="run",mode="train"}} 16
elastic_mbs_replayed_samples_total{{rank="0",name="run",mode="eval"}} 0
# HELP elastic_mbs_seconds_total Time of calls that finished.
# TYPE elastic_mbs_seconds_total counter
elastic_mbs_seconds_total{{rank="0",name="run",mode="train"}} 0.5
elastic_mbs_seconds_total{{rank="0",name="run",mode="eval"}} 0.5
# HELP elastic_mbs_lost_seconds_total Time in attempts that ran out of memory.
# TYPE elastic_mbs_lost_seconds_total counter
elastic_mbs_lost_seconds_total{{rank="0",name="run",mode="train"}} 0.125
elastic_mbs_lost_seconds_total{{rank="0",name="run",mode="eval"}} 0
# HELP elastic_mbs_resizes_total Changes of the micro-batch size between calls.
# TYPE elastic_mbs_resizes_total counter
elastic_mbs_resizes_total{{rank="0",name="run",reason="grow"}} 1
# HELP elastic_mbs_waits_total Waits for others to free memory.
# TYPE elastic_mbs_waits_total counter
elastic_mbs_waits_total{{rank="0",name="run"}} 1
# HELP elastic_mbs_warnings_total Warnings about probable mistakes.
# TYPE elastic_mbs_warnings_total counter
elastic_mbs_warnings_total{{rank="0",name="run"}} 1
# HELP elastic_mbs_micro_batch_size Micro-batch size in samples.
# TYPE elastic_mbs_micro_batch_size gauge
elastic_mbs_micro_batch_size{{rank="0",name="run",key="{KEY}"}} 16
# HELP elastic_mbs_samples_per_second Throughput of the last call.
# TYPE elastic_mbs_samples_per_second gauge
elastic_mbs_samples_per_second{{rank="0",name="run",mode="train"}} 128
elastic_mbs_samples_per_second{{rank="0",name="run",mode="eval"}} 128
# HELP elastic_mbs_loss Loss of the last training call.
# TYPE elastic_mbs_loss gauge
elastic_mbs_loss{{rank="0",name="run"}} 2.5
# HELP elastic_mbs_memory_allocated_bytes Bytes in live tensors when the last call ended.
# TYPE elastic_mbs_memory_allocated_bytes gauge
elastic_mbs_memory_allocated_bytes{{rank="0",name="run"}} 10485760
# HELP elastic_mbs_memory_reserved_bytes Bytes that the allocator held when the last call ended.
# TYPE elastic_mbs_memory_reserved_bytes gauge
elastic_mbs_memory_reserved_bytes{{rank="0",name="run"}} 12582912
# HELP elastic_mbs_memory_free_bytes Bytes that the process could still get.
# TYPE elastic_mbs_memory_free_bytes gauge
elastic_mbs_memory_free_bytes{{rank="0",name="run"}} 54525952
# HELP elastic_mbs_memory_held_by_others_bytes Bytes that the process cannot get because others have them.
# TYPE elastic_mbs_memory_held_by_others_bytes gauge
elastic_mbs_memory_held_by_others_bytes{{rank="0",name="run"}} 37748736
# HELP elastic_mbs_memory_total_bytes Bytes that the device has.
# TYPE elastic_mbs_memory_total_bytes gauge
elastic_mbs_memory_total_bytes{{rank="0",name="run"}} 104857600
# HELP elastic_mbs_memory_readable 1 while there are memory readings, 0 while there are none.
# TYPE elastic_mbs_memory_readable gauge
elastic_mbs_memory_readable{{rank="0",name="run"}} 1
# HELP elastic_mbs_last_event_timestamp_seconds Unix time of the last event.
# TYPE elastic_mbs_last_event_timestamp_seconds gauge
elastic_mbs_last_event_timestamp_seconds{{rank="0",name="run"}} 1700000000.5
"""
    )
    assert list(tmp_path.iterdir()) == [tmp_path / "run.prom"]


@pytest.mark.parametrize(
    ("loss", "text"), [(float("nan"), "NaN"), (float("inf"), "+Inf"), (float("-inf"), "-Inf"), (1e20, "1e+20"), (-3.0, "-3"), (0.1, "0.1")]
)
def test_numbers_are_written_as_prometheus_reads_them(loss: float, text: str, tmp_path: Path) -> None:
    sink = PrometheusTextfile(tmp_path / "run.prom")
    sink(done(loss=loss))
    assert f'elastic_mbs_loss{{name="run"}} {text}\n' in sink.text()


@given(st.text(max_size=30))
def test_a_label_cannot_end_its_line_or_its_quotes(name: str) -> None:
    sink = PrometheusTextfile("run.prom", every=1e9)
    sink._count(Warned(name, "t", "m"))
    lines = sink.text().split("\n")
    assert len(lines) == 4
    quoted = lines[2].removeprefix('elastic_mbs_warnings_total{name="').removesuffix('"} 1')
    assert quoted.replace("\\\\", "").replace('\\"', "").count('"') == 0
    assert quoted.replace("\\\\", "\0").replace("\\n", "\n").replace('\\"', '"').replace("\0", "\\") == name or "\0" in name


def test_the_size_of_a_track_is_the_newest_that_was_told(tmp_path: Path) -> None:
    sink = PrometheusTextfile(tmp_path / "run.prom")

    def size() -> str:
        (line,) = (line for line in sink.text().splitlines() if line.startswith("elastic_mbs_micro_batch_size"))
        return line.rsplit(" ", 1)[1]

    for event, told in ((done(), "16"), (GROWN, "16"), (done(micro_batch_size=8), "16"), (failure(), "8"), (done(), "8"), (done(), "16")):
        sink(event)
        assert size() == told


def test_the_file_is_written_at_most_so_often_and_when_the_runtime_is_closed(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "run.prom"
    sink = PrometheusTextfile(path, every=10, clock=clock)

    def calls() -> str:
        return next(line for line in path.read_text().splitlines() if line.startswith("elastic_mbs_calls_total{")).rsplit(" ", 1)[1]

    for now, told in ((0.0, "1"), (1.0, "1"), (9.9, "1"), (10.0, "4"), (11.0, "4")):
        clock.now = now
        sink(done())
        assert calls() == told
    sink.close()
    assert calls() == "5"
    path.unlink()
    sink.close()  # nothing is waiting
    assert not path.exists()


def test_a_file_that_cannot_be_written_is_said_once_and_tried_again_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "textfiles"
    folder.mkdir()
    clock = Clock()
    sink = PrometheusTextfile(folder / "run.prom", every=10, clock=clock)
    folder.rmdir()
    for _ in range(5):
        sink(done())
        clock.now += 10
    assert [f"{sink} misses events, and training goes on: FileNotFoundError" in record.getMessage() for record in caplog.records] == [True]
    folder.mkdir()
    sink(done())
    assert 'elastic_mbs_calls_total{name="run",mode="train"} 6' in (folder / "run.prom").read_text()


def test_nobody_reads_half_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run.prom"
    sink = PrometheusTextfile(path, every=0)
    sink(done())
    before = path.read_text()

    def full(self: Path, text: str, **_: Any) -> int:
        with self.open("w") as file:
            file.write(text[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    sink(done())
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("path", "options", "told"),
    [
        ("run.txt", {}, "reads names that end in .prom only"),
        ("no/such/run.prom", {}, "there is no folder"),
        ("run.prom", {"every": -1}, "every=-1"),
        ("run.prom", {"every": True}, "every=True"),
        ("run.prom", {"every": float("inf")}, "every=inf"),
        ("run.prom", {"labels": {"a-b": "1"}}, "'a-b' cannot be a label"),
        ("run.prom", {"labels": {"__rank": "1"}}, "'__rank'"),
        ("run.prom", {"labels": {"key": "1"}}, "'key'"),
    ],
    ids=["name", "folder", "negative", "bool", "infinite", "dash", "reserved", "ours"],
)
def test_an_argument_that_makes_no_sense_is_refused(path: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        PrometheusTextfile(path, **options)
    assert told in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_folder_is_no_textfile(tmp_path: Path) -> None:
    (tmp_path / "run.prom").mkdir()
    with pytest.raises(UsageError, match="this is a folder"):
        PrometheusTextfile(tmp_path / "run.prom")


# ---------------------------------------------------------------------- TensorBoard


def test_scalars_and_texts_are_written_at_the_training_step() -> None:
    writer = Writer()
    sink = TensorBoard(writer)
    sink(done())
    sink(failure())
    sink(done(loss=None, seconds=None, peak_reserved=None, ooms=1, seconds_lost=0.125))
    sink(done(mode="eval", loss=None))
    sink(GROWN)
    sink.close()
    assert writer.scalars == [
        ("run/loss", 2.5, 0),
        ("run/micro_batch_size", 16, 0),
        ("run/samples_per_second", 128.0, 0),
        ("run/out_of_memory", 0, 0),
        ("run/seconds_lost", 0.0, 0),
        ("run/memory/allocated", 10485760, 0),
        ("run/memory/reserved", 12582912, 0),
        ("run/memory/peak", 41943040, 0),
        ("run/memory/free", 54525952, 0),
        ("run/memory/held_by_others", 37748736, 0),
        ("run/micro_batch_size", 16, 1),
        ("run/out_of_memory", 1, 1),
        ("run/seconds_lost", 0.125, 1),
        ("run/memory/allocated", 10485760, 1),
        ("run/memory/reserved", 12582912, 1),
        ("run/memory/free", 54525952, 1),
        ("run/memory/held_by_others", 37748736, 1),
        ("run/eval/micro_batch_size", 16, 2),
        ("run/eval/samples_per_second", 128.0, 2),
        ("run/eval/out_of_memory", 0, 2),
        ("run/eval/seconds_lost", 0.0, 2),
        ("run/eval/memory/allocated", 10485760, 2),
        ("run/eval/memory/reserved", 12582912, 2),
        ("run/eval/memory/peak", 41943040, 2),
        ("run/eval/memory/free", 54525952, 2),
        ("run/eval/memory/held_by_others", 37748736, 2),
    ]
    assert writer.texts == [("run/events", failure().line(), 1), ("run/events", GROWN.line(), 2)]
    assert writer.flushes == 1


@pytest.mark.parametrize("writer", [None, object(), "runs/"])
def test_a_writer_without_its_methods_is_refused(writer: object) -> None:
    with pytest.raises(UsageError, match="no add_scalar and add_text"):
        TensorBoard(writer)


def test_a_writer_without_flush_is_enough() -> None:
    class Plain:
        add_scalar = add_text = staticmethod(print)

    TensorBoard(Plain()).close()


# ---------------------------------------------------------------------- both


class Broken(Writer):
    def add_scalar(self, tag: str, value: float, step: int) -> None:
        raise ZeroDivisionError(tag)


def test_a_sink_of_ours_never_raises_into_the_step(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(3, 1)
    with ElasticMBS(model, on_event=TensorBoard(Broken()), micro_batch_size=4, memory=MemoryOptions(monitor_interval=0)) as mbs:
        for _ in range(3):
            mbs.backward(lambda x: model(x).mean(), torch.ones(4, 3))
    said = [record.getMessage() for record in caplog.records if "misses events" in record.getMessage()]
    assert said == ["TensorBoard(Broken) misses events, and training goes on: ZeroDivisionError: run/loss".replace("run/", "elastic_mbs/")]


@given(st.lists(ANY_EVENT, max_size=5))
def test_every_event_there_can_be_is_taken(told: list[Any]) -> None:
    prometheus, board = PrometheusTextfile("run.prom", every=1e12, clock=Clock()), TensorBoard(Writer())
    prometheus._written = 0.0
    for event in told:
        prometheus._take(event)
        board._take(event)
    prometheus.text()


def test_a_forked_child_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer()
    sinks = [PrometheusTextfile(tmp_path / "run.prom", every=0), TensorBoard(writer)]
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    for sink in sinks:
        sink(SensorLost("run", "gone"))
        sink(SensorBack("run", "nvml"))
        sink.close()
    assert list(tmp_path.iterdir()) == []
    assert (writer.texts, writer.flushes) == ([], 0)


def test_a_runtime_writes_its_textfile_when_it_is_closed(tmp_path: Path) -> None:
    model, path = nn.Linear(3, 1), tmp_path / "run.prom"
    with ElasticMBS(model, on_event=PrometheusTextfile(path, every=1e9), micro_batch_size=4, memory=MemoryOptions(monitor_interval=0)) as mbs:
        for _ in range(3):
            mbs.backward(lambda x: model(x).mean(), torch.ones(4, 3))
    assert 'elastic_mbs_calls_total{name="elastic_mbs",mode="train"} 3\n' in path.read_text()
