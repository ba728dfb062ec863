"""The memory limit of a control group, on copies of the kernel's files and on this machine."""

import tempfile
import types
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_mbs.memory import CgroupMemory, Headroom, HostSensor, cgroup_memory
from tests.helpers.rlimit import NO_LIMIT, ROOT_OF, Version, write_group, write_membership

MEBI = 1 << 20
VERSIONS: tuple[Version, ...] = (1, 2)


def one_group(root: Path, version: Version, limit: int | str, used: int, **more: int) -> None:
    write_group(root / ROOT_OF[version], "/job", version, limit, used, **more)
    write_membership(root, {version: "/job"})


def told(root: Path, *names: str) -> tuple[Any, ...]:
    """Return these figures of the limit that binds."""
    memory = cgroup_memory(root)
    return tuple(getattr(memory, name) for name in names)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_limit_is_read_with_what_is_left_of_it(tmp_path: Path, version: Version) -> None:
    one_group(
        tmp_path,
        version,
        100 * MEBI,
        60 * MEBI,
        inactive=20 * MEBI,
        active=10 * MEBI,
        mapped=5 * MEBI,
    )
    source = "memory.limit_in_bytes" if version == 1 else "memory.max"
    assert cgroup_memory(tmp_path) == CgroupMemory(
        version, "/job", 100 * MEBI, 60 * MEBI, 25 * MEBI, 65 * MEBI, source
    )
    one_group(tmp_path, version, 100, 60, inactive=80)
    assert told(tmp_path, "reclaimable") == (60,), "more cache than use, read a moment later"


# the last with pages of 64 KiB
@pytest.mark.parametrize(("version", "limit"), [*NO_LIMIT.items(), (1, 9223372036854710272)])
def test_no_limit_is_none(tmp_path: Path, version: Version, limit: int | str) -> None:
    one_group(tmp_path, version, limit, 60)
    assert cgroup_memory(tmp_path) is None


def test_the_limit_that_slows_down_counts_as_the_one_that_kills(tmp_path: Path) -> None:
    write_group(tmp_path / ROOT_OF[2], "/job", 2, 100, 60, high=80)
    write_membership(tmp_path, {2: "/job"})
    assert told(tmp_path, "limit", "available", "source") == (80, 20, "memory.high")


@pytest.mark.parametrize(
    ("path", "mount_root"),
    [
        ("/", "/"),
        ("/docker/1af6", "/"),
        ("/docker/1af6", "/docker/other"),
        ("/../sibling", "/"),
        ("/", "/../.."),
    ],
)
def test_the_mounts_root_counts_where_no_other_group_shows(
    tmp_path: Path, path: str, mount_root: str
) -> None:
    write_group(tmp_path / ROOT_OF[2], "/", 2, 100, 60)
    write_membership(tmp_path, {2: path}, {2: mount_root})
    assert told(tmp_path, "path", "available") == ("/", 40)


def test_version_1_tells_the_limit_of_groups_above_the_mount(tmp_path: Path) -> None:
    write_group(tmp_path / ROOT_OF[1], "/", 1, NO_LIMIT[1], 60, hierarchical_memory_limit=70)
    write_membership(tmp_path, {1: "/kubepods/pod/c1"}, {1: "/kubepods/pod/c1"})
    assert told(tmp_path, "limit", "available", "source") == (70, 10, "memory.stat")


@pytest.mark.parametrize("has_memory", VERSIONS)
def test_a_hybrid_has_its_memory_in_one_of_two_hierarchies(
    tmp_path: Path, has_memory: Version
) -> None:
    tops = {1: tmp_path / ROOT_OF[1], 2: tmp_path / ROOT_OF[2] / "unified"}
    write_group(tops[1], "/job", 1, 100 if has_memory == 1 else None, 60)
    write_group(tops[2], "/user/job", 2, 100 if has_memory == 2 else None, 60)
    write_membership(tmp_path, {1: "/job", 2: "/user/job"})
    assert told(tmp_path, "version", "available") == (has_memory, 40)


def test_a_mount_point_with_a_space_is_found(tmp_path: Path) -> None:
    write_group(tmp_path / "my groups", "/job", 2, 100, 60)
    write_membership(tmp_path, {2: "/job"})
    (tmp_path / "proc/self/mountinfo").write_text(
        r"31 22 0:31 / /my\040groups rw - cgroup2 cgroup2 rw" + "\n"
    )
    assert told(tmp_path, "available") == (40,)


def test_a_machine_without_these_files_has_no_limit(tmp_path: Path) -> None:
    assert cgroup_memory(tmp_path) is None
    write_membership(tmp_path, {2: "/job"})
    (tmp_path / "proc/self/mountinfo").unlink()
    assert cgroup_memory(tmp_path) is None


