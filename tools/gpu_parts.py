"""Parts of `tools/gpu_check`: a command each, its time limit, and the figures in its output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from tools.figures import Figures, read_demo, read_json, read_junit, read_object, read_stress

World = Literal["cuda", "simcuda", "cpu"]  # device that the parts run on
SLOWER = 12
"""Factor by which a simulated device's limits are longer.

A core computes in place of a device, and has more to do where others share the machine.
"""
SPEED = ("overhead", "breakdown")
"""Parts that a simulated device says nothing about."""

GPU_TESTS = (
    "memory/test_oom_release",
    "engine/test_timing",
    "engine/test_by_length",
    "stress/test_cuda_limit",
    "integrations/test_gpu_trainer",
    "promises/test_gpu_idle",
    "promises/test_gpu_rungs",
    "promises/test_gpu",
)
"""Files with tests marked gpu.

The last one has a test that fills the device: a context that does not survive it would fail those
after it.
"""

NAMES = (
    "tests",
    "doctor",
    "stress",
    "fragmented",
    "expandable",
    "demo",
    "ranks",
    "counts",
    "overhead",
    "breakdown",
)
"""Parts in their order: conditions come first, pure measurements last."""


@dataclass(frozen=True)
class Part:
    """A part of the check."""

    name: str  # key in the JSON
    command: Sequence[str]  # run in the repository's root
    limit: float  # seconds
    figures: Callable[[str], Figures]  # reads the figures from the output
    environment: Mapping[str, str] = field(default_factory=dict)  # more variables


def parts(folder: Path, world: World) -> list[Part]:
    """Return the parts to run; on the CPU they are small.

    Args:
        folder: for the files that parts leave.
        world: the device that they run on.
    """
    planned = [
        _tests(folder, world),
        Part("doctor", _python("-m", "elastic_mbs", "doctor", "--json"), 12, read_object),
        _stress(folder, world),
        _fragmentation(folder, world, "fragmented", expandable=False),
        _fragmentation(folder, world, "expandable", expandable=True),
        _demo(world),
        _ranks(world),
        _counts(folder, world),
        _overhead(folder, world),
        _breakdown(folder, world),
    ]
    if world != "simcuda":
        return planned
    return [replace(each, limit=SLOWER * each.limit) for each in planned if each.name not in SPEED]


def segments(*, expandable: bool) -> dict[str, str]:
    """Return the variables that settle how torch's allocator extends its memory.

    They are the name that it knows since 2.9, and the one before.
    """
    return dict.fromkeys(
        ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), f"expandable_segments:{expandable}"
    )


def _python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def _tests(folder: Path, world: World) -> Part:
    report = folder / "junit.xml"
    chosen = [*(f"tests/{name}.py" for name in GPU_TESTS), "-m", "gpu"]
    if world == "cpu":
        chosen = ["tests/promises/test_gpu.py", "-k", "cpu and (forward or scaled)"]
    # The name of each test before it runs, and the stacks of one that hangs: all that is known of
    # it then. What a test records is an error in a report of pytest's newer family.
    settings = [
        *("--verbose", "--tb=short", "-p", "no:cacheprovider"),
        *("-o", "faulthandler_timeout=60", "-o", "junit_family=xunit1"),
    ]
    command = _python("-m", "pytest", *settings, f"--junit-xml={report}", *chosen)
    return Part("tests", command, 115, lambda _: read_junit(report))


def _scenarios(world: World) -> list[str]:
    return _python("-m", "stress", "--kind", "budget" if world == "cpu" else world, "--quick")


def _stress(folder: Path, world: World) -> Part:
    found = folder / "stress.json"
    few = ["--scenario", "too_big"] if world == "cpu" else []
    command = [*_scenarios(world), *few, "--json", str(found)]
    return Part("stress", command, 95, lambda _: read_stress(found))


def _fragmentation(folder: Path, world: World, name: str, *, expandable: bool) -> Part:
    found = folder / f"{name}.json"
    few = ["--steps", "6"] if world == "simcuda" else []
    command = [*_scenarios(world), "--scenario", "fragmentation", *few, "--json", str(found)]
    wanted = None if world == "cpu" else expandable
    variables = segments(expandable=expandable)
    return Part(name, command, 20, lambda _: read_stress(found, expandable=wanted), variables)


def _demo(world: World) -> Part:
    return Part("demo", _python("-m", "elastic_mbs", *_demo_of(world)), 24, read_demo)


def _ranks(world: World) -> Part:
    """Return the demo as a job of two ranks: over NCCL where each has a device, else over gloo."""
    torchrun = _python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = [*torchrun, "-m", "elastic_mbs", *_demo_of(world), "--distributed", "ddp"]
    return Part("ranks", command, 36, read_demo)


def _demo_of(world: World) -> list[str]:
    size = {
        "cuda": ["--steps", "20"],
        "simcuda": ["--steps", "4", "--dtype", "float32"],
        "cpu": ["--steps", "4", "--dtype", "float32", "--batch", "16"],
    }
    return ["demo", "--device", _device(world), "--no-page", *size[world]]


def _counts(folder: Path, world: World) -> Part:
    found = folder / "counts.json"
    command = _python("-m", "benchmarks.bench", "run", "--device", world, "--quick")
    limit = 120 if world == "cpu" else 42  # on a CPU the quick run has four models: a minute
    return Part("counts", [*command, "--json", str(found)], limit, lambda _: read_json(found))


def _overhead(folder: Path, world: World) -> Part:
    found = folder / "overhead.json"
    small = ["mlp", *_SMALL] if world == "cpu" else ["gpt", "cnn", "--seconds", "11"]
    command = [*_benchmark(world), "--json", str(found), *small]
    return Part("overhead", command, 72, lambda _: read_json(found))


def _breakdown(folder: Path, world: World) -> Part:
    found = folder / "breakdown.json"
    small = ["tiny", *_SMALL] if world == "cpu" else ["small", "cold", "--seconds", "2"]
    command = [*_benchmark(world), "--breakdown", "--json", str(found), *small]
    return Part("breakdown", command, 33, lambda _: read_json(found))


_SMALL = ("--pairs", "2", "--step-ms", "1", "--seconds", "1")


def _benchmark(world: World) -> list[str]:
    return _python("benchmarks/bench_overhead.py", "--device", _device(world))


def _device(world: World) -> str:
    return "cpu" if world == "cpu" else "cuda"
