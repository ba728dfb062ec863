"""The doctor's questions to the machine: each answer in its place, and a question that fails costs that answer only."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from elastic_mbs.cli.doctor import machine
from elastic_mbs.cli.doctor.facts import Gpu, Host, Limit, Nvml, Torch, TorchDevice, Unknown
from elastic_mbs.cli.doctor.machine import collect, in_one_line, limits, nvml_facts, softly, torch_facts, versions
from elastic_mbs.memory import Holder
from tests.helpers.fake_nvml import GIB, FakeCuda, FakeNvml
from tests.helpers.nvml_stub import NvmlStub


class FakeDriver(FakeNvml):
    """NVML with two GPUs, the second of them cut into two instances at places 0 and 2."""

    def __init__(self) -> None:
        super().__init__()
        self.devices = {"h0": "GPU-a", "h1": "GPU-b", "m0": "MIG-x", "m2": "MIG-y"}
        self.known = {uuid: handle for handle, uuid in self.devices.items()}
        self.modes = {"h0": 0, "h1": 3}

    def nvmlSystemGetDriverVersion(self) -> str:
        self._call("driver")
        return "580.12"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        self._call("cuda")
        return 12040

    def nvmlDeviceGetCount(self) -> int:
        self._call("count")
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        self._call(f"handle{index}")
        return f"h{index}"

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        self._call("mig")
        return [int(handle == "h1"), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        assert handle == "h1"
        self._call("most")
        return 3

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, place: int) -> str:
        if place == 1:
            raise getattr(self, "NVMLError_NotFound")(place)  # noqa: B009 - made in __init__
        return f"m{place}"

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        self._call("uuid")
        return self.devices[handle]

    def nvmlDeviceGetName(self, handle: str) -> str:
        self._call("name")
        return f"card {handle}"

    def nvmlDeviceGetComputeMode(self, handle: str) -> int:
        self._call("mode")
        return self.modes[handle]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr("elastic_mbs.memory.processes.pids_are_ours", lambda: False)
    return fake


def raiser(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


# ---------------------------------------------------------------------- NVML


def test_the_driver_its_gpus_and_their_instances_are_listed(driver: FakeDriver) -> None:
    driver.compute = [(7, 5)]
    free, total, holders = 6 * GIB, 10 * GIB, (Holder(7, None, 5),)
    assert nvml_facts() == Nvml(
        "580.12",
        "12.4",
        (
            Gpu(0, "GPU-a", "card h0", free=free, total=total, holders=holders),
            Gpu(1, "GPU-b", "card h1", mig=True, compute_mode="exclusive process", free=free, total=total, holders=holders),
            Gpu(0, "MIG-x", "card m0", parent=1, free=free, total=total, holders=holders),
            Gpu(2, "MIG-y", "card m2", parent=1, free=free, total=total, holders=holders),
        ),
    )
    assert driver.references == 0


@pytest.mark.parametrize(
    ("fail", "expected"),
    [
        ({"init": "LibraryNotFound"}, Unknown("NVMLError_LibraryNotFound: LibraryNotFound in init", absent=True)),
        ({"init": "DriverNotLoaded"}, Unknown("NVMLError_DriverNotLoaded: DriverNotLoaded in init", absent=True)),
        ({"init": "Unknown"}, Unknown("NVMLError_Unknown: Unknown in init")),
        ({"count": "GpuIsLost", "shutdown": "Unknown"}, Unknown("NVMLError_GpuIsLost: GpuIsLost in count")),
    ],
    ids=["no-library", "no-driver", "broken", "lost"],
)
def test_a_driver_that_does_not_answer_says_why(driver: FakeDriver, fail: dict[str, str], expected: Unknown) -> None:
    driver.fail = fail
    assert nvml_facts() == expected


def test_without_the_binding_nvml_is_absent_and_one_that_fails_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = nvml_facts()
    assert isinstance(found, Unknown)
    assert found.absent
    assert "pynvml" in found.why
    (tmp_path / "pynvml.py").write_text("raise FutureWarning('The pynvml package is deprecated')")
    monkeypatch.delitem(sys.modules, "pynvml")
    monkeypatch.syspath_prepend(tmp_path)
    assert nvml_facts() == Unknown("the module pynvml cannot be imported: FutureWarning: The pynvml package is deprecated")


def test_what_one_gpu_does_not_tell_costs_nothing_else(driver: FakeDriver) -> None:
    refused = dict.fromkeys(["handle0", "uuid", "name", "mode", "v1", "compute", "most", "cuda"], "NotSupported")
    driver.fail = refused
    found = nvml_facts()
    assert isinstance(found, Nvml)
    assert found.cuda == "unknown"
    lost, card = found.gpus
    assert lost == Gpu(0, "", "unknown", free=Unknown("NVMLError_NotSupported: NotSupported in handle0"))
    assert (card.uuid, card.name, card.compute_mode, card.total) == ("", "unknown", "unknown", 0)
    assert card.free == Unknown("NVMLError_NotSupported: NotSupported in v1")
    assert card.holders == Unknown("NVMLError_NotSupported: NotSupported in compute")
    driver.fail, driver.total, driver.modes = {"mig": "NotSupported"}, 0, {"h0": 77, "h1": 0}
    found = nvml_facts()
    assert isinstance(found, Nvml)
    assert [(gpu.mig, gpu.compute_mode, gpu.free) for gpu in found.gpus] == [
        (False, "unknown", Unknown("NVML gives no memory figures for it")),
        (False, "default", Unknown("NVML gives no memory figures for it")),
    ]


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> NvmlStub:
    return NvmlStub(tmp_path_factory.mktemp("nvml"))


def test_the_real_binding_is_asked_rightly(stub: NvmlStub) -> None:
    """Over the stub library: the calls and the structures of the fake above are those of pynvml."""
    state = """