@pytest.mark.parametrize(
    "membership",
    [
        b"",
        b"nonsense\n::\n",
        b"0::/\xff\x00\n",
        b"0::/" + b"x" * 5000 + b"\n",
        b"0::relative\n",
        b"4:memory\n",
    ],
)
@pytest.mark.parametrize(
    "mount",
    [
        None,
        "",
        "31 22 0:31 / /a rw - cgroup2",
        "31 22 0:31 / / rw cgroup2 cgroup2 rw",
        "\0 \0 \0 \0 \0 \0 - cgroup2 x y",
    ],
)
def test_garbled_groups_and_mounts_are_no_error(
    tmp_path: Path, membership: bytes, mount: str | None
) -> None:
    one_group(tmp_path, 2, 100, 60)
    if mount is not None:
        (tmp_path / "proc/self/mountinfo").write_text(mount + "\n")
        assert cgroup_memory(tmp_path) is None
    (tmp_path / "proc/self/cgroup").write_bytes(membership)
    assert cgroup_memory(tmp_path) is None


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("text", ["", "\n", "-1", "1e9", "12 34", "٣", "9" * 5000])
def test_a_garbled_limit_or_use_is_no_limit(tmp_path: Path, version: Version, text: str) -> None:
    one_group(tmp_path, version, text, 60)
    assert cgroup_memory(tmp_path) is None
    write_group(tmp_path / ROOT_OF[version], "/job", version, 100, text)
    assert cgroup_memory(tmp_path) is None


@pytest.mark.parametrize(
    "text", ["", "inactive_file\n", "inactive_file ten\n", "inactive_file 1 2\n\0\n"]
)
def test_a_garbled_statistic_means_no_cache(tmp_path: Path, text: str) -> None:
    one_group(tmp_path, 2, 100, 60, inactive=10)
    (tmp_path / ROOT_OF[2] / "job/memory.stat").write_text(text)
    assert told(tmp_path, "reclaimable", "available") == (0, 40)


limits = st.none() | st.just("none") | st.integers(0, 200)


@given(
    version=st.sampled_from(VERSIONS),
    groups=st.lists(
        st.tuples(
            limits, st.integers(0, 200), st.integers(0, 60), st.integers(0, 60), st.integers(0, 60)
        ),
        min_size=1,
        max_size=5,
    ),
    hidden=st.integers(0, 5),
)
def test_any_nesting_agrees_with_a_plain_reading(
    version: Version, groups: list[tuple[int | str | None, int, int, int, int]], hidden: int
) -> None:
    hidden = min(hidden, len(groups) - 1)  # groups above the root of the mount
    names = ["", *(f"g{depth}" for depth in range(1, len(groups)))]
    left: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for depth, (limit, used, inactive, active, mapped) in enumerate(groups):
            if depth < hidden:
                continue
            path = "/".join(names[hidden + 1 : depth + 1])
            said = NO_LIMIT[version] if limit == "none" else limit
            write_group(
                root / ROOT_OF[version],
                path,
                version,
                said,
                used,
                inactive=inactive,
                active=active,
                mapped=mapped,
            )
            if isinstance(limit, int):
                # and what is mapped or the kernel's
                anonymous = used - max(0, inactive + active - mapped)
                left.append(min(limit, limit - anonymous) if anonymous > 0 else limit)
        write_membership(
            root,
            {version: "/" + "/".join(names[1:])},
            {version: "/" + "/".join(names[1 : hidden + 1])},
        )
        memory = cgroup_memory(root)
    assert (None if memory is None else memory.available) == (max(0, min(left)) if left else None)


def test_a_reading_sees_what_changes_and_follows_the_process_to_another_group(
    tmp_path: Path,
) -> None:
    one_group(tmp_path, 2, 100, 60)
    assert told(tmp_path, "available") == (40,)
    one_group(tmp_path, 2, 90, 80)
    assert told(tmp_path, "available") == (10,)
    one_group(tmp_path, 2, "max", 80)
    assert cgroup_memory(tmp_path) is None
    write_group(tmp_path / ROOT_OF[2], "/other", 2, 100, 20)
    write_membership(tmp_path, {2: "/other"})
    assert told(tmp_path, "path", "available") == ("/other", 80)


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        pytest.param(80, 65, Headroom(15, 80, 15, "cgroup", 7.0), id="the group has less"),
        pytest.param(80, 20, Headroom(30, 80, 0, "host", 7.0), id="the machine has less"),
        pytest.param(
            500, 475, Headroom(25, 100, 25, "cgroup", 7.0), id="a limit above the machine's memory"
        ),
        pytest.param("max", 20, Headroom(30, 100, 20, "host", 7.0), id="no limit"),
        pytest.param(20, 0, Headroom(20, 20, 0, "cgroup", 7.0), id="a limit below what we hold"),
    ],
)
def test_the_host_sensor_takes_what_is_smaller_of_machine_and_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | str, used: int, expected: Headroom
) -> None:
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: types.SimpleNamespace(available=30, total=100)
    )
    monkeypatch.setattr(psutil.Process, "memory_info", lambda _: types.SimpleNamespace(rss=50))
    one_group(tmp_path, 2, limit, used)
    assert HostSensor(clock=lambda: 7.0, root=tmp_path).read() == expected
