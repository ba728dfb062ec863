"""The sinks for Prometheus and TensorBoard: their output, and no error of theirs in a step."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from torch import nn

from elastic_mbs import ElasticMBS, MemoryOptions, UsageError
from elastic_mbs.sinks import PrometheusTextfile, TensorBoard, prometheus
from tests.helpers.device_sim import Clock
from tests.helpers.events import ANY_EVENT, GROWN, KEY, MIB, ONE_OF_EACH, done, failure

pytestmark = pytest.mark.injectable


def writer_of(**methods: Any) -> Mock:
    """Make a stand-in for a `SummaryWriter`."""
    return Mock(spec=["add_scalar", "add_text", "flush"], **methods)


def read(text: str) -> dict[str, dict[str, float]]:
    """Parse a textfile as Prometheus does: metric → labels after the runtime's name → value."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert family.type == ("counter" if sample.name.endswith("_total") else "gauge")
            labels = {label: value for label, value in sample.labels.items() if label != "name"}
            found.setdefault(sample.name.removeprefix("elastic_mbs_"), {})[
                " ".join(f"{k}={v}" for k, v in sorted(labels.items()))
            ] = sample.value
    return found


# ---------------------------------------------------------------------- Prometheus


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(
        prometheus, "time", SimpleNamespace(monotonic=clock, time=Clock(1700000000.5))
    )
    return clock


def test_the_textfile_has_every_metric_with_its_labels(tmp_path: Path, clock: Clock) -> None:
    sink = PrometheusTextfile(tmp_path / "run.prom", every=0)
    for event in (
        done(ooms=1, replayed_samples=16, seconds_lost=0.125),
        done(mode="eval", loss=None),
        *ONE_OF_EACH[1:],
    ):
        sink(event)
    assert read((tmp_path / "run.prom").read_text()) == {
        "calls_total": {"mode=train": 1, "mode=eval": 1},
        "samples_total": {"mode=train": 64, "mode=eval": 64},
        "out_of_memory_total": {
            "kind=allocator phase=backward": 1,
            "kind=allocator phase=optimizer": 1,
        },
        "replayed_samples_total": {"mode=train": 16, "mode=eval": 0},
        "seconds_total": {"mode=train": 0.5, "mode=eval": 0.5},
        "lost_seconds_total": {"mode=train": 0.125, "mode=eval": 0},
        "resizes_total": {"reason=grow": 1},
        "waits_total": {"": 1},
        "warnings_total": {"": 1},
        "micro_batch_size": {f"key={KEY}": 16},
        "samples_per_second": {"mode=train": 128, "mode=eval": 128},
        "loss": {"": 2.5},
        "memory_allocated_bytes": {"": 10 * MIB},
        "memory_reserved_bytes": {"": 12 * MIB},
        "memory_free_bytes": {"": 52 * MIB},
        "memory_held_by_others_bytes": {"": 36 * MIB},
        "memory_total_bytes": {"": 100 * MIB},
        "memory_readable": {"": 1},
        "last_event_timestamp_seconds": {"": 1700000000.5},
    }
    assert list(tmp_path.iterdir()) == [tmp_path / "run.prom"]


def test_the_file_is_written_every_so_often_and_when_the_runtime_is_closed(
    tmp_path: Path, clock: Clock
) -> None:
    path = tmp_path / "run.prom"
    sink = PrometheusTextfile(path, every=10, labels={"rank": "0"})
    for now, calls in ((0.0, 1), (1.0, 1), (9.9, 1), (10.0, 4), (11.0, 4)):
        clock.now = now
        sink(done())
        assert read(path.read_text())["calls_total"] == {"mode=train rank=0": calls}
    sink.close()
    assert read(path.read_text())["calls_total"] == {"mode=train rank=0": 5}
    path.unlink()
    sink.close()  # nothing is waiting
    assert not path.exists()


