"""Events: one line each, with its figures, to the log and to every sink."""

import logging
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields

import pytest

from elastic_mbs.events import Event, EventLog, SensorBack, WaitingForMemory, Warned, format_bytes
from tests.helpers.events import ONE_OF_EACH, done, failure

UNKNOWN: list[Event] = [
    done(seconds=None, loss=None, allocated=None),
    WaitingForMemory("run", 2.5, None, None),
]


@pytest.mark.parametrize("event", ONE_OF_EACH + UNKNOWN, ids=lambda event: type(event).__name__)
def test_an_event_is_one_line_frozen_and_of_numbers_and_strings_only(event: Event) -> None:
    assert len(event.line().splitlines()) == 1
    assert ("unknown" in event.line()) == (event in UNKNOWN)
    for field in fields(event):
        # A sink that keeps an event keeps no memory alive.
        assert isinstance(getattr(event, field.name), int | float | str | None)
    with pytest.raises(FrozenInstanceError):
        event.name = "another"  # type: ignore[misc]  # the mistake


def test_the_line_of_a_failure_says_where_and_what_happens_next() -> None:
    for part in (
        "backward",
        "16:32",
        "16 → 8",
        "its samples run again",
        "Tried to allocate 2.00 GiB",
    ):
        assert part in failure().line()
    for part in (
        "64 samples",
        "4 pieces",
        "0.5 s",
        "loss 2.5",
        "2 out-of-memory errors",
        "0.25 s lost",
        "10.0 MiB",
    ):
        assert part in done(ooms=2, seconds_lost=0.25).line()


def test_the_line_of_a_failure_at_the_floor_says_that_memory_was_released() -> None:
    line = failure(size_before=1, size_after=1).line()
    assert "micro-batch 1 as before, with memory released, its samples run again" in line
    assert "→" not in line


@pytest.mark.parametrize(("seconds", "rate"), [(1.25, 51.2), (None, None), (0.0, None)])
def test_the_rate_is_samples_per_second_where_the_time_is_known(
    seconds: float | None, rate: float | None
) -> None:
    assert done(seconds=seconds).rate == rate


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "unknown"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (int(79.16 * (1 << 30)), "79.2 GiB"),
        (1 << 60, "1048576.0 TiB"),
    ],
)
def test_bytes_are_written_as_a_person_does(count: int | None, text: str) -> None:
    assert format_bytes(count) == text


def test_an_event_goes_to_the_log_once_and_to_every_sink_in_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[tuple[str, Event]] = []
    log = EventLog(
        [lambda event: seen.append(("first", event)), lambda event: seen.append(("second", event))]
    )
    with caplog.at_level(logging.INFO, logger="elastic_mbs"):
        log.emit(failure())
        log.emit(SensorBack("other", "nvml"))
    assert [(place, event.name) for place, event in seen] == [
        ("first", "run"),
        ("second", "run"),
        ("first", "other"),
        ("second", "other"),
    ]
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"[run] {failure().line()}"),
        ("INFO", "[other] memory readings are back (from nvml)"),
    ]


def test_a_warning_is_said_once_per_log_and_topic() -> None:
    seen: list[Event] = []
    for log in (EventLog([seen.append]), EventLog([seen.append])):
        for topic in ("count", "sink", "count"):
            log.emit_warning("run", topic, "pass count=")
    assert seen == [
        Warned("run", topic, "pass count=") for topic in ("count", "sink", "count", "sink")
    ]


def test_a_warning_of_something_that_can_happen_again_is_said_each_time() -> None:
    seen: list[Event] = []
    log = EventLog([seen.append])
    for once in (False, False, True):
        log.emit_warning("run", "step", "load a checkpoint", once=once)
    assert seen == [Warned("run", "step", "load a checkpoint")] * 2


def test_a_warning_is_seen_where_the_user_has_set_up_no_logging() -> None:
    script = (
        "from elastic_mbs.events import EventLog; "
        "EventLog([]).emit_warning('run', 'count', 'labels of -100 and no count=')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "labels of -100 and no count=" in done.stderr
