"""One line per event, with its figures."""

import logging
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from elastic_mbs import events
from elastic_mbs.events import (
    CallDone,
    CallFailed,
    Event,
    EventLog,
    OptimizerOutOfMemory,
    OutOfMemory,
    Resized,
    SensorBack,
    SensorLost,
    WaitingForMemory,
    Warned,
    format_bytes,
)
from tests.helpers.events import KINDS

OOM = OutOfMemory("run", "backward", 16, 48, "piece", 32, 15, 7, "allocator", "CUDA out of memory. Tried to allocate 2.00 GiB.")
DONE = CallDone(
    *("run", "loss_fn/train/7", "train", 64, 3, 32, 24, 2, 16, 1.25, 0.25, 0.5),
    *(3 << 20, 4 << 20, 5 << 20, 6 << 20, 7 << 20, None, 16 << 20, 1234.5),
)
# each event, with what its line has to tell
EVENTS: list[tuple[Event, list[str]]] = [
    (OOM, ["backward", "16:48", "32 → 15", "mode piece", "7 leaves", "Tried to allocate 2.00 GiB"]),
    (DONE, ["64 samples", "3 pieces", "up to 24", "1.25 s", "loss 0.5", "2 out-of-memory errors", "0.25 s lost", "3.0 MiB", "loss_fn/train/7"]),
    (replace(DONE, seconds=None, loss=None), ["an unknown time"]),
    (OptimizerOutOfMemory("run", "AdamW", "one by one", "allocator", "no room"), ["AdamW.step()", "taken back", "one by one", "no room"]),
    (WaitingForMemory("run", seconds=2.5, free=3 << 30, held_by_others=None), ["2.5 s", "3.0 GiB", "unknown"]),
    (Resized("run", before=8, after=16, reason="grow", key="loss_fn/train/7"), ["8 → 16", "grow", "loss_fn/train/7"]),
    (SensorLost("run", reason="NVML: driver not loaded"), ["NVML: driver not loaded", "stop growing"]),
    (SensorBack("run", source="nvml"), ["nvml"]),
    (Warned("run", topic="count", message="labels hold -100: pass count="), ["labels hold -100: pass count="]),
    (CallFailed("run", "loss (train)", "ValueError", "no", 2, 1.5, 1.0), ["ended by ValueError after 1.5 s and 2 out-of-memory errors", "no"]),
]


@pytest.mark.parametrize(("event", "told"), EVENTS, ids=lambda value: type(value).__name__)
def test_an_event_is_one_line_with_its_figures_frozen_and_of_numbers_and_strings_only(event: Event, told: list[str]) -> None:
    line = event.line()
    assert len(line.splitlines()) == 1
    for part in told:
        assert part in line
    for field in fields(event):
        assert isinstance(getattr(event, field.name), int | float | str | None)  # a sink that keeps it keeps no memory alive
    with pytest.raises(FrozenInstanceError):
        event.name = "another"  # type: ignore[misc]  # the mistake


def test_every_kind_of_event_is_looked_at_here() -> None:
    assert set(KINDS) - {Event} == {type(event) for event, _ in EVENTS}


@pytest.mark.parametrize(("seconds", "rate"), [(1.25, 51.2), (None, None), (0.0, None)])
def test_the_rate_is_samples_per_second_where_the_time_is_known(seconds: float | None, rate: float | None) -> None:
    assert replace(DONE, seconds=seconds).rate == rate


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "unknown"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (int(79.16 * (1 << 30)), "79.2 GiB"), (1 << 60, "1048576.0 TiB")],
)
def test_bytes_are_written_as_a_person_does(count: int | None, text: str) -> None:
    assert format_bytes(count) == text


def test_an_event_goes_to_the_log_once_and_to_every_sink_in_order(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[str, Event]] = []
    log = EventLog([lambda event: seen.append(("first", event)), lambda event: seen.append(("second", event))])
    with caplog.at_level(logging.INFO, logger="elastic_mbs"):
        log.emit(OOM)
        log.emit(SensorBack("other", "nvml"))
    assert [(place, event.name) for place, event in seen] == [("first", "run"), ("second", "run"), ("first", "other"), ("second", "other")]
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"[run] {OOM.line()}"),
        ("INFO", "[other] memory readings are back (from nvml)"),
    ]


def test_an_error_in_a_sink_passes_through() -> None:
    def broken(event: Event) -> None:
        raise ZeroDivisionError(event.name)

    with pytest.raises(ZeroDivisionError, match="run"):
        EventLog([broken]).emit(OOM)


def test_a_warning_is_said_once_per_log_and_topic() -> None:
    seen: list[Event] = []
    log = EventLog([seen.append])
    for _ in range(3):
        log.warn_once("run", "count", "pass count=")
        log.warn_once("run", "sink", "outputs grow")
    EventLog([seen.append]).warn_once("run", "count", "pass count=")
    assert seen == [Warned("run", "count", "pass count="), Warned("run", "sink", "outputs grow"), Warned("run", "count", "pass count=")]


def test_the_package_is_silent_where_the_user_has_set_up_no_logging() -> None:
    assert any(isinstance(handler, logging.NullHandler) for handler in events.logger.handlers)
    assert events.logger.name == "elastic_mbs"
