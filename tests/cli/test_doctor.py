"""The doctor's judgement over a table of machines, what it prints, and its exit codes."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_mbs.cli import command, doctor
from elastic_mbs.cli.doctor.allocator import Setting, conflict, settings
from elastic_mbs.cli.doctor.console import render, summary
from elastic_mbs.cli.doctor.facts import Facts, Gpu, Host, Limit, Nvml, Torch, TorchDevice, Unknown, Versions
from elastic_mbs.cli.doctor.judgement import Finding, Level, judge
from elastic_mbs.memory import Holder
from elastic_mbs.memory.cgroup import CgroupMemory

GIB = 1024**3
UUID = "4a6e1d3c-0000-1111-2222-333344445555"

VERSIONS = Versions("0.1.0", "3.12.4", "Linux 6.8.0 (x86_64)", "2.13.0+cu130", "7.2.2", "13.615.71")
LIBRARY = Unknown("NVMLError_LibraryNotFound: NVML Shared Library Not Found", absent=True)
BROKEN = Unknown("NVMLError_Unknown: Unknown Error")
H200 = Gpu(0, f"GPU-{UUID}", "NVIDIA H200", free=138 * GIB, total=140 * GIB)
CARD = TorchDevice(0, "NVIDIA H200", UUID, 139 * GIB)

BARE = Facts(
    VERSIONS,
    Torch("13.0", None, (CARD,), "native"),
    Nvml("580.65.06", "13.0", (H200,)),
    environment=(("PYTORCH_ALLOC_CONF", "expandable_segments:True"),),
    host=Host(900 * GIB, 1000 * GIB),
)
LAPTOP = Facts(replace(VERSIONS, system="Darwin 24.5.0 (arm64)", torch="2.13.0"), Torch(), LIBRARY, host=Host(8 * GIB, 16 * GIB), platform="darwin")
CUDA_LAPTOP = replace(LAPTOP, versions=VERSIONS, torch=Torch("13.0", None, Unknown("RuntimeError: Found no NVIDIA driver")), platform="linux")
CPU_TORCH = replace(BARE, versions=replace(VERSIONS, torch="2.13.0+cpu"), torch=Torch())
DRIVER_GONE = replace(BARE, torch=Torch("13.0", None, Unknown("RuntimeError: No CUDA GPUs are available")), nvml=BROKEN, own_pids=False)
WSL = replace(
    BARE,
    torch=Torch("13.0", None, (replace(CARD, name="NVIDIA GeForce RTX 4090", total=24 * GIB),), "native"),
    nvml=Nvml("572.16", "12.8", (replace(H200, free=20 * GIB, total=24 * GIB, holders=(Holder(31), Holder(77))),)),
    environment=(),
    wsl=True,
    own_pids=False,
)
MIG_UUID = "aaaa1d3c-0000-1111-2222-333344445555"
MIG = replace(
    BARE,
    torch=Torch("13.0", None, (TorchDevice(0, "NVIDIA H200 MIG 1g.18gb", MIG_UUID, 16 * GIB),), "native"),
    nvml=Nvml("580.65.06", "13.0", (replace(H200, mig=True), Gpu(2, f"MIG-{MIG_UUID}", "MIG 1g.18gb", parent=0, free=15 * GIB, total=16 * GIB))),
)
SPARK = replace(
    BARE,
    torch=Torch("13.0", None, (TorchDevice(0, "NVIDIA GB10", UUID, 119 * GIB, integrated=True),), "native"),
    nvml=Nvml("580.65.06", "13.0", (replace(H200, name="NVIDIA GB10", free=Unknown("NVMLError_NotSupported: Not Supported"), total=0),)),
)
JETSON = replace(SPARK, nvml=LIBRARY)
GROUP = CgroupMemory(2, "/job", 4 * GIB, 2 * GIB, GIB, 3 * GIB, "memory.max")
CONTAINER = replace(LAPTOP, versions=VERSIONS, platform="linux", cgroup=GROUP, own_pids=False)
OLD_CONTAINER = replace(CONTAINER, cgroup=replace(GROUP, version=1, available=GIB // 8, source="memory.limit_in_bytes"))
NO_UTILITY = replace(BARE, nvml=LIBRARY, environment=(("NVIDIA_DRIVER_CAPABILITIES", "compute"),), own_pids=False)
ROCM = replace(BARE, torch=Torch(None, "7.0", (replace(CARD, name="AMD Instinct MI300X", uuid="x"),), "native"), nvml=LIBRARY)

OK, NOTE, WARNING, PROBLEM = Level.OK, Level.NOTE, Level.WARNING, Level.PROBLEM

# a machine, the worst that is found, and what has to be said, by topic: (level, words)
Said = list[tuple[Level, str, tuple[str, ...]]]
MACHINES: dict[str, tuple[Facts, Said]] = {
    "H200 bare": (
        BARE,
        [
            (OK, "driver", ("580.65.06", "CUDA up to 13.0", "1 GPU")),
            (OK, "devices", ("cuda:0", "139.0 GiB", "138.0 GiB free", f"GPU-{UUID}")),
            (OK, "allocator", ("expandable_segments is on", "PoisonedDeviceError")),
            (OK, "host", ("900.0 GiB of 1000.0 GiB",)),
        ],
    ),
    "laptop": (LAPTOP, [(NOTE, "driver", ("no GPU", "runs on the CPU"))]),
    "laptop with CUDA's torch": (CUDA_LAPTOP, [(NOTE, "driver", ("no NVIDIA driver", "should be on a machine without", "--gpus all"))]),
    "CPU torch on a GPU machine": (CPU_TORCH, [(PROBLEM, "driver", ("without CUDA", "NVIDIA H200", "get-started"))]),
    "broken driver": (DRIVER_GONE, [(PROBLEM, "driver", ("No CUDA GPUs", "Start the container again"))]),
    "broken driver on the host": (replace(DRIVER_GONE, own_pids=True), [(PROBLEM, "driver", ("nvidia-smi", "reboot"))]),
    "broken NVML": (replace(BARE, nvml=BROKEN), [(WARNING, "driver", ("CUDA works, NVML does not", "in doubt"))]),
    "broken NVML and CPU torch": (replace(CPU_TORCH, nvml=BROKEN), [(WARNING, "driver", ("NVML is broken", "nvidia-smi"))]),
    "hidden devices": (
        replace(BARE, torch=Torch("13.0", None, Unknown("RuntimeError: No CUDA GPUs")), environment=(("CUDA_VISIBLE_DEVICES", ""),)),
        [(PROBLEM, "driver", ("CUDA_VISIBLE_DEVICES=''", "unset it"))],
    ),
    "a device that is not there": (
        replace(BARE, torch=Torch("13.0", None, ()), environment=(("CUDA_VISIBLE_DEVICES", "7"),)),
        [(PROBLEM, "driver", ("CUDA_VISIBLE_DEVICES='7'", "nvidia-smi -L"))],
    ),
    "an old driver": (
        replace(BARE, torch=Torch("13.0", None, Unknown("The NVIDIA driver is too old")), nvml=Nvml("535.1", "12.2", (H200,))),
        [(PROBLEM, "driver", ("CUDA up to 12.2: update", "too old", "built for CUDA 13.0"))],
    ),
    "MIG without an instance": (
        replace(BARE, torch=Torch("13.0", None, Unknown("No CUDA GPUs")), nvml=Nvml("580", "13.0", (replace(H200, mig=True),))),
        [(PROBLEM, "driver", ("no instance",))],
    ),
    "no reason at all": (
        replace(BARE, torch=Torch("13.0", None, Unknown("No CUDA GPUs"))),
        [(PROBLEM, "driver", ("torch cannot use the GPU", "nvidia-smi"))],
    ),
    "WSL": (
        WSL,
        [
            (NOTE, "platform", ("WSL", "spill", "Sysmem Fallback")),
            (NOTE, "co-tenants", ("2 processes", "PID 31, PID 77", "not the ones in here")),
            (NOTE, "allocator", ("is off", "export PYTORCH_ALLOC_CONF=expandable_segments:True")),
        ],
    ),
    "WSL with expandable segments": (replace(WSL, environment=BARE.environment), [(NOTE, "allocator", ("is on", "goes on without"))]),
    "Windows": (
        replace(WSL, wsl=False, platform="win32", own_pids=True),
        [(NOTE, "platform", ("Windows",)), (NOTE, "co-tenants", ("does not tell",))],
    ),
    "MIG": (
        MIG,
        [
            (OK, "devices", ("a MIG instance of nvidia-smi's GPU 0", f"MIG-{MIG_UUID}", "15.0 GiB free")),
            (NOTE, "devices", ("MIG instance", "cannot take it")),
        ],
    ),
    "GB10": (SPARK, [(NOTE, "devices", ("shares the host's memory",))]),
    "Jetson": (JETSON, [(NOTE, "devices", ("shares the host's memory",)), (NOTE, "driver", ("no NVML", "read from the host"))]),
    "Jetson without expandable segments": (
        replace(JETSON, environment=()),
        [(NOTE, "allocator", ("is off", "expandable_segments:True, if this board can"))],
    ),
    "a discrete card that fails": (
        replace(BARE, nvml=Nvml("580", "13.0", (replace(H200, free=Unknown("NVMLError_NotSupported: Not Supported")),))),
        [(WARNING, "devices", ("no memory figures", "failing", "dmesg"))],
    ),
    "container": (CONTAINER, [(NOTE, "host", ("version 2, /job", "4.0 GiB", "3.0 GiB are left", "host_guard=True"))]),
    "container with cgroup v1, nearly full": (OLD_CONTAINER, [(WARNING, "host", ("version 1", "128.0 MiB are left"))]),
    "container without NVML": (NO_UTILITY, [(WARNING, "driver", ("compute,utility (now 'compute')", "as good"))]),
    "ROCm": (ROCM, [(NOTE, "driver", ("ROCm 7.0", "co-tenants cannot be named"))]),
    "a card that NVML does not list": (
        replace(BARE, nvml=Nvml("580", "13.0", ())),
        [(NOTE, "devices", ("does not list cuda:0", UUID)), (OK, "driver", ("0 GPUs",))],
    ),
    "another order": (
        replace(
            BARE,
            torch=Torch("13.0", None, (CARD, replace(CARD, index=1, uuid="b"), replace(CARD, index=2, uuid="c")), "native"),
            nvml=Nvml("580", "13.0", (Gpu(0, "GPU-b"), replace(H200, index=1), Gpu(2, "GPU-c"))),
        ),
        [(NOTE, "devices", ("cuda:0 is nvidia-smi's 1, cuda:1 is nvidia-smi's 0 (CUDA puts the fastest first)", "PCI_BUS_ID"))],
    ),
    "one of several cards": (
        replace(
            BARE,
            nvml=Nvml("580", "13.0", (Gpu(0, "GPU-b", free=1, total=GIB, holders=(Holder(3),)), replace(H200, index=1))),
            environment=(("CUDA_VISIBLE_DEVICES", "1"),),
        ),
        [(NOTE, "devices", ("cuda:0 is nvidia-smi's 1 (CUDA_VISIBLE_DEVICES='1')",))],
    ),
    "crowded": (
        replace(BARE, nvml=Nvml("580", "13.0", (replace(H200, free=GIB, holders=(Holder(9, "python", 130 * GIB),)),))),
        [
            (NOTE, "co-tenants", ("1 process on nvidia-smi's GPU 0: python (PID 9) 130.0 GiB",)),
            (WARNING, "co-tenants", ("1.0 GiB of 140.0 GiB free", "another device")),
        ],
    ),
    "exclusive": (replace(BARE, nvml=Nvml("580", "13.0", (replace(H200, compute_mode="exclusive process"),))), [(NOTE, "devices", ("exclusive",))]),
    "prohibited": (
        replace(BARE, nvml=Nvml("580", "13.0", (replace(H200, compute_mode="prohibited"),))),
        [(PROBLEM, "devices", ("prohibited", "nvidia-smi -i 0 -c DEFAULT"))],
    ),
    "a card off the bus": (
        replace(BARE, nvml=Nvml("580", "13.0", (H200, Gpu(1, "", "unknown", free=Unknown("NVMLError_GpuIsLost: GPU is lost"))))),
        [(WARNING, "devices", ("nvidia-smi's GPU 1 does not answer", "GPU is lost", "reboot"))],
    ),
    "an allocation that fails": (
        replace(BARE, torch=Torch("13.0", None, (replace(CARD, allocation="OutOfMemoryError: CUDA out of memory"),), "native")),
        [(PROBLEM, "devices", ("An allocation of 1 MiB failed", "CUDA out of memory"))],
    ),
    "a memory fraction": (
        replace(BARE, torch=Torch("13.0", None, (replace(CARD, fraction=0.5, total=8 * GIB),), "native")),
        [(NOTE, "devices", ("fraction of 0.5", "4.0 GiB"))],
    ),
    "an old torch": (replace(BARE, versions=replace(VERSIONS, torch="2.7.1")), [(PROBLEM, "versions", ("needs torch 2.8", "torch>=2.8"))]),
    "torch 2.8": (
        replace(BARE, versions=replace(VERSIONS, torch="2.8.0"), environment=()),
        [(NOTE, "allocator", ("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",))],
    ),
    "the deprecated package": (
        replace(BARE, versions=replace(VERSIONS, pynvml="11.5.3")),
        [(WARNING, "versions", ("pynvml 11.5.3", "pip uninstall -y pynvml"))],
    ),
    "no binding": (replace(BARE, versions=replace(VERSIONS, nvidia_ml_py=None), nvml=LIBRARY), [(WARNING, "versions", ("nvidia-ml-py",))]),
    "no binding on a laptop": (replace(LAPTOP, versions=replace(VERSIONS, nvidia_ml_py=None)), [(NOTE, "versions", ("nvidia-ml-py",))]),
    "cudaMallocAsync": (
        replace(BARE, torch=replace(BARE.torch, allocator="cudaMallocAsync"), environment=()),
        [(WARNING, "allocator", ("cudaMallocAsync", "zero"))],
    ),
    "no cache": (
        replace(BARE, environment=(("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)),
        [(WARNING, "allocator", ("PYTORCH_NO_CUDA_MEMORY_CACHING",))],
    ),
    "two names for the settings": (
        replace(BARE, environment=(("PYTORCH_ALLOC_CONF", "expandable_segments:True"), ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64"))),
        [
            (WARNING, "allocator", ("they differ", "one of them")),
            (NOTE, "allocator", ("PYTORCH_ALLOC_CONF=max_split_size_mb:64,expandable_segments:True",)),
        ],
    ),
    "settings that cannot be read": (
        replace(BARE, environment=(("PYTORCH_ALLOC_CONF", "expandable_segments"),)),
        [(WARNING, "allocator", ("PYTORCH_ALLOC_CONF cannot be read", "'expandable_segments'"))],
    ),
    "a fraction among the settings": (
        replace(BARE, environment=(("PYTORCH_ALLOC_CONF", "per_process_memory_fraction:0.5,expandable_segments:true"),)),
        [(NOTE, "allocator", ("per_process_memory_fraction is 0.5",)), (OK, "allocator", ("is on",))],
    ),
    "address space limited": (
        replace(BARE, limits=(Limit("RLIMIT_AS", 64 * GIB),)),
        [(PROBLEM, "limits", ("RLIMIT_AS is 64.0 GiB", "ulimit -v unlimited"))],
    ),
    "address space limited on a CPU": (
        replace(CONTAINER, limits=(Limit("RLIMIT_AS", GIB),)),
        [(NOTE, "limits", ("RLIMIT_AS is 1.0 GiB", "recovers"))],
    ),
    "data limited": (replace(BARE, limits=(Limit("RLIMIT_DATA", GIB),)), [(NOTE, "limits", ("RLIMIT_DATA", "ulimit -d"))]),
    "resident set limited": (replace(BARE, limits=(Limit("RLIMIT_RSS", GIB),)), [(NOTE, "limits", ("no notice",))]),
    "little left on the host": (replace(BARE, host=Host(GIB, 100 * GIB)), [(WARNING, "host", ("1.0 GiB of 100.0 GiB", "DataLoader workers"))]),
    "nothing can be read": (
        replace(BARE, host=Unknown("OSError: x"), cgroup=Unknown("OSError: y"), limits=Unknown("OSError: z")),
        [(WARNING, "host", ("OSError: x",)), (WARNING, "host", ("OSError: y",)), (NOTE, "limits", ("OSError: z",))],
    ),
}


def words(finding: Finding) -> str:
    return f"{finding.found} {finding.means} {finding.do}"


@pytest.mark.parametrize(("facts", "said"), MACHINES.values(), ids=MACHINES)
def test_each_machine_gets_its_findings(facts: Facts, said: Said) -> None:
    findings = judge(facts)
    for level, topic, parts in said:
        matching = [f for f in findings if (f.level, f.topic) == (level, topic) and all(part in words(f) for part in parts)]
        assert matching, (level, topic, parts, findings)
    order = [OK, NOTE, WARNING, PROBLEM]
    expected = max((order.index(level) for level, _, _ in said), default=0)
    assert max(order.index(finding.level) for finding in findings) == expected, [f for f in findings if f.level is order[-1] or f.level is WARNING]


@pytest.mark.parametrize("facts", [machine for machine, _ in MACHINES.values()], ids=MACHINES)
def test_what_is_not_well_says_what_it_means_and_what_is_bad_says_what_to_do(facts: Facts) -> None:
    for finding in judge(facts):
        if finding.level in (WARNING, PROBLEM) or (finding.level is NOTE and "cannot be read" not in finding.found):
            assert finding.means, finding
        if finding.level is PROBLEM or (finding.level is WARNING and finding.topic != "host"):
            assert finding.do, finding


def test_a_card_that_torch_does_not_see_is_somebody_elses_business() -> None:
    facts, _ = MACHINES["one of several cards"]
    assert [f for f in judge(facts) if f.topic == "co-tenants"] == []


def test_the_allocator_is_no_matter_where_torch_sees_no_device() -> None:
    for facts in (LAPTOP, CUDA_LAPTOP, CPU_TORCH, DRIVER_GONE):
        assert [f for f in judge(facts) if f.topic == "allocator"] == []


def test_where_torch_sees_nothing_all_co_tenants_are_told() -> None:
    facts = replace(CPU_TORCH, nvml=Nvml("580", "13.0", (replace(H200, holders=(Holder(3, "a", 5),)), *MIG.nvml.gpus[1:])))  # type: ignore[union-attr]  # it has a driver
    assert [f.found for f in judge(facts) if f.topic == "co-tenants"] == ["1 process on nvidia-smi's GPU 0: a (PID 3) 5 B"]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_rocms_own_name_counts_on_rocm_only(name: str) -> None:
    environment = ((name, "expandable_segments:True"),)
    on_rocm = judge(replace(ROCM, environment=environment))
    on_cuda = judge(replace(BARE, environment=environment))
    assert any("is on" in f.found for f in on_rocm)
    assert any("is on" in f.found for f in on_cuda) == (name == "PYTORCH_ALLOC_CONF")


# ---------------------------------------------------------------------- allocator settings


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("expandable_segments:True", {"expandable_segments": "True"}),
        (" max_split_size_mb : 128 ,backend:native,", {"max_split_size_mb": "128", "backend": "native"}),
        ("roundup_power2_divisions:[256:1,512:2,>:8],a:b", {"roundup_power2_divisions": "[256:1,512:2,>:8]", "a": "b"}),
    ],
    ids=range(4),
)
def test_settings_are_read_as_torch_writes_them(text: str, expected: dict[str, str]) -> None:
    found = settings([("PYTORCH_ALLOC_CONF", text)])
    assert {setting.name: setting.value for setting in found} == expected
    assert not any(setting.error for setting in found)


@pytest.mark.parametrize("text", ["a", "a:", ":b", "a:[1,2", "a:b,c"])
def test_settings_that_make_no_sense_say_so(text: str) -> None:
    assert any(setting.error for setting in settings([("PYTORCH_ALLOC_CONF", text)]))


@given(st.text())
def test_any_text_is_read_without_raising(text: str) -> None:
    for setting in settings([("PYTORCH_ALLOC_CONF", text)]):
        assert isinstance(setting, Setting)
        assert setting.error or (setting.name and setting.value)


def test_the_order_of_settings_makes_no_conflict() -> None:
    both = [("PYTORCH_ALLOC_CONF", "a:1,b:2"), ("PYTORCH_CUDA_ALLOC_CONF", "b:2,a:1")]
    assert not conflict(both)
    assert not conflict(both[:1])
    assert not conflict([])
    assert conflict([*both[:1], ("PYTORCH_CUDA_ALLOC_CONF", "a:1")])
    assert [setting.variable for setting in settings(both)] == ["PYTORCH_CUDA_ALLOC_CONF"] * 2


# ---------------------------------------------------------------------- what is printed


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("facts", [machine for machine, _ in MACHINES.values()], ids=MACHINES)
def test_the_text_fits_the_terminal_and_loses_nothing(facts: Facts, width: int) -> None:
    findings = judge(facts)
    text = render(findings, width)
    for line in text.splitlines():
        # a UUID or an assignment stays in one piece, to be copied, and is alone on its line where it is too long
        assert len(line) <= width or len(line.split()[-1]) > width - 22, line
    flat = "".join(text.replace("→", "").split())
    for finding in findings:
        for part in (finding.level, finding.topic, finding.found, finding.means, finding.do):
            assert "".join(part.split()) in flat or part in (finding.level, finding.topic)
    assert text.splitlines()[-1] == summary(findings)


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ([], "no problems"),
        ([OK, NOTE, OK], "no problems"),
        ([WARNING], "1 warning"),
        ([PROBLEM, PROBLEM, WARNING, NOTE, NOTE, OK], "2 problems, 1 warning, 2 notes"),
    ],
    ids=range(4),
)
def test_the_last_line_counts(levels: Sequence[Level], expected: str) -> None:
    assert summary([Finding(level, "t", "f") for level in levels]) == expected


def test_a_narrow_terminal_is_not_followed_into_the_unreadable() -> None:
    assert render(judge(BARE), 20) == render(judge(BARE), 60)
    assert render(judge(BARE), 500) == render(judge(BARE), 110)


def test_a_stream_that_is_no_terminal_is_printed_to_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    monkeypatch.setattr(doctor, "collect", lambda **_: BARE)
    monkeypatch.setattr("sys.stdout", text)
    assert command.main(["doctor"]) == 0
    assert text.getvalue().endswith("no problems\n")


@pytest.mark.parametrize(("name", "code"), [("H200 bare", 0), ("WSL", 0), ("crowded", 0), ("CPU torch on a GPU machine", 1), ("prohibited", 1)])
def test_only_a_problem_makes_the_exit_code_1(name: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[dict[str, Any]] = []

    def collect(**options: Any) -> Facts:
        asked.append(options)
        return MACHINES[name][0]

    monkeypatch.setattr(doctor, "collect", collect)
    assert command.main(["doctor"]) == code
    text = capsys.readouterr().out
    assert command.main(["doctor", "--json", "--allocate"]) == code
    told = json.loads(capsys.readouterr().out)
    assert asked == [{"allocate": False}, {"allocate": True}]
    assert (told["schema"], told["version"], told["healthy"]) == ("elastic-mbs-doctor", 1, code == 0)
    assert "driver" in text
    assert ("problem" in text.splitlines()[-1]) != (name == "crowded")


@pytest.mark.parametrize("facts", [machine for machine, _ in MACHINES.values()], ids=MACHINES)
def test_the_document_is_plain_json_with_every_finding_and_fact(facts: Facts) -> None:
    findings = judge(facts)
    told = json.loads(json.dumps(doctor.document(facts, findings), allow_nan=False))
    assert sorted(told) == ["facts", "findings", "healthy", "schema", "version"]
    assert [(f["level"], f["topic"], f["found"], f["means"], f["do"]) for f in told["findings"]] == [
        (f.level.value, f.topic, f.found, f.means, f.do) for f in findings
    ]
    assert sorted(told["facts"]) == sorted(vars(facts))
    assert told["facts"]["environment"] == dict(facts.environment)
