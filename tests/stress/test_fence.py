"""The preloaded library and the file that its processes share.

Counts, refusals, deaths, a co-tenant. The scripts in its processes load no torch.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_mbs import UsageError
from stress.limits import Fence
from stress.limits import fence as fences
from stress.limits.neighbour import GRAIN, Neighbour
from tests.helpers.fenced import LONG, run, script, start, wait_for_end

pytestmark = pytest.mark.skipif(fences.trouble() is not None, reason=str(fences.trouble()))

MEBI = 1 << 20


@pytest.fixture
def fence() -> Iterator[Fence]:
    with Fence.create() as made:
        yield made


COUNTS = {
    "blocks count by the bytes asked for until they are freed": """
        sizes = [8192, 8193, 100_000, 1 << 20, 40 << 20]
        blocks = [take(size) for size in sizes]
        assert own() == {"live": sum(sizes), "peak": sum(sizes), "failures": 0}
        for block in blocks[:4]:
            libc.free(block)
        assert own()["live"] == 40 << 20 and own()["peak"] == sum(sizes)
        libc.free(blocks[4])
        assert own() == {"live": 0, "peak": sum(sizes), "failures": 0}
    """,
    "what the machine itself refuses does not stay counted": """
        assert take(1 << 60) is None
        assert own()["live"] == 0 and own()["failures"] == 1
    """,
    "threads do not lose counts": """
        def work():
            for _ in range(2000):
                blocks = [take(8192 * (1 + number)) for number in range(4)]
                for block in blocks:
                    libc.free(block)
        sys.setswitchinterval(1e-5)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert own()["live"] == own()["failures"] == 0
    """,
    "a forked child begins with nothing and leaves its parent's bytes alone": """
        inherited = take(1 << 20)
        if (child := os.fork()) == 0:
            libc.free(inherited)  # its copy
            assert own()["live"] == 0
            kept = take(2 << 20)
            good = own()["live"] == 2 << 20
            os._exit(0 if good else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert own()["live"] == 1 << 20
        libc.free(inherited)
        assert own()["live"] == 0
    """,
    "slots are used again": """
        for _ in range(75):  # more children than there are slots, one after the other
            if (child := os.fork()) == 0:
                os._exit(0 if take(8192) and own()["live"] == 8192 else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """,
}


@pytest.mark.parametrize("name", list(COUNTS))
def test_bytes_are_counted_exactly(name: str, fence: Fence) -> None:
    run(fence, COUNTS[name])


def test_only_large_aligned_blocks_count(fence: Fence) -> None:
    fence.budget = 0
    run(
        fence,
        """
        assert take(8191) and take(1 << 20, 32) and libc.malloc(1 << 20), "too small to fail"
        assert own()["live"] == 0
        assert take(8192) is None
        assert libc.posix_memalign(ctypes.byref(ctypes.c_void_p()), 48, 1 << 20) == 22, "EINVAL"
        libc.free(None)
        assert own() == {"live": 0, "peak": 0, "failures": 1}
        """,
    )


def test_the_budget_is_kept_to_the_byte_and_can_be_moved(fence: Fence) -> None:
    fence.leave(MEBI, held=400)  # which counts in it
    process = start(
        fence,
        """
        held = take(600 << 10)
        assert take((424 << 10) + 1) is None
        exactly = take(424 << 10)
        assert held and exactly
        ready()
        assert take(8192) is None, "the limit lies below what is held"
        libc.free(exactly)
        assert take(8192), "and now it does not"
        """,
    )
    assert fence.live() == MEBI == fence.of(process.pid).peak
    assert [slot.pid for slot in fence.slots()] == [process.pid]
    fence.budget = 608 << 10
    fence._words[19] = 0  # the first slot's peak
    fence.reset_peak(process.pid)
    assert fence.of(process.pid).peak == MEBI, "a new interval begins with what is live"
    with process:
        process.communicate("go on\n")
    assert process.returncode == 0
    assert fence.of(process.pid).failures == 2, (
        "of the dead, too, as long as their slot is not taken"
    )
    fence.leave(None)
    fence.largest = 512 << 10  # memory is free, in small blocks
    run(
        fence,
        "assert take((512 << 10) + 1) is None\nassert all(take(512 << 10) for _ in range(20))",
    )


@pytest.mark.parametrize("reaped", [True, False], ids=["waited for", "a zombie"])
def test_the_bytes_of_a_killed_process_come_back(fence: Fence, reaped: bool) -> None:
    fence.budget = 10 * MEBI
    process = start(fence, "kept = take(9 << 20)\nready()")
    assert fence.live() == 9 * MEBI
    process.kill()
    if reaped:
        process.wait()
    wait_for_end(process.pid)
    assert fence.live() == 0
    assert fence.slots() == []
    run(fence, "assert take(10 << 20)")
    process.communicate()


def test_a_process_killed_at_any_instruction_leaves_a_device_that_works(fence: Fence) -> None:
    # Most of their time is spent with the lock held, or between the reservation and the block.
    fence.budget = 64 * MEBI
    for _ in range(12):
        pair = [
            start(fence, 'print("ready", flush=True)\nwhile True:\n    libc.free(take(8192))')
            for _ in range(2)
        ]
        time.sleep(0.004)
        for process in pair:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        run(fence, "assert take(64 << 20)")
    assert fence.live() == 0


def test_without_a_file_the_library_does_nothing(tmp_path: Path) -> None:
    for content in (None, b"", b"x" * 10):
        path = tmp_path / "fence"
        if content is not None:
            path.write_bytes(content)
            with pytest.raises(UsageError, match="is no fence file"):
                Fence(path)
        environment = os.environ | {"LD_PRELOAD": str(fences.library()), fences.VARIABLE: str(path)}
        subprocess.run(script("assert take(1 << 20)"), env=environment, check=True, timeout=LONG)


@pytest.mark.parametrize(("system", "libc"), [("darwin", ""), ("linux", "musl")])
def test_a_machine_without_the_library_says_why(
    system: str, libc: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'the floor is wet' >&2\nexit 1\n")
    broken.chmod(0o755)
    for compiler, said in (
        ("no-such-compiler -m64", "no 'no-such-compiler': install one"),
        (str(broken), r"broken .*: the floor is wet"),
    ):
        monkeypatch.setenv("CC", compiler)
        with pytest.raises(UsageError, match=said):
            fences.library.__wrapped__()
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr("platform.libc_ver", lambda: (libc, ""))
    assert f"this is {system} {libc}".rstrip() in str(fences.trouble())


def test_without_its_source_the_shim_names_the_way_to_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fences, "SOURCE", tmp_path / "fence.c")
    with pytest.raises(UsageError, match="pip download --no-deps --no-binary elastic-mbs"):
        fences.library.__wrapped__()


def test_a_neighbour_takes_what_is_free_and_the_rest_when_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Fence.create(5 * GRAIN) as fence:
        for name, value in fences.environment(fence).items():
            monkeypatch.setenv(name, value)
        with Neighbour("cpu") as neighbour:
            assert neighbour.hold(2 * GRAIN) == 2 * GRAIN == fence.live()
            assert neighbour.hold(15 * GRAIN) == fence.live() == 5 * GRAIN, "to the last block"
            fence.budget = 10 * GRAIN
            while fence.live() < 10 * GRAIN:
                time.sleep(0.002)
            assert neighbour.hold(GRAIN) == GRAIN == fence.live()
            assert neighbour.hold(0) == 0 == fence.live()
            os.kill(neighbour.pid, signal.SIGKILL)
            with pytest.raises(RuntimeError, match=r"has ended \(exit code -9\)"):
                neighbour.hold(GRAIN)


def test_a_neighbour_ends_with_its_parent() -> None:
    code = (
        "from stress.limits.neighbour import Neighbour\nprint(Neighbour('cpu').__enter__().pid, "
        "flush=True)\nimport time; time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(fences.__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    wait_for_end(pid)