def test_a_file_that_cannot_be_written_is_said_once_and_tried_again_later(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "textfiles"
    folder.mkdir()
    sink = PrometheusTextfile(folder / "run.prom", every=10)
    folder.rmdir()
    for _ in range(5):
        sink(done())
        clock.now += 10
    assert [
        f"{sink} misses events, and training goes on: FileNotFoundError" in record.getMessage()
        for record in caplog.records
    ] == [True]
    folder.mkdir()
    sink(done())
    assert read((folder / "run.prom").read_text())["calls_total"] == {"mode=train": 6}


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("run.txt", {}, "reads names that end in .prom only"),
        ("no/such/run.prom", {}, "there is no folder"),
        ("run.prom", {"every": -1}, "every=-1"),
        ("run.prom", {"every": float("inf")}, "every=inf"),
        ("run.prom", {"labels": {"a-b": "1"}}, "['a-b'] cannot be labels"),
        ("run.prom", {"labels": {"__rank": "1"}}, "'__rank'"),
        ("run.prom", {"labels": {"key": "1"}}, "'key'"),
    ],
    ids=["name", "no-folder", "negative", "infinite", "dash", "reserved", "ours"],
)
def test_an_argument_that_makes_no_sense_is_refused(
    path: str,
    options: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        PrometheusTextfile(path, **options)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_without_its_extra_the_textfile_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(UsageError, match=r"pip install elastic-mbs\[prometheus\]"):
        PrometheusTextfile("run.prom")


# ---------------------------------------------------------------------- TensorBoard


def test_scalars_and_texts_are_written_at_the_training_step() -> None:
    writer = writer_of()
    sink = TensorBoard(writer)
    sink(done())
    sink(failure())
    sink(done(loss=None, seconds=None, peak_reserved=None, ooms=1, seconds_lost=0.125))
    sink(done(mode="eval", loss=None))
    sink(GROWN)
    sink.close()

    memory = {
        "allocated": 10 * MIB,
        "reserved": 12 * MIB,
        "peak": 40 * MIB,
        "free": 52 * MIB,
        "held_by_others": 36 * MIB,
    }
    figures = {
        "micro_batch_size": 16,
        "samples_per_second": 128.0,
        "out_of_memory": 0,
        "seconds_lost": 0.0,
    }
    figures |= {f"memory/{tag}": value for tag, value in memory.items()}
    unknown = {"samples_per_second", "memory/peak"}
    assert [call.args for call in writer.add_scalar.mock_calls] == [
        *((f"run/{tag}", value, 0) for tag, value in {"loss": 2.5, **figures}.items()),
        *(
            (f"run/{tag}", value, 1)
            for tag, value in {**figures, "out_of_memory": 1, "seconds_lost": 0.125}.items()
            if tag not in unknown
        ),
        *((f"run/eval/{tag}", value, 2) for tag, value in figures.items()),
    ]
    assert [call.args for call in writer.add_text.mock_calls] == [
        ("run/events", failure().line(), 1),
        ("run/events", GROWN.line(), 2),
    ]
    writer.flush.assert_called_once_with()


@pytest.mark.parametrize("writer", [None, object(), "runs/"])
def test_a_writer_without_its_methods_is_refused(writer: object) -> None:
    with pytest.raises(UsageError, match="no add_scalar, add_text and flush"):
        TensorBoard(writer)


# ---------------------------------------------------------------------- both


def test_a_sink_of_ours_never_raises_into_the_step(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(3, 1)
    with ElasticMBS(
        model,
        on_event=TensorBoard(writer_of(add_scalar=lambda tag, value, step: 1 / 0)),
        micro_batch_size=4,
        memory=MemoryOptions(monitor_interval=0),
    ) as mbs:
        for _ in range(3):
            mbs.backward(lambda x: model(x).mean(), torch.ones(4, 3))
    said = [
        record.getMessage() for record in caplog.records if "misses events" in record.getMessage()
    ]
    assert said == [
        "TensorBoard(Mock) misses events, and training goes on: ZeroDivisionError: division by zero"
    ]


@given(st.lists(ANY_EVENT, max_size=5))
def test_every_event_there_can_be_is_taken(
    tmp_path_factory: pytest.TempPathFactory, events: list[Any]
) -> None:
    prometheus, board = (
        PrometheusTextfile(tmp_path_factory.getbasetemp() / "run.prom"),
        TensorBoard(writer_of()),
    )
    for event in events:
        prometheus._take(event)
        board._take(event)
    read(prometheus.text())
