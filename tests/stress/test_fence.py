"""The preloaded library and the file that its processes share: counts, refusals, deaths. Processes here load no torch; they are small and many."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_mbs import UsageError
from stress.limits import Fence
from stress.limits import fence as fences
from stress.limits.neighbour import Heap, Neighbour

pytestmark = pytest.mark.skipif(fences.trouble() is not None, reason=str(fences.trouble()))

KIBI, MEBI = 1 << 10, 1 << 20

PREPARE = """
import ctypes, os, signal, struct, sys, threading, time, random
libc = ctypes.CDLL(None)
libc.posix_memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]
libc.realloc.argtypes, libc.realloc.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_void_p
libc.free.argtypes = libc.malloc_usable_size.argtypes = [ctypes.c_void_p]
libc.malloc.restype = ctypes.c_void_p
def take(size, alignment=64):
    block = ctypes.c_void_p()
    return None if libc.posix_memalign(ctypes.byref(block), alignment, size) else block
def own():
    with open(os.environ["ELASTIC_MBS_FENCE"], "rb") as file:
        words = struct.unpack("512q", file.read())
    for place in range(16, 512, 8):
        if words[place] == os.getpid():
            return dict(zip(("live", "peak", "failures", "blocks"), words[place + 2:]))
    return dict.fromkeys(("live", "peak", "failures", "blocks"), 0)
