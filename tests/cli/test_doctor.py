"""The doctor's judgement over a table of machines, what it prints, and its exit codes."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_mbs.cli import command, doctor
from elastic_mbs.cli.doctor import render, summary
from elastic_mbs.cli.doctor.facts import (
    Facts,
    Gpu,
    Host,
    Limit,
    Nvml,
    Torch,
    TorchDevice,
    Trainer,
    Unknown,
    Versions,
)
from elastic_mbs.cli.doctor.rules import CONDITIONS, Level, conflict, judge, settings, table
from elastic_mbs.memory import CgroupMemory, Holder
from tests.helpers import doctor_jobs

GIB = 1024**3
UUID = "4a6e1d3c-0000-1111-2222-333344445555"

VERSIONS = Versions("0.1.0", "3.12.4", "Linux 6.8.0 (x86_64)", "2.13.0+cu130", "7.2.2", "13.615.71")
LIBRARY = Unknown("NVMLError_LibraryNotFound: NVML Shared Library Not Found", absent=True)
BROKEN = Unknown("NVMLError_Unknown: Unknown Error")
H200 = Gpu(0, f"GPU-{UUID}", "NVIDIA H200", free=138 * GIB, total=140 * GIB)
LIGHTNING = Trainer("lightning", "2.6.6", oldest="2.5.0", newest="2.6.6", tested=True)
CARD = TorchDevice(0, "NVIDIA H200", UUID, 139 * GIB)


def nvml(*gpus: Gpu, cuda: str = "13.0") -> Nvml:
    return Nvml("580.65.06", cuda, gpus)


def cuda(*devices: TorchDevice, why: str = "") -> Torch:
    return Torch("13.0", None, Unknown(why) if why else devices, "native")


BARE = Facts(
    VERSIONS,
    cuda(CARD),
    nvml(H200),
    {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    Host(900 * GIB, 1000 * GIB),
)
LAPTOP = Facts(
    replace(VERSIONS, system="Darwin 24.5.0 (arm64)", torch="2.13.0"),
    Torch(),
    LIBRARY,
    host=Host(8 * GIB, 16 * GIB),
    platform="darwin",
)
CUDA_LAPTOP = replace(
    LAPTOP,
    versions=VERSIONS,
    torch=cuda(why="RuntimeError: Found no NVIDIA driver"),
    platform="linux",
)


def bare(**changes: Any) -> Facts:
    return replace(BARE, **changes)


def card(**changes: Any) -> Facts:
    """A machine whose only card NVML sees so."""
    return bare(nvml=nvml(replace(H200, **changes)))


def device(**changes: Any) -> Facts:
    """A machine whose only card torch sees so."""
    return bare(torch=cuda(replace(CARD, **changes)))


def variables(facts: Facts = BARE, **values: str) -> Facts:
    return replace(facts, environment=values)


CPU_TORCH = bare(versions=replace(VERSIONS, torch="2.13.0+cpu"), torch=Torch())
NO_DEVICE = bare(torch=cuda(why="RuntimeError: No CUDA GPUs are available"), environment={})
DRIVER_GONE = replace(NO_DEVICE, nvml=BROKEN, own_pids=False)
WSL = replace(
    card(free=20 * GIB, total=24 * GIB, holders=(Holder(31), Holder(77))),
    environment={},
    wsl=True,
    own_pids=False,
)
MIG_UUID = "aaaa1d3c-0000-1111-2222-333344445555"
INSTANCE = Gpu(2, f"MIG-{MIG_UUID}", "MIG 1g.18gb", parent=0, free=15 * GIB, total=16 * GIB)
MIG = bare(
    torch=cuda(TorchDevice(0, "NVIDIA H200 MIG 1g.18gb", MIG_UUID, 16 * GIB)),
    nvml=nvml(replace(H200, mig=True), INSTANCE),
)
UNREAD = replace(H200, free=Unknown("NVMLError_NotSupported: Not Supported"))
SPARK = bare(
    torch=cuda(TorchDevice(0, "NVIDIA GB10", UUID, 119 * GIB, integrated=True)),
    nvml=nvml(replace(UNREAD, total=0)),
)
JETSON = replace(SPARK, nvml=LIBRARY)
GROUP = CgroupMemory(2, "/job", 4 * GIB, 2 * GIB, GIB, 3 * GIB, "memory.max")
CONTAINER = replace(LAPTOP, versions=VERSIONS, platform="linux", cgroup=GROUP, own_pids=False)
FULL_CONTAINER = replace(
    CONTAINER, cgroup=replace(GROUP, version=1, available=GIB // 8, source="memory.limit_in_bytes")
)
NO_UTILITY = bare(
    nvml=LIBRARY, environment={"NVIDIA_DRIVER_CAPABILITIES": "compute"}, own_pids=False
)
ROCM = bare(
    torch=Torch(None, "7.0", (replace(CARD, name="AMD Instinct MI300X", uuid="x"),), "native"),
    nvml=LIBRARY,
)
NO_BINDING = bare(
    versions=replace(VERSIONS, nvidia_ml_py=None), nvml=replace(LIBRARY, why="no module pynvml")
)
OTHERS = Gpu(0, "GPU-b", free=1, total=GIB, holders=(Holder(3),))
TWO_CARDS = cuda(CARD, replace(CARD, index=1, uuid="b"))
SEVERAL = variables(bare(nvml=nvml(OTHERS, replace(H200, index=1))), CUDA_VISIBLE_DEVICES="1")
MALLOC_ASYNC = replace(BARE.torch, allocator="cudaMallocAsync")
TWO_NAMES = variables(
    PYTORCH_ALLOC_CONF="expandable_segments:True", PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64"
)
UNREADABLE = bare(
    host=Unknown("OSError: x"), cgroup=Unknown("OSError: y"), limits=Unknown("OSError: z")
)

# machines, and what must be found: "level topic: words; words"; no finding may be worse than the
# worst of these
MACHINES: dict[str, tuple[Facts, list[str]]] = {
    "H200 bare": (
        BARE,
        [
            "ok driver: 580.65.06; CUDA up to 13.0; GPUs: 1",
            f"ok devices: cuda:0; 139.0 GiB; 138.0 GiB free; GPU-{UUID}",
        ],
    ),
    "H200 settled": (
        BARE,
        [
            "ok allocator: expandable_segments is on; PoisonedDeviceError",
            "ok host: 900.0 GiB of 1000.0 GiB",
        ],
    ),
    "laptop": (LAPTOP, ["note driver: no GPU; runs on the CPU"]),
    "laptop with CUDA's torch": (
        CUDA_LAPTOP,
        ["note driver: no NVIDIA driver; should be on a machine without; --gpus all"],
    ),
    "CPU torch on a GPU machine": (
        CPU_TORCH,
        ["problem driver: without CUDA; NVIDIA H200; get-started"],
    ),
    "broken driver": (DRIVER_GONE, ["problem driver: No CUDA GPUs; Start the container again"]),
    "broken driver on the host": (
        replace(DRIVER_GONE, own_pids=True),
        ["problem driver: nvidia-smi; reboot"],
    ),
    "broken NVML": (bare(nvml=BROKEN), ["warning driver: CUDA works, NVML does not; in doubt"]),
    "broken NVML and CPU torch": (
        replace(CPU_TORCH, nvml=BROKEN),
        ["warning driver: NVML is broken; nvidia-smi"],
    ),
    "hidden devices": (
        variables(NO_DEVICE, CUDA_VISIBLE_DEVICES=""),
        ["problem driver: CUDA_VISIBLE_DEVICES=''; unset it"],
    ),
    "a device that is not there": (
        variables(bare(torch=cuda()), CUDA_VISIBLE_DEVICES="7"),
        ["problem driver: CUDA_VISIBLE_DEVICES='7'; nvidia-smi -L"],
    ),
    "an old driver": (
        replace(NO_DEVICE, nvml=nvml(H200, cuda="12.2")),
        ["problem driver: CUDA up to 12.2: update; built for CUDA 13.0"],
    ),
    "MIG without an instance": (
        replace(NO_DEVICE, nvml=nvml(replace(H200, mig=True))),
        ["problem driver: no instance"],
    ),
    "no reason at all": (NO_DEVICE, ["problem driver: torch cannot use the GPU; nvidia-smi"]),
    "WSL": (
        WSL,
        [
            "note platform: WSL; spill; Sysmem Fallback",
            "note co-tenants: 2 processes; PID 31, PID 77; not the ones in here",
        ],
    ),
    "WSL with its allocator": (
        WSL,
        ["note allocator: is off; export PYTORCH_ALLOC_CONF=expandable_segments:True"],
    ),
    "WSL with expandable segments": (
        replace(WSL, environment=BARE.environment),
        ["note allocator: is on; goes on without"],
    ),
    "Windows": (
        replace(WSL, wsl=False, platform="win32", own_pids=True),
        ["note platform: Windows", "note co-tenants: does not report"],
    ),
    "MIG": (
        MIG,
        [
            f"ok devices: MIG instance 2 of nvidia-smi's GPU 0, MIG-{MIG_UUID}; 15.0 GiB free",
            "note devices: is a MIG instance",
        ],
    ),
    "GB10": (SPARK, ["note devices: shares the host's memory"]),
    "Jetson": (
        JETSON,
        ["note devices: shares the host's memory", "note driver: no NVML; read from the host"],
    ),
    "Jetson without expandable segments": (
        variables(JETSON),
        ["note allocator: is off; expandable_segments:True, if this board can"],
    ),
    "a discrete card that fails": (
        bare(nvml=nvml(UNREAD)),
        ["warning devices: no memory figures; failing; dmesg"],
    ),
    "container": (
        CONTAINER,
        ["note host: version 2, /job; 4.0 GiB; 3.0 GiB are left; host_guard=True"],
    ),
    "container with cgroup v1, nearly full": (
        FULL_CONTAINER,
        ["note host: version 1", "warning host: nearly reached; 128.0 MiB are left"],
    ),
    "container without NVML": (
        NO_UTILITY,
        ["warning driver: compute,utility (now 'compute'); as good"],
    ),
    "ROCm": (ROCM, ["note driver: ROCm 7.0; co-tenants cannot be named"]),
    "a card that NVML does not list": (
        bare(nvml=nvml()),
        [f"note devices: does not list cuda:0; {UUID}", "ok driver: GPUs: 0"],
    ),
    "another order": (
        bare(torch=TWO_CARDS, nvml=nvml(OTHERS, replace(H200, index=1))),
        [
            "note devices: cuda:0 is nvidia-smi's 1, cuda:1 is nvidia-smi's 0 (CUDA puts the "
            "fastest first); PCI_BUS_ID",
            "warning co-tenants: 1 B of",
        ],
    ),
    "one of several cards": (
        SEVERAL,
        ["note devices: cuda:0 is nvidia-smi's 1 (CUDA_VISIBLE_DEVICES='1')"],
    ),
    "crowded": (
        card(holders=(Holder(9, "python", 130 * GIB),)),
        ["note co-tenants: 1 process on nvidia-smi's GPU 0: python (PID 9) 130.0 GiB"],
    ),
    "an engine beside the training": (
        card(holders=(Holder(9, "VLLM::EngineCore", 130 * GIB), Holder(8, "python", GIB))),
        [
            "note co-tenants: 2 processes; VLLM::EngineCore (PID 9) 130.0 GiB, python (PID 8) 1.0 "
            "GiB; vLLM: texts are generated there; Put it to sleep; mbs.release()"
        ],
    ),
    "two engines": (
        card(holders=(Holder(9, "vllm", GIB), Holder(8, "sglang::scheduler_TP0", GIB))),
        ["note co-tenants: vLLM and SGLang: texts"],
    ),
    "full": (card(free=GIB), ["warning co-tenants: 1.0 GiB of 140.0 GiB free; another device"]),
    "exclusive": (card(compute_mode="exclusive process"), ["note devices: exclusive"]),
    "prohibited": (
        card(compute_mode="prohibited"),
        ["problem devices: prohibited; nvidia-smi -i 0 -c DEFAULT"],
    ),
    "a card off the bus": (
        bare(
            nvml=nvml(H200, Gpu(1, "", "unknown", free=Unknown("NVMLError_GpuIsLost: GPU is lost")))
        ),
        ["warning devices: nvidia-smi's GPU 1 does not answer; GPU is lost; reboot"],
    ),
    "an allocation that fails": (
        device(allocation="OutOfMemoryError: no"),
        ["problem devices: An allocation of 1 MiB failed; OutOfMemoryError: no"],
    ),
    "a memory fraction": (
        device(fraction=0.5, total=8 * GIB),
        ["note devices: fraction of 0.5; 4.0 GiB"],
    ),
    "an old torch": (
        bare(versions=replace(VERSIONS, torch="2.7.1")),
        ["problem versions: needs torch 2.8; torch>=2.8"],
    ),
    "torch 2.8": (
        bare(versions=replace(VERSIONS, torch="2.8.0"), environment={}),
        ["note allocator: export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"],
    ),
    "the deprecated package": (
        bare(versions=replace(VERSIONS, pynvml="11.5.3")),
        ["warning versions: pynvml 11.5.3; pip uninstall -y pynvml"],
    ),
    "a tested trainer": (
        bare(trainers=(LIGHTNING,)),
        ["ok trainers: lightning 2.6.6; tested: 2.5.0 to 2.6.6"],
    ),
    "a trainer that was not tested": (
        bare(trainers=(LIGHTNING, replace(LIGHTNING, version="3.0", tested=False))),
        [
            "ok trainers: lightning 2.6.6",
            "warning trainers: lightning 3.0 was not tested; older than 2.5.0; "
            "'lightning>=2.5.0,<=2.6.6'",
        ],
    ),
    "no binding": (NO_BINDING, ["warning driver: no module pynvml; pip install nvidia-ml-py"]),
    "cudaMallocAsync": (
        bare(torch=MALLOC_ASYNC, environment={}),
        ["warning allocator: cudaMallocAsync; zero"],
    ),
    "no cache": (
        variables(PYTORCH_NO_CUDA_MEMORY_CACHING="1"),
        ["warning allocator: PYTORCH_NO_CUDA_MEMORY_CACHING"],
    ),
    "two names for the settings": (TWO_NAMES, ["warning allocator: they differ; one of them"]),
    "settings that stay": (
        TWO_NAMES,
        [
            "warning allocator: ",
            "note allocator: PYTORCH_ALLOC_CONF=max_split_size_mb:64,expandable_segments:True",
        ],
    ),
    "address space limited": (
        bare(limits=(Limit("RLIMIT_AS", 64 * GIB),)),
        ["problem limits: RLIMIT_AS is 64.0 GiB; ulimit -v unlimited"],
    ),
    "address space limited on a CPU": (
        replace(CONTAINER, limits=(Limit("RLIMIT_AS", GIB),)),
        ["note limits: RLIMIT_AS is 1.0 GiB; recovers"],
    ),
    "data limited": (
        bare(limits=(Limit("RLIMIT_DATA", GIB),)),
        ["note limits: RLIMIT_DATA; ulimit -d"],
    ),
    "little left on the host": (
        bare(host=Host(GIB, 100 * GIB)),
        ["warning host: 1.0 GiB of 100.0 GiB; DataLoader workers"],
    ),
    "nothing can be read": (
        UNREADABLE,
        ["warning host: OSError: x", "warning host: OSError: y", "note limits: OSError: z"],
    ),
    **doctor_jobs.machines(BARE),
}


@pytest.mark.parametrize(("facts", "expected"), MACHINES.values(), ids=MACHINES)
def test_each_machine_gets_its_findings_and_none_worse(facts: Facts, expected: list[str]) -> None:
    findings, levels = judge(facts), list(Level)
    worst = 0
    for text in expected:
        head, _, words = text.partition(": ")
        level, topic = head.split()
        worst = max(worst, levels.index(Level(level)))
        texts = [
            f"{f.found} {f.means} {f.do}" for f in findings if (f.level, f.topic) == (level, topic)
        ]
        assert any(all(part in found for part in words.split("; ")) for found in texts), (
            text,
            findings,
        )
    assert max(levels.index(finding.level) for finding in findings) == worst, findings


@pytest.mark.parametrize("facts", [machine for machine, _ in MACHINES.values()], ids=MACHINES)
def test_findings_are_printed_whole_as_json_and_as_text_that_fits(facts: Facts) -> None:
    findings = judge(facts)
    assert all(
        finding.means and finding.do for finding in findings if finding.level is Level.PROBLEM
    )
    document = json.loads(json.dumps(doctor.document(facts, findings), allow_nan=False))
    assert document["findings"] == [vars(finding) for finding in findings]
    assert sorted(document["facts"]) == sorted(vars(facts))
    lines = render(findings, 80).splitlines()
    # a UUID or an assignment stays in one piece, to be copied, and is alone on its line where it is
    # too long
    assert [line for line in lines if len(line) > 80 and len(line.split()[-1]) <= 58] == []
    flat = "".join("".join(lines).replace("→", "").split())
    assert all(
        "".join(part.split()) in flat
        for finding in findings
        for part in (finding.found, finding.means, finding.do)
    )
    assert lines[-1] == summary(findings)


def test_conditions_of_code_and_table_are_the_same() -> None:
    rules = [rule for groups in table().values() for group in groups.values() for rule in group]
    used = {
        condition
        for rule in rules
        for level in Level
        if level in rule
        for condition in rule[level].split(", ")
    }
    assert used == set(CONDITIONS)
    assert all(sum(level in rule for level in Level) == 1 for rule in rules)


def test_cards_that_torch_does_not_see_count_only_where_it_sees_none() -> None:
    facts, _ = MACHINES["one of several cards"]
    assert [f for f in judge(facts) if f.topic == "co-tenants"] == []
    facts = replace(CPU_TORCH, nvml=nvml(replace(H200, holders=(Holder(3, "a", 5),)), INSTANCE))
    assert [f.found for f in judge(facts) if f.topic == "co-tenants"] == [
        "1 process on nvidia-smi's GPU 0: a (PID 3) 5 B"
    ]
    for facts in (LAPTOP, CUDA_LAPTOP, CPU_TORCH, DRIVER_GONE):
        assert [f for f in judge(facts) if f.topic == "allocator"] == []


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_rocms_own_name_counts_on_rocm_only(name: str) -> None:
    values = {name: "expandable_segments:True"}
    assert any("is on" in f.found for f in judge(variables(ROCM, **values)))
    assert any("is on" in f.found for f in judge(variables(BARE, **values))) == (
        name == "PYTORCH_ALLOC_CONF"
    )


@given(st.text())
def test_any_text_is_read_without_raising(text: str) -> None:
    assert all(name and value for name, value in settings({"PYTORCH_ALLOC_CONF": text}).items())
    assert judge(variables(PYTORCH_ALLOC_CONF=text))


def test_settings_conflict_where_they_differ_in_more_than_order() -> None:
    text = " max_split_size_mb : 128 ,a,b:,:c,roundup_power2_divisions:[256:1,512:2,>:8],d:[1"
    assert settings({"PYTORCH_ALLOC_CONF": text}) == {
        "max_split_size_mb": "128",
        "roundup_power2_divisions": "[256:1,512:2,>:8]",
    }
    both = {"PYTORCH_ALLOC_CONF": "a:1,b:2", "PYTORCH_CUDA_ALLOC_CONF": "b:2,a:1"}
    assert not conflict(both)
    assert not conflict({})
    assert conflict(both | {"PYTORCH_CUDA_ALLOC_CONF": "a:1"})
    assert settings(both | {"PYTORCH_CUDA_ALLOC_CONF": "a:1"}) == {"a": "1"}


@pytest.mark.parametrize(("name", "code"), [("H200 bare", 0), ("crowded", 0), ("prohibited", 1)])
def test_only_a_problem_makes_the_exit_code_1(
    name: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[dict[str, Any]] = []

    def collect(**options: Any) -> Facts:
        asked.append(options)
        return MACHINES[name][0]

    monkeypatch.setattr(doctor, "collect", collect)
    assert command.main(["doctor"]) == code
    capsys.readouterr()
    assert command.main(["doctor", "--json", "--allocate"]) == code
    document = json.loads(capsys.readouterr().out)
    assert asked == [{"allocate": False}, {"allocate": True}]
    assert (document["schema"], document["version"], document["healthy"]) == (
        "elastic-mbs-doctor",
        1,
        code == 0,
    )
