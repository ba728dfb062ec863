"""Jobs in processes of their own: what they say arrives, and how they end is told apart."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_mbs import UsageError
from stress.limits import Child, Crashed, Failed, Fence, Hung, job, run_child, run_children
from stress.limits import child as child_module
from stress.limits import fence as fences
from stress.limits.child import name_of
from stress.scenarios.order import Order
from tests.helpers import jobs

LONG = 60.0
needs_signals = pytest.mark.skipif(sys.platform == "win32", reason="no signals there")
needs_shim = pytest.mark.skipif(fences.trouble() is not None, reason="no shim here")


def test_what_a_job_emits_arrives_in_order_whatever_it_prints() -> None:
    words = ["one", "two ä", "three\nlines"]
    assert [message["word"] for message in run_child("budget", jobs.say, {"words": words}, deadline=LONG)] == words


def test_a_job_decides_what_is_imported() -> None:
    (message,) = run_child("budget", jobs.say, {"words": ["x"]}, deadline=LONG)
    assert message["modules"] is False


@pytest.mark.parametrize("which", ["tests.helpers.jobs:Jobs.nested", jobs.Jobs.nested], ids=["by name", "by function"])
def test_a_job_is_found_by_its_name_or_given_as_a_function(which: Any) -> None:
    assert list(run_child("budget", which, deadline=LONG)) == [{"nested": True}]


def test_a_name_that_begins_with_a_dot_belongs_to_the_tool_whatever_it_is_called_here() -> None:
    assert name_of(".soak:main") == "stress.soak:main"


@pytest.mark.parametrize("which", [lambda emit: None, "no_colon", ":main", "module:"], ids=["lambda", "no colon", "no module", "no function"])
def test_what_cannot_be_found_in_another_process_is_refused(which: Any) -> None:
    with pytest.raises(UsageError, match="module"):
        Child("budget", which, deadline=LONG)


def test_a_job_that_is_not_there_is_told() -> None:
    with pytest.raises(Failed, match="no attribute 'nothing'"):
        list(run_child("budget", "tests.helpers.jobs:nothing", deadline=LONG))


@needs_signals
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGTERM"])
def test_a_crash_is_told_by_its_signal_and_what_came_before_is_not_lost(name: str) -> None:
    child = run_child("budget", jobs.end_by_signal, {"name": name}, deadline=LONG)
    assert next(child) == {"about": "to go"}
    with pytest.raises(Crashed, match=f"ended by {name}; its last line: on the edge") as error:
        next(child)
    assert error.value.signal == name
    assert ("Segmentation fault" in error.value.last_words) == (name == "SIGSEGV"), "where it was, if Python could tell"


@pytest.mark.skipif(sys.platform != "linux", reason="looks for the pipe in /proc")
def test_half_a_line_at_the_end_is_no_message() -> None:
    child = run_child("budget", jobs.die_in_the_middle_of_a_line, deadline=LONG)
    assert next(child) == {"whole": 1}
    with pytest.raises(Crashed, match="SIGKILL"):
        next(child)


def test_an_exit_code_is_no_crash() -> None:
    with pytest.raises(Failed, match="exit code 7; its last line: my last words") as error:
        list(run_child("budget", jobs.exit_with, {"code": 7}, deadline=LONG))
    assert (error.value.exit_code, error.value.error) == (7, None)


def test_an_exception_is_told_with_its_traceback() -> None:
    with pytest.raises(Failed, match="ended by KeyError: 'a mistake'") as error:
        list(run_child("budget", jobs.fail, deadline=LONG))
    assert error.value.error == "KeyError"
    assert "in fail" in error.value.last_words


def test_bad_input_is_bad_input_here_as_well() -> None:
    with pytest.raises(UsageError, match=r"^this batch will not do$"):
        list(run_child("budget", jobs.refuse, deadline=LONG))


def test_a_hang_ends_at_the_deadline_and_shows_where() -> None:
    began = time.monotonic()
    child = Child("budget", jobs.wait_here_for_ever, deadline=1.0)
    with child, pytest.raises(Hung, match="wait_here_for_ever had not ended after 1 s") as error:
        assert list(child) == [{"still": "here"}]
    assert time.monotonic() - began < 30
    if sys.platform != "win32":
        assert "in wait_here_for_ever" in error.value.last_words


def test_one_that_never_stops_talking_is_taken_for_hung_all_the_same() -> None:
    with pytest.raises(Hung, match="count_slowly"):
        list(run_child("budget", jobs.count_slowly, {"until": 10**9, "pause": 0.0005}, deadline=0.5))


def test_one_that_has_ended_may_be_listened_to_after_its_deadline() -> None:
    with Child("budget", jobs.count_slowly, {"until": 50, "pause": 0.0}, deadline=LONG) as child:
        messages = iter(child)
        numbers = [next(messages)["number"]]
        assert child._process is not None
        child._process.wait()
        child._deadline = 0.0
        assert numbers + [message["number"] for message in messages] == list(range(50))


def test_whoever_stops_listening_leaves_no_process() -> None:
    child = run_child("budget", jobs.count_slowly, {"until": 10**6, "pause": 0.001}, deadline=LONG)
    pid = next(child)["pid"]
    child.close()  # type: ignore[attr-defined]  # a generator
    assert fences.start_time(pid) == -1


def test_children_run_at_the_same_time_and_are_told_apart() -> None:
    children = [Child("budget", jobs.count_slowly, {"until": 5, "pause": 0.05}, deadline=LONG) for _ in range(2)]
    seen: dict[int, list[int]] = {0: [], 1: []}
    for index, message in run_children(children):
        seen[index].append(message["number"])
    assert seen == {0: list(range(5)), 1: list(range(5))}


def test_one_of_several_that_fails_ends_the_others() -> None:
    slow = Child("budget", jobs.count_slowly, {"until": 10**6, "pause": 0.01}, deadline=LONG)
    with pytest.raises(Failed, match="KeyError"):
        list(run_children([slow, Child("budget", jobs.fail, deadline=LONG)]))
    assert fences.start_time(slow.pid) == -1


def test_a_child_can_be_killed_from_outside() -> None:
    with Child("budget", jobs.count_slowly, {"until": 10**6, "pause": 0.01}, deadline=LONG) as child:
        messages = iter(child)
        assert next(messages)["pid"] == child.pid
        child.kill()
        with pytest.raises(Crashed if sys.platform != "win32" else Failed):
            list(messages)


def test_each_kind_gets_its_environment_and_nothing_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fences.VARIABLE, "somebody else's")
    names = [fences.VARIABLE, "LD_PRELOAD", "OMP_NUM_THREADS", "MKL_DISABLE_FAST_MM", "MINE"]
    (found,) = run_child("budget", jobs.tell_environment, {"names": names}, deadline=LONG, environment={"MINE": "1"})
    ours = {"OMP_NUM_THREADS": "1", "MKL_DISABLE_FAST_MM": "1", "MINE": "1"}
    assert found == {fences.VARIABLE: None, "LD_PRELOAD": os.environ.get("LD_PRELOAD"), **ours}


@needs_shim
def test_a_child_of_the_shim_has_a_device_of_its_own_or_shares_one() -> None:
    names = [fences.VARIABLE, "LD_PRELOAD"]
    (own,) = run_child("shim", jobs.tell_environment, {"names": names}, deadline=LONG)
    assert own["LD_PRELOAD"] == str(fences.library())
    assert not os.path.exists(own[fences.VARIABLE]), "gone with the child"
    with Fence.create() as fence:
        (shared,) = run_child("shim", jobs.tell_environment, {"names": names}, deadline=LONG, fence=fence)
        assert shared[fences.VARIABLE] == str(fence.path)
        assert fence.path.exists()
    assert not fence.path.exists()


def test_one_that_has_closed_its_output_and_stays_is_taken_for_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "_GRACE", 0.2)
    with pytest.raises(Hung, match="close_output_and_stay"):
        list(run_child("budget", jobs.close_output_and_stay, deadline=0.4))


def test_no_thread_stays() -> None:
    before = threading.active_count()
    list(run_child("budget", jobs.say, {"words": ["x"]}, deadline=LONG))
    for _ in range(100):
        if threading.active_count() <= before:
            break
        time.sleep(0.01)
    assert threading.active_count() <= before


# ---------------------------------------------------------------------- the child's side, in this process


@pytest.fixture
def as_child(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, dict[str, Any]], tuple[int, list[dict[str, Any]]]]:
    """Runs an order as `job.py` does; returns the exit code and what it wrote."""

    def order(name: str, arguments: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
        out = io.StringIO()
        monkeypatch.setattr(job, "_import_from", lambda name, folder: None)  # it is imported here
        monkeypatch.setattr(job, "_take_output", lambda: out)
        monkeypatch.setattr(job, "_leave_no_core", lambda: None)
        monkeypatch.setattr(
            sys, "stdin", io.StringIO(json.dumps({"job": f"tests.helpers.jobs:{name}", "package": ["tests", "."], "arguments": arguments}))
        )
        code = job.main()
        return code, [json.loads(line) for line in out.getvalue().splitlines()]

    return order


def test_each_message_is_a_line(as_child: Any, capfd: pytest.CaptureFixture[str]) -> None:
    code, lines = as_child("say", {"words": ["a", "b"]})
    assert (code, [line["message"]["word"] for line in lines]) == (0, ["a", "b"])
    assert capfd.readouterr().out.count("noise") == 4


@pytest.mark.parametrize(("name", "error", "bad_input"), [("fail", "KeyError", False), ("refuse", "BatchError", True)])
def test_an_error_is_the_last_line(name: str, error: str, bad_input: bool, as_child: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = as_child(name, {})
    assert code == 1
    assert (lines[-1]["error"]["type"], lines[-1]["error"]["bad_input"]) == (error, bad_input)
    assert "Traceback" in capsys.readouterr().err


def test_standard_output_is_the_jobs_no_more(capfd: pytest.CaptureFixture[str]) -> None:
    kept = os.dup(1)
    try:
        with job._take_output() as ours:
            os.write(1, b"printed")
            ours.write("said")
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    assert capfd.readouterr() == ("said", "printed")


def test_a_crash_leaves_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_CORE)
    try:
        job._leave_no_core()
        assert resource.getrlimit(resource.RLIMIT_CORE) == (0, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)
    monkeypatch.setitem(sys.modules, "resource", None)
    job._leave_no_core()  # Windows has none


def test_another_package_of_the_tools_name_that_comes_first_on_the_path_is_not_imported(tmp_path: Path) -> None:
    """A user's own folder `stress` lay beside the model, and every process of a scenario imported that one."""
    (tmp_path / "stress").mkdir()
    (tmp_path / "stress" / "__init__.py").write_text("raise AssertionError('this is another distribution')\n")
    (tmp_path / "model.py").write_text(
        "import torch\ndef make():\n    model = torch.nn.Linear(2, 2)\n    return model, lambda x: model(x).square().mean(), [torch.ones(4, 2)]\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    order = Order("steady", "budget", f"{tmp_path / 'model.py'}:make", 0, 6)
    (message,) = run_child("budget", ".scenarios.job:measure", order.to_json(), deadline=60.0, environment={"PYTHONPATH": path})
    assert message["needs"]["samples"] == 4
