"""The doctor's questions to the machine: one that fails costs its own answer only."""

import importlib.metadata
import platform
import socket
import sys
import types
import warnings
from pathlib import Path

import psutil
import pynvml
import pytest
import torch

from elastic_mbs.cli.doctor import machine
from elastic_mbs.cli.doctor.facts import Facts, Gpu, Host, Limit, Nvml, Torch, TorchDevice, Unknown
from elastic_mbs.cli.doctor.machine import (
    collect,
    limits,
    network,
    nvml_facts,
    softly,
    torch_facts,
)
from elastic_mbs.cli.doctor.rules import judge
from tests.helpers.fake_nvml import ABSENT, GIB, LOST, UNKNOWN, Card, FakeCuda, FakeDriver, raiser


def test_the_driver_is_read_and_its_failures_are_kept_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FakeDriver(monkeypatch)
    slice_ = Card("MIG-x", 200, 300, compute=[(4000000, None)])
    driver.cards = [
        Card("GPU-b", 1500, 2000, mode=3),
        Card("GPU-a", 400, 1000, instances=[slice_]),
        Card("GPU-c", 0, 0),
    ]
    found = nvml_facts()
    assert isinstance(found, Nvml)
    assert (found.driver, found.cuda) == ("580.12.34", "13.0")
    *gpus, without_figures = found.gpus
    assert [
        (gpu.index, gpu.uuid, gpu.name, gpu.parent, gpu.mig, gpu.compute_mode, gpu.free, gpu.total)
        for gpu in gpus
    ] == [
        (0, "GPU-b", "Stub GPU", None, False, "exclusive process", 1500, 2000),
        (1, "GPU-a", "Stub GPU", None, True, "default", 400, 1000),
        (0, "MIG-x", "Stub MIG", 1, False, "default", 200, 300),
    ]
    assert not isinstance(gpus[2].holders, Unknown)
    assert [(holder.pid, holder.bytes) for holder in gpus[2].holders] == [(4000000, None)]
    assert without_figures.free == Unknown("NVML gives no memory figures for it")
    driver.fail = {"MemoryInfo": pynvml.NVML_ERROR_NOT_SUPPORTED}
    found = nvml_facts()
    assert isinstance(found, Nvml)
    assert found.gpus[0].free == Unknown("NVMLError_NotSupported: Not Supported")


def test_an_engine_that_the_driver_lists_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(monkeypatch)
    driver.cards = [Card("GPU-a", 4 * GIB, 80 * GIB, compute=[(71, 60 * GIB), (72, GIB)])]
    names = {71: "VLLM::EngineCor", 72: "python"}  # the kernel keeps 15 letters
    monkeypatch.setattr("elastic_mbs.memory.processes.pids_are_ours", lambda: True)
    monkeypatch.setattr("elastic_mbs.memory.processes.name_of", names.get)
    facts = Facts(machine.versions(), Torch(), nvml_facts())
    [found] = [each for each in judge(facts) if "processes" in each.found]
    assert (found.topic, found.level) == ("co-tenants", "note")
    assert "VLLM::EngineCor (PID 71) 60.0 GiB" in found.found
    assert found.means.startswith("vLLM: texts are generated there")


@pytest.mark.parametrize(
    ("where", "code", "absent"),
    [("InitWithFlags", ABSENT, True), ("InitWithFlags", UNKNOWN, False), ("Count", LOST, False)],
)
def test_a_driver_that_is_not_there_is_told_from_one_that_fails(
    monkeypatch: pytest.MonkeyPatch, where: str, code: int, absent: bool
) -> None:
    driver = FakeDriver(monkeypatch)
    driver.fail = {where: code}
    found = nvml_facts()
    assert isinstance(found, Unknown)
    assert (found.why.split(":")[0], found.absent) == (
        type(pynvml.NVMLError(code)).__name__,
        absent,
    )
    assert driver.references == 0


def test_what_one_gpu_does_not_answer_costs_nothing_else() -> None:
    binding = types.SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlShutdown=raiser(RuntimeError("gone")),
        nvmlSystemGetDriverVersion=lambda: "580",
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: [0][index],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pynvml", binding)
        found = nvml_facts()
    assert isinstance(found, Nvml)
    assert found.cuda == "unknown"
    card, lost = found.gpus
    assert (card.uuid, card.name, card.compute_mode, card.total, card.mig) == (
        "",
        "unknown",
        "unknown",
        0,
        False,
    )
    assert isinstance(card.free, Unknown)
    assert isinstance(card.holders, Unknown)
    assert lost == Gpu(1, "", "unknown", free=Unknown("IndexError: list index out of range"))


