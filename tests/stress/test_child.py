"""Jobs in processes of their own: messages arrive, and each way of ending has its own error."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_mbs import UsageError
from stress.limits import Child, ChildError, run_child, run_children
from stress.limits import child as child_module
from stress.limits import fence as fences
from tests.helpers import jobs

LONG = 600.0
needs_signals = pytest.mark.skipif(sys.platform == "win32", reason="no signals there")
needs_shim = pytest.mark.skipif(fences.trouble() is not None, reason="no shim here")


@pytest.mark.usefixtures("forked")
def test_messages_arrive_in_order_and_a_job_can_wait_for_an_answer() -> None:
    words = ["one", "two ä", "three\nlines"]
    assert [
        message["word"]
        for message in run_child("budget", jobs.say, {"words": words}, deadline=LONG)
    ] == words
    with Child("budget", jobs.answer, deadline=LONG) as child:
        child.send(21)
        assert list(child) == [42]


@pytest.mark.usefixtures("forked")
@needs_signals
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_a_crash_is_named_by_its_signal_and_what_came_before_is_not_lost(name: str) -> None:
    child = run_child("budget", jobs.end_by_signal, {"name": name}, deadline=LONG)
    assert next(child) == "about to go"
    with pytest.raises(ChildError, match=f"ended by {name}; its last line: on the edge") as error:
        next(child)
    assert error.value.how == f"crash by {name}"
    assert ("Segmentation fault" in error.value.last_words) == (name == "SIGSEGV"), (
        "where it was, if Python could tell"
    )


@pytest.mark.usefixtures("forked")
@needs_signals
def test_half_a_message_at_the_end_is_none() -> None:
    child = run_child("budget", jobs.die_in_the_middle_of_a_message, deadline=LONG)
    assert next(child) == "whole"
    with pytest.raises(ChildError, match="SIGKILL"):
        next(child)


@pytest.mark.usefixtures("forked")
def test_bad_input_in_the_child_is_bad_input_in_the_parent() -> None:
    with pytest.raises(ChildError, match="exit code 7; its last line: my last words") as error:
        list(run_child("budget", jobs.exit_with, {"code": 7}, deadline=LONG))
    assert error.value.how == "unexpected exit"
    with pytest.raises(UsageError, match=r"^this batch will not do$"):
        list(run_child("budget", jobs.refuse, deadline=LONG))


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("job", [jobs.wait_here_for_ever, jobs.close_the_line_and_stay])
def test_a_hang_ends_at_the_deadline_with_the_stacks(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "_GRACE", 0.5)
    with Child("budget", job, deadline=LONG) as child:
        if job is jobs.wait_here_for_ever:
            assert next(iter(child)) == "still here"
        else:
            child.connection.poll(LONG)  # it is at an end, which can be read
        child._deadline = 0.2
        with pytest.raises(ChildError, match=f"{job.__name__} had not ended after 0 s") as error:
            list(child)
    if sys.platform != "win32":
        assert f"in {job.__name__}" in error.value.last_words


@pytest.mark.usefixtures("forked")
def test_a_child_that_never_stops_is_hung_and_messages_outlive_a_child() -> None:
    with Child("budget", jobs.count, {"until": 10**9, "pause": 0.0005}, deadline=LONG) as child:
        assert next(iter(child)) == 0
        child._deadline = 0.1
        with pytest.raises(ChildError, match="count"):
            list(child)
    with Child("budget", jobs.count, {"until": 50, "pause": 0.0}, deadline=LONG) as child:
        child._process.join()
        child._deadline = 0.0
        assert list(child) == list(range(50))


@pytest.mark.usefixtures("forked")
def test_children_run_at_the_same_time_and_one_that_fails_ends_the_others() -> None:
    seen = list(
        run_children(
            [
                Child("budget", jobs.count, {"until": 5, "pause": 0.05}, deadline=LONG)
                for _ in range(2)
            ]
        )
    )
    assert [[number for index, number in seen if index == which] for which in (0, 1)] == [
        list(range(5))
    ] * 2
    slow = Child("budget", jobs.count, {"until": 10**6, "pause": 0.01}, deadline=LONG)
    with pytest.raises(ChildError, match="ended by KeyError: 'a mistake'") as error:
        list(run_children([slow, Child("budget", jobs.fail, deadline=LONG)]))
    assert error.value.how == "KeyError"
    assert "in fail" in error.value.last_words
    assert fences.start_time(slow.pid) == -1


@pytest.mark.parametrize("kind", ["budget", pytest.param("shim", marks=needs_shim)])
def test_each_kind_gets_its_environment_and_none_of_another(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(fences.VARIABLE, "somebody else's")
    before = dict(os.environ)
    names = [fences.VARIABLE, "LD_PRELOAD", "OMP_NUM_THREADS", "MKL_DISABLE_FAST_MM"]
    (found,) = run_child(kind, jobs.environment, {"names": names}, deadline=LONG)
    assert dict(os.environ) == before, "ours is as it was"
    file, preloaded, *libraries = (found[name] for name in names)
    assert libraries == ["1", "1"]
    assert preloaded == (str(fences.library()) if kind == "shim" else before.get("LD_PRELOAD"))
    assert file is None if kind == "budget" else file != before[fences.VARIABLE]
    assert file is None or not os.path.exists(file), "gone with the child"


def test_another_package_of_the_tools_name_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a user's own folder `stress` lay next to the model, and every process of a scenario imported
    # that one
    (tmp_path / "stress").mkdir()
    (tmp_path / "stress" / "__init__.py").write_text(
        "raise AssertionError('this is another distribution')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = list(sys.path)
    assert len(list(run_child("budget", jobs.say, {"words": ["x"]}, deadline=LONG))) == 1
    assert sys.path == path