gpu GPU-b 2000 20 1500
gpu GPU-a 1000 10 400
mig 1 MIG-x 300 3 200
compute_mode GPU-b 3
process MIG-x compute 4000000 N/A
"""
    [told] = stub.run(state, "from elastic_mbs.cli.doctor.machine import nvml_facts\ntell(it=nvml_facts())", torch=True)
    assert (told["it"]["driver"], told["it"]["cuda"]) == ("580.12.34", "13.0")
    seen = [
        (gpu["index"], gpu["uuid"], gpu["name"], gpu["parent"], gpu["mig"], gpu["compute_mode"], gpu["free"], gpu["total"])
        for gpu in told["it"]["gpus"]
    ]
    assert seen == [
        (0, "GPU-b", "Stub GPU", None, False, "exclusive process", 1500, 2000),
        (1, "GPU-a", "Stub GPU", None, True, "default", 400, 1000),
        (0, "MIG-x", "Stub MIG", 1, False, "default", 200, 300),
    ]
    assert [(holder["pid"], holder["bytes"]) for holder in told["it"]["gpus"][2]["holders"]] == [(4000000, None)]


# ---------------------------------------------------------------------- torch

READ = Nvml("580", "13.0", (Gpu(0, "GPU-abc", free=1, total=2),))
NOT_READ = Unknown("no NVML")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda(monkeypatch)
    fake.properties.name = "card"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    return fake


def device(nvml: Nvml | Unknown = READ, *, allocate: bool = False) -> TorchDevice:
    found = torch_facts(nvml, allocate=allocate).devices
    assert isinstance(found, tuple)
    return found[0]


def test_the_runtime_is_asked_for_free_memory_only_where_nvml_has_none(cuda: FakeCuda) -> None:
    assert torch_facts(READ) == Torch("13.0", None, (TorchDevice(0, "card", "abc", 9 * GIB),), "native")
    assert device(NOT_READ).free == 5 * GIB
    cuda.info = RuntimeError("CUDA error: lost\nmore of it")
    assert device(NOT_READ).free == Unknown("RuntimeError: CUDA error: lost")
    assert device(READ).free is None
    cuda.properties.is_integrated = True
    assert (device(NOT_READ).free, device(NOT_READ).integrated) == (None, True)


def test_an_older_torch_has_fewer_facts(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.fraction = 0.5
    assert device().fraction == 0.5
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", raiser(RuntimeError("not yet")))
    assert device().fraction == 1.0
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    del cuda.properties.uuid, cuda.properties.is_integrated
    found = device()
    assert (found.fraction, found.uuid, found.integrated, found.free) == (1.0, None, False, 5 * GIB)


def test_an_allocation_is_tried_only_when_asked_for(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    real = torch.ones

    def ones(size: int, device: str) -> torch.Tensor:
        tried.append(device)
        if len(tried) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1.00 MiB.")
        return real(size)

    monkeypatch.setattr(torch, "ones", ones)
    assert device().allocation is None
    assert not tried
    assert device(allocate=True).allocation == "worked"
    assert device(allocate=True).allocation == "OutOfMemoryError: CUDA out of memory."
    assert tried == ["cuda:0", "cuda:0"]


def test_a_torch_that_sees_no_device_says_why_with_its_warning(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        warnings.warn("CUDA initialization: the driver is too old (found version 11040).\nPlease update.", UserWarning, stacklevel=1)
        raise RuntimeError("No CUDA GPUs are available")

    monkeypatch.setattr(torch.cuda, "get_allocator_backend", raiser(RuntimeError("no")))
    monkeypatch.setattr(torch.cuda, "init", raiser(RuntimeError("No CUDA GPUs are available")))
    assert torch_facts(READ) == Torch("13.0", None, Unknown("RuntimeError: No CUDA GPUs are available"), None)
    monkeypatch.setattr(torch.cuda, "init", init)
    why = "CUDA initialization: the driver is too old (found version 11040). (RuntimeError: No CUDA GPUs are available)"
    assert torch_facts(READ).devices == Unknown(why)


def test_a_build_without_cuda_is_not_asked_for_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "init", raiser(AssertionError("asked")))
    assert torch_facts(READ) == Torch()


# ---------------------------------------------------------------------- the rest


def test_versions_are_those_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = versions()
    assert (seen.torch, seen.psutil, seen.python) == (torch.__version__, psutil.__version__, platform.python_version())
    assert seen.nvidia_ml_py is not None
    monkeypatch.setattr(importlib.metadata, "version", raiser(importlib.metadata.PackageNotFoundError("x")))
    assert versions().nvidia_ml_py is None


def test_limits_that_are_set_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to = {1: 100, 2: -1}
    fake = types.SimpleNamespace(RLIM_INFINITY=-1, RLIMIT_AS=1, RLIMIT_DATA=2, getrlimit=lambda n: (set_to[n], -1))
    monkeypatch.setattr(machine, "resource", fake)
    assert limits() == (Limit("RLIMIT_AS", 100),)
    monkeypatch.setattr(machine, "resource", None)
    assert limits() == ()


@pytest.mark.parametrize(
    ("error", "line"), [(ValueError(), "ValueError"), (ValueError("a\nb"), "ValueError: a"), (KeyError("x"), "KeyError: 'x'")], ids=range(3)
)
def test_a_failed_question_is_one_line_and_ctrl_c_ends_all(error: Exception, line: str) -> None:
    assert in_one_line(error) == line
    assert softly(raiser(error)) == Unknown(line)
    with pytest.raises(KeyboardInterrupt):
        softly(raiser(KeyboardInterrupt()))


@pytest.mark.parametrize(("release", "wsl"), [("5.15.153.1-microsoft-standard-WSL2", True), ("6.8.0-generic", False)])
def test_this_machine_is_collected_whatever_it_is(release: str, wsl: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "release", lambda: release)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    facts = collect(root=tmp_path)
    assert facts.variables["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "CUDA_DEVICE_ORDER" not in facts.variables
    assert isinstance(facts.host, Host)
    assert (facts.cgroup, facts.platform, facts.wsl) == (None, "linux", wsl)


def test_nothing_that_fails_ends_the_collection(driver: FakeDriver, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", raiser(OSError("no /proc")))
    monkeypatch.setattr(machine, "cgroup_memory", raiser(OSError("no /sys")))
    monkeypatch.setattr(machine, "limits", raiser(OSError("no limits")))
    monkeypatch.setattr(torch.cuda, "init", raiser(RuntimeError("no GPU")))
    driver.fail = {"count": "Unknown"}
    facts = collect()
    for found in (facts.host, facts.cgroup, facts.limits, facts.torch.devices, facts.nvml):
        assert isinstance(found, Unknown)