"""


@pytest.fixture
def fence() -> Iterator[Fence]:
    with Fence.create() as made:
        yield made


def script(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", PREPARE + textwrap.dedent(code)]


def run(fence: Fence, code: str) -> str:
    """Runs a script under the fence; a failed assertion in it fails the test."""
    environment = os.environ | fences.environment(fence)
    done = subprocess.run(script(code), env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def start(fence: Fence, code: str) -> subprocess.Popen[str]:
    """Starts one and waits for its first line."""
    environment = os.environ | fences.environment(fence)
    process = subprocess.Popen(script(code), env=environment, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


# ---------------------------------------------------------------------- counts


def test_blocks_count_by_the_bytes_asked_for_until_they_are_freed(fence: Fence) -> None:
    run(
        fence,
        """
        sizes = [8192, 8193, 100_000, 1 << 20, 40 << 20]
        blocks = [take(size) for size in sizes]
        assert own() == {"live": sum(sizes), "peak": sum(sizes), "failures": 0, "blocks": 5}, own()
        for block in blocks[:4]:
            libc.free(block)
        assert own()["live"] == 40 << 20 and own()["peak"] == sum(sizes)
        libc.fence_reset_peak()
        assert own()["peak"] == 40 << 20
        libc.free(blocks[4])
        assert own() == {"live": 0, "peak": 40 << 20, "failures": 0, "blocks": 0}
        """,
    )


def test_only_large_aligned_blocks_count(fence: Fence) -> None:
    fence.budget = 0
    run(
        fence,
        """
        assert take(8191) and take(1 << 20, 32) and libc.malloc(1 << 20), "nothing that counts, so nothing that fails"
        assert own()["live"] == 0
        assert take(8192) is None
        assert libc.posix_memalign(ctypes.byref(ctypes.c_void_p()), 48, 1 << 20) == 22, "EINVAL, as ever"
        libc.free(None)
        assert own() == {"live": 0, "peak": 0, "failures": 1, "blocks": 0}
        """,
    )
    assert fence.failures == 1


def test_the_minimum_is_a_setting() -> None:
    with Fence.create(minimum=1 << 20) as fence:
        assert fence.minimum == 1 << 20
        run(fence, "take((1 << 20) - 1), take(1 << 20)\nassert own()['live'] == 1 << 20")


def test_what_is_reallocated_is_no_tensor_any_more(fence: Fence) -> None:
    run(
        fence,
        """
        assert libc.realloc(take(1 << 20), 2 << 20)
        assert own()["live"] == 0
        block = take(1 << 20)
        assert not libc.realloc(block, 1 << 62), "more than there are addresses"
        assert own()["live"] == 1 << 20, "so the old one is still there"
        libc.free(block)
        assert own()["live"] == own()["blocks"] == 0
        """,
    )


def test_what_the_machine_itself_refuses_does_not_stay_counted(fence: Fence) -> None:
    run(fence, "assert take(1 << 60) is None\nassert own()['live'] == own()['blocks'] == 0 and own()['failures'] == 1")


def test_a_random_history_of_thousands_of_blocks_is_counted_exactly(fence: Fence) -> None:
    # the table's probe chains cross and are mended many times
    run(
        fence,
        """
        choose, held = random.Random(1), {}
        for turn in range(6000):
            if held and choose.random() < 0.48:
                address = choose.choice(list(held)) if turn % 50 == 0 else next(iter(held))
                libc.free(address)
                del held[address]
            else:
                size = choose.randrange(8192, 40_000)
                held[take(size, choose.choice([64, 128, 4096])).value] = size
            if turn % 500 == 0:
                assert own()["live"] == sum(held.values()) and own()["blocks"] == len(held)
        for address in held:
            libc.free(address)
        assert own()["live"] == own()["blocks"] == 0
        """,
    )


def test_threads_do_not_lose_counts(fence: Fence) -> None:
    run(
        fence,
        """
        def work():
            for _ in range(2000):
                blocks = [take(8192 * (1 + number)) for number in range(4)]
                for block in blocks:
                    libc.free(block)
        sys.setswitchinterval(1e-5)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert own()["live"] == own()["blocks"] == own()["failures"] == 0
        """,
    )


# ---------------------------------------------------------------------- refusals


def test_the_budget_is_kept_to_the_byte_and_may_be_moved(fence: Fence) -> None:
    fence.budget = MEBI
    process = start(
        fence,
        """
        held = take(600 << 10)
        assert take((424 << 10) + 1) is None
        exactly = take(424 << 10)
        assert held and exactly
        print("ready", flush=True)
        sys.stdin.readline()
        assert take(8192) is None, "the limit lies below what is held"
        libc.free(exactly)
        assert take(8192), "and now it does not"
        """,
    )
    assert fence.live() == MEBI
    assert [slot.pid for slot in fence.slots()] == [process.pid]
    fence.budget = 608 * KIBI
    with process:
        process.communicate("go on\n")
    assert process.returncode == 0
    assert fence.failures == 2
    assert fence.of(process.pid).failures == 2, "of the dead, too, as long as nobody has taken their slot"


def test_fragmentation_refuses_large_blocks_while_memory_is_free(fence: Fence) -> None:
    fence.largest = 512 * KIBI
    run(fence, "assert take((512 << 10) + 1) is None\nassert all(take(512 << 10) for _ in range(20))")


def test_two_processes_share_one_budget(fence: Fence) -> None:
    fence.budget = 10 * MEBI
    other = start(fence, "kept = take(7 << 20)\nprint('ready', flush=True)\nsys.stdin.readline()")
    with other:
        run(fence, "assert take((3 << 20) + 1) is None and take(3 << 20)")
        assert fence.live() == 7 * MEBI, "the first of the two has ended, and took its bytes along"
        other.communicate("end\n")
    run(fence, "assert take(10 << 20)")


def test_two_processes_at_the_limit_never_pass_it(fence: Fence) -> None:
    fence.budget = 4 * MEBI
    code = """
    print("ready", flush=True)
    sys.stdin.readline()
    choose, held = random.Random(os.getpid()), []
    for _ in range(5000):
        if held and choose.random() < 0.5:
            libc.free(held.pop())
        elif (block := take(choose.randrange(8192, 1 << 20))) is not None:
            held.append(block)
    """
    pair = [start(fence, code) for _ in range(2)]
    highest = 0
    for process in pair:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    while any(process.poll() is None for process in pair):
        # Each process's figure is read at a moment of its own. Where a second look finds both as they were, they stood so together.
        figures = [slot.live for slot in fence.slots()]
        if figures == [slot.live for slot in fence.slots()]:
            highest = max(highest, sum(figures))
    for process in pair:
        process.communicate()
        assert process.returncode == 0
    assert MEBI < highest <= 4 * MEBI
    assert fence.failures > 100


# ---------------------------------------------------------------------- forks and deaths


def test_a_forked_child_begins_with_nothing_and_leaves_its_parents_bytes_alone(fence: Fence) -> None:
    run(
        fence,
        """
        inherited = take(1 << 20)
        if (child := os.fork()) == 0:
            libc.free(inherited)  # its copy
            assert own()["live"] == 0
            kept = take(2 << 20)
            good = own()["live"] == 2 << 20 and own()["blocks"] == 1
            libc.fence_reset_peak()
            os._exit(0 if good else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert own()["live"] == 1 << 20
        libc.free(inherited)
        assert own()["live"] == 0
        """,
    )


@pytest.mark.parametrize("reaped", [True, False], ids=["waited for", "a zombie"])
def test_the_bytes_of_a_killed_process_come_back(fence: Fence, reaped: bool) -> None:
    fence.budget = 10 * MEBI
    process = start(fence, "kept = take(9 << 20)\nprint('ready', flush=True)\ntime.sleep(60)")
    assert fence.live() == 9 * MEBI
    process.kill()
    if reaped:
        process.wait()
    while fences.start_time(process.pid) != -1:
        time.sleep(0.001)
    assert fence.live() == 0
    assert fence.slots() == []
    run(fence, "assert take(10 << 20)")
    process.communicate()


def test_a_process_killed_at_any_instruction_leaves_a_device_that_works(fence: Fence) -> None:
    # most of their time is spent with the lock held, or between the reservation and the block
    fence.budget = 64 * MEBI
    code = """
    print("ready", flush=True)
    while True:
        block = take(8192)
        libc.free(block)
    """
    for _ in range(12):
        pair = [start(fence, code) for _ in range(2)]
        time.sleep(0.004)
        for process in pair:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        run(fence, "assert take(64 << 20)")
    assert fence.live() == 0


def test_slots_are_used_again(fence: Fence) -> None:
    fence.budget = MEBI
    for _ in range(3):
        run(
            fence,
            """
            for _ in range(25):  # more children than there are slots
                if (child := os.fork()) == 0:
                    os._exit(0 if take(8192) else 1)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            """,
        )
    assert fence.failures == 0


def test_a_full_house_refuses_and_does_not_count_wrong(fence: Fence) -> None:
    out = run(
        fence,
        """
        take(8192)
        answers, ends, children = os.pipe(), os.pipe(), []
        for _ in range(64):
            if (child := os.fork()) == 0:
                os.close(ends[1])
                os.write(answers[1], b"+" if take(8192) else b"-")
                os.read(ends[0], 1)
                os._exit(0)
            children.append(child)
        said = b"".join(os.read(answers[0], 1) for _ in children)
        os.close(ends[1])
        for child in children:
            os.waitpid(child, 0)
        print(said.decode())
        """,
    )
    assert (out.count("+"), out.count("-")) == (61, 3)
    assert fence.failures == 3


# ---------------------------------------------------------------------- the co-tenant


def test_a_neighbour_takes_what_is_free_and_the_rest_when_it_is(fence: Fence) -> None:
    fence.budget = 10 * MEBI
    with Neighbour.on_heap(os.environ | fences.environment(fence)) as neighbour:
        assert neighbour.hold(4 * MEBI) == 4 * MEBI == fence.live()
        assert neighbour.hold(30 * MEBI) == fence.live() == 10 * MEBI, "to the last block"
        fence.budget = 20 * MEBI
        while fence.live() < 20 * MEBI:
            time.sleep(0.002)
        assert neighbour.hold(MEBI) == MEBI == fence.live()
        assert fence.of(neighbour.pid).failures > 0
        assert neighbour.hold(0) == 0 == fence.live()
        neighbour.hold(5 * MEBI)
        os.kill(neighbour.pid, signal.SIGKILL)
        while fence.live():
            time.sleep(0.002)
        with pytest.raises(RuntimeError, match="said '' where 'holding' was expected"):
            neighbour.hold(MEBI)


def test_a_holder_on_the_heap_frees_whole_blocks_and_takes_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = Heap()
    for wanted, held in ((4 * MEBI, 4 * MEBI), (10 * MEBI + 5, 10 * MEBI), (5 * MEBI, 5 * MEBI), (0, 0)):
        heap.wanted = wanted
        heap.adjust()
        assert held <= heap.held <= wanted
    there = heap._take
    monkeypatch.setattr(heap, "_take", lambda size: size <= 3 * MEBI and there(size))  # no larger block is to be had
    heap.wanted = 8 * MEBI
    heap.adjust()
    assert heap.held == 8 * MEBI
    heap.wanted = heap.held + (1 << 60)
    monkeypatch.setattr(heap, "_take", there)
    monkeypatch.setattr(heap, "grain", 1 << 50)
    heap.adjust()
    assert heap.held == 8 * MEBI, "the machine has no more"
    heap.wanted = 0
    heap.adjust()


def test_a_neighbour_ends_with_its_parent(fence: Fence) -> None:
    code = f"""
    sys.path.insert(0, {str(Path(fences.__file__).parent)!r})
    from neighbour import Neighbour
    neighbour = Neighbour.on_heap().__enter__()
    neighbour.hold(1 << 20)
    print("ready", flush=True)
    print(neighbour.pid, flush=True)
    time.sleep(60)
    """
    process = start(fence, code)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert fence.of(pid).live == MEBI
    process.kill()
    process.communicate()
    while fences.start_time(pid) != -1:
        time.sleep(0.002)


# ---------------------------------------------------------------------- the library and the file


def test_without_a_file_the_library_does_nothing(tmp_path: Path) -> None:
    for content in (None, b"", b"x" * 10):
        path = tmp_path / "fence"
        if content is not None:
            path.write_bytes(content)
        environment = os.environ | {"LD_PRELOAD": str(fences.library()), fences.VARIABLE: str(path)}
        code = "assert take(1 << 20)\nlibc.fence_reset_peak()"
        subprocess.run(script(code), env=environment, check=True, timeout=600)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"1234")
    for path in (tmp_path / "short", tmp_path / "missing"):
        with pytest.raises(UsageError, match=f"{path.name} is no fence file"):
            Fence(path)


def test_a_second_look_at_the_file_does_not_delete_it(fence: Fence) -> None:
    with Fence(fence.path) as again:
        again.budget = 5
        again.reset_peak()  # of a process that is not under it: nothing
    assert fence.budget == 5
    assert fence.path.exists()
    fence.budget = 1 << 70
    assert fence.budget == fences.UNLIMITED


@pytest.fixture
def afresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A user's cache that is empty yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fences.library.cache_clear()
    yield tmp_path / "elastic_mbs"
    fences.library.cache_clear()


def test_the_library_is_made_once_and_kept(afresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = fences.library()
    assert made.parent == afresh
    assert [path.name for path in afresh.iterdir()] == [made.name], "nothing half made is left"
    fences.library.cache_clear()
    monkeypatch.setattr(fences, "_compile", lambda *_: pytest.fail("made again"))
    assert fences.library() == made


def test_where_the_cache_cannot_be_written_to_it_is_made_elsewhere(afresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != afresh and there(path, mode))
    made = fences.library()
    assert made.exists()
    assert afresh not in made.parents
    fences.library.cache_clear()
    afresh.rmdir()
    afresh.write_text("a file in its place")
    assert fences.library().exists()


def test_without_a_compiler_it_says_what_to_install(afresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(UsageError, match="no 'no-such-compiler': install one"):
        fences.library()


def test_a_compiler_that_fails_is_quoted(afresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'the floor is wet' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(UsageError, match=r"fence\.c does not compile with .*broken .*: the floor is wet"):
        fences.library()


@pytest.mark.parametrize(("system", "libc"), [("darwin", ""), ("linux", "musl")])
def test_other_systems_are_refused_by_name(system: str, libc: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr("platform.libc_ver", lambda: (libc, ""))
    assert f"this is {system} {libc}".rstrip() in str(fences.trouble())
