"""What is written to a run log comes back; what is not whole is passed over or named."""

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_mbs import Event, OutOfMemory, SensorBack, UsageError
from elastic_mbs.sinks.run_log import Reader, event_line, header_line, read_runs
from tests.helpers.events import ANY_EVENT, KINDS, ONE_OF_EACH, any_event, failure, log_of


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_event_comes_back_as_it_was(kind: type[Event], data: st.DataObject) -> None:
    event = data.draw(any_event(kind))
    line = event_line(event, "abc", 1.5, 1e9)
    assert line.count(b"\n") == 1
    assert json.loads(line, parse_constant=pytest.fail)["event"] == kind.__name__  # "NaN" is no JSON
    (run,) = read_runs([line])
    (entry,) = run.entries
    assert repr(entry.event) == repr(event)  # NaN equal to itself
    assert (entry.t, run.id) == (1.5, "abc")


def test_the_samples_of_these_tests_are_one_of_each_kind() -> None:
    assert {type(event) for event in ONE_OF_EACH} | {Event} == set(KINDS)
    ours = {"event", "run", "time", "t", "level"}  # of a line
    assert not [kind for kind in KINDS if ours & {item.name for item in fields(kind)}]


@given(st.lists(ANY_EVENT, max_size=12), st.data())
def test_a_log_that_ends_anywhere_gives_all_its_whole_lines(events: list[Event], data: st.DataObject) -> None:
    text = log_of([(float(i), event) for i, event in enumerate(events)])
    cut = text[: data.draw(st.integers(0, len(text)))]
    whole = cut.count(b"\n")
    reader = Reader()
    for line in cut.splitlines(keepends=True):
        reader.feed(line)
    found = [entry.event for run in reader.runs.values() for entry in run.entries]
    assert repr(found[: max(0, whole - 1)]) == repr(events[: max(0, whole - 1)])
    assert len(found) + len(reader.runs) - whole in {0, 1}  # a last line may lack nothing but its end


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


STRANGE = [b"epoch,loss", b"[1, 2]", b'{"kind":"dog"}', b"\xff\xfe\x00", b"", b'{"kind":"ru']
STRANGE += [json.dumps(json.loads(event_line(failure(), "r", 1.0, 1.0)) | changes).encode() for changes in ({"t": None}, {"time": None})]


@pytest.mark.parametrize("line", STRANGE)
def test_what_is_no_whole_line_of_a_run_log_is_passed_over_and_a_log_of_nothing_else_is_refused(line: bytes) -> None:
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