def test_without_the_binding_nvml_is_absent_and_one_that_fails_is_broken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = nvml_facts()
    assert isinstance(found, Unknown)
    assert found.absent
    assert "pynvml" in found.why
    (tmp_path / "pynvml.py").write_text("raise FutureWarning('The pynvml package is deprecated')")
    monkeypatch.delitem(sys.modules, "pynvml")
    monkeypatch.syspath_prepend(tmp_path)
    assert nvml_facts() == Unknown(
        "the module pynvml cannot be imported: FutureWarning: The pynvml package is deprecated"
    )


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
    assert torch_facts(READ) == Torch(
        "13.0", None, (TorchDevice(0, "card", "abc", 9 * GIB),), "native"
    )
    assert device(NOT_READ).free == 5 * GIB
    cuda.info = RuntimeError("CUDA error: lost\nmore of it")
    assert device(NOT_READ).free == Unknown("RuntimeError: CUDA error: lost")
    assert device(READ).free is None
    cuda.properties.is_integrated = True
    assert (device(NOT_READ).free, device(NOT_READ).integrated) == (None, True)


def test_an_older_torch_has_fewer_facts(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.fraction = 0.5
    assert device().fraction == 0.5
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    del cuda.properties.uuid, cuda.properties.is_integrated
    found = device()
    assert (found.fraction, found.uuid, found.integrated, found.free) == (1.0, None, False, 5 * GIB)


def test_an_allocation_is_tried_only_when_asked_for(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.ones
    monkeypatch.setattr(torch, "ones", lambda size, device: real(size))
    assert device().allocation is None
    assert device(allocate=True).allocation == "worked"
    monkeypatch.setattr(
        torch,
        "ones",
        raiser(torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1.00 MiB.")),
    )
    assert device().allocation is None
    assert device(allocate=True).allocation == "OutOfMemoryError: CUDA out of memory."


def test_a_torch_that_sees_no_device_says_why_with_its_warning(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        warnings.warn(
            "CUDA initialization: the driver is too old (found version 11040).\nPlease update.",
            UserWarning,
            stacklevel=1,
        )
        raise RuntimeError("No CUDA GPUs are available")

    monkeypatch.setattr(torch.cuda, "get_allocator_backend", raiser(RuntimeError("no")))
    monkeypatch.setattr(torch.cuda, "init", raiser(RuntimeError("No CUDA GPUs are available")))
    assert torch_facts(READ) == Torch(
        "13.0", None, Unknown("RuntimeError: No CUDA GPUs are available"), None
    )
    monkeypatch.setattr(torch.cuda, "init", init)
    why = (
        "CUDA initialization: the driver is too old (found version 11040). (RuntimeError: No CUDA "
        "GPUs are available)"
    )
    assert torch_facts(READ).devices == Unknown(why)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert torch_facts(READ) == Torch(), "a build without CUDA is not asked for devices"


def test_limits_that_are_set_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.SimpleNamespace(
        RLIM_INFINITY=-1, RLIMIT_AS=1, RLIMIT_DATA=2, getrlimit=lambda n: ({1: 100, 2: -1}[n], -1)
    )
    monkeypatch.setattr(machine, "resource", fake)
    assert limits() == (Limit("RLIMIT_AS", 100),)
    monkeypatch.setattr(machine, "resource", None)
    assert limits() == ()


@pytest.mark.parametrize(
    ("release", "wsl"), [("5.15.153.1-microsoft-standard-WSL2", True), ("6.8.0-generic", False)]
)
def test_this_machine_is_collected_whatever_it_is(
    release: str, wsl: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "release", lambda: release)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    facts = collect(root=tmp_path)
    assert (facts.versions.torch, facts.versions.psutil) == (torch.__version__, psutil.__version__)
    assert facts.versions.nvidia_ml_py is not None
    assert facts.environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "CUDA_DEVICE_ORDER" not in facts.environment
    assert isinstance(facts.host, Host)
    assert (facts.cgroup, facts.platform, facts.wsl) == (None, "linux", wsl)


def test_nothing_that_fails_ends_the_collection_but_ctrl_c(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", raiser(OSError("no /proc")))
    monkeypatch.setattr(machine, "cgroup_memory", raiser(OSError("no /sys\nat all")))
    monkeypatch.setattr(machine, "limits", raiser(OSError()))  # without a text
    monkeypatch.setattr(
        importlib.metadata, "version", raiser(importlib.metadata.PackageNotFoundError("x"))
    )
    monkeypatch.setattr(torch.cuda, "init", raiser(RuntimeError("no GPU")))
    facts = collect()
    assert (facts.host, facts.cgroup, facts.limits) == (
        Unknown("OSError: no /proc"),
        Unknown("OSError: no /sys"),
        Unknown("OSError"),
    )
    assert facts.torch.devices == Unknown("RuntimeError: no GPU")
    assert facts.versions.nvidia_ml_py is None
    with pytest.raises(KeyboardInterrupt):
        softly(raiser(KeyboardInterrupt()))


def test_the_network_is_looked_at_and_a_name_that_leads_nowhere_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = network()
    assert found is not None
    assert "gloo" in found.backends
    assert found.interfaces
    monkeypatch.setattr(socket, "gethostbyname", raiser(OSError("no such name")))
    found = network()
    assert found is not None
    assert found.address == Unknown("OSError: no such name")
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert network() is None
