"""Asks the machine. Each question fails softly, into an `Unknown` with the reason."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from elastic_mbs.cli.doctor.facts import Facts, Gpu, Host, Limit, Nvml, Torch, TorchDevice, Unknown, Versions
from elastic_mbs.memory.cgroup import cgroup_memory
from elastic_mbs.memory.processes import holders_on, pids_are_ours

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]  # a module elsewhere, absent on Windows

T = TypeVar("T")

VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "NVIDIA_DRIVER_CAPABILITIES",
)

_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


def collect(*, allocate: bool = False, root: Path = Path("/")) -> Facts:
    """All facts of this machine and process.

    Args:
        allocate: also allocate a little on each CUDA device, which makes a CUDA context there (a few hundred MiB) for as long as this process lives.
        root: what stands for `/` where files are read.
    """
    nvml = nvml_facts()
    told = {gpu.uuid.partition("-")[2] for gpu in nvml.gpus if isinstance(gpu.free, int)} if isinstance(nvml, Nvml) else set()
    return Facts(
        versions=versions(),
        torch=torch_facts(told, allocate=allocate),
        nvml=nvml,
        environment=tuple((name, value) for name in VARIABLES if (value := os.environ.get(name)) is not None),
        host=softly(host),
        cgroup=softly(lambda: cgroup_memory(root)),
        limits=softly(limits),
        platform=sys.platform,
        wsl=sys.platform == "linux" and "microsoft" in platform.release().lower(),
        own_pids=pids_are_ours(),
    )


def softly(ask: Callable[[], T]) -> T | Unknown:
    """The answer, or why there is none."""
    try:
        return ask()
    except Exception as error:  # a diagnosis has to come to its end, whatever is wrong with the machine
        return Unknown(in_one_line(error))


def in_one_line(error: BaseException) -> str:
    """The class of an error and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def versions() -> Versions:
    """Versions of what is installed."""
    from elastic_mbs import __version__

    return Versions(
        elastic_mbs=__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} ({platform.machine()})",
        torch=str(torch.__version__),
        psutil=_version("psutil"),
        nvidia_ml_py=_version("nvidia-ml-py"),
        pynvml=_version("pynvml"),
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_facts(told: Iterable[str] = (), *, allocate: bool = False) -> Torch:
    """What torch can do here.

    Args:
        told: UUIDs of the devices whose free memory NVML tells, so that the runtime need not be asked.
        allocate: as for `collect`.
    """
    cuda, hip = torch.version.cuda, torch.version.hip
    if cuda is None and hip is None:
        return Torch()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        devices = softly(lambda: _devices(set(told), allocate))
    if isinstance(devices, Unknown) and said:
        # torch warns of what is wrong with the driver, and then raises that there is no device
        devices = Unknown(f"{str(said[0].message).splitlines()[0]} ({devices.why})")
    backend = softly(torch.cuda.get_allocator_backend)
    return Torch(cuda, hip, devices, None if isinstance(backend, Unknown) else backend)


def _devices(told: set[str], allocate: bool) -> tuple[TorchDevice, ...]:
    torch.cuda.init()
    return tuple(_device(index, told, allocate) for index in range(torch.cuda.device_count()))


def _device(index: int, told: set[str], allocate: bool) -> TorchDevice:
    properties = torch.cuda.get_device_properties(index)
    found = getattr(properties, "uuid", None)
    uuid = None if found is None else str(found)
    integrated = bool(getattr(properties, "is_integrated", False))
    getter = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    fraction = softly(lambda: float(getter(index))) if getter is not None else 1.0
    allocation = softly(lambda: _allocate(index)) if allocate else None
    free: int | Unknown | None = None
    if uuid not in told and not integrated:
        free = softly(lambda: int(torch.cuda.mem_get_info(index)[0]))
    return TorchDevice(
        index=index,
        name=properties.name,
        uuid=uuid,
        total=int(properties.total_memory),
        integrated=integrated,
        fraction=1.0 if isinstance(fraction, Unknown) else fraction,
        free=free,
        allocation=allocation.why if isinstance(allocation, Unknown) else allocation,
    )


def _allocate(index: int) -> str:
    torch.ones(1 << 18, device=f"cuda:{index}").sum().item()
    return "worked"


def nvml_facts() -> Nvml | Unknown:
    """What NVML says, or why it says nothing."""
    try:
        import pynvml
    except Exception as error:
        return Unknown(f"the module pynvml cannot be imported: {in_one_line(error)}", absent=isinstance(error, ImportError))
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded) as error:
        return Unknown(in_one_line(error), absent=True)
    except pynvml.NVMLError as error:
        return Unknown(in_one_line(error))
    try:
        return softly(lambda: _nvml(pynvml))
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _nvml(pynvml: Any) -> Nvml:
    newest = softly(pynvml.nvmlSystemGetCudaDriverVersion_v2)
    cuda = "unknown" if isinstance(newest, Unknown) else f"{newest // 1000}.{newest % 1000 // 10}"
    gpus: list[Gpu] = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        gpu = softly(partial(pynvml.nvmlDeviceGetHandleByIndex, index))
        if isinstance(gpu, Unknown):
            # one that has fallen off the bus keeps its number
            gpus.append(Gpu(index, "", "unknown", free=gpu))
            continue
        modes = softly(partial(pynvml.nvmlDeviceGetMigMode, gpu))  # now, and after the next reset
        mig = not isinstance(modes, Unknown) and modes[0] == 1
        gpus.append(_gpu(pynvml, gpu, index, mig=mig))
        if mig:
            gpus += _instances(pynvml, gpu, index)
    return Nvml(str(pynvml.nvmlSystemGetDriverVersion()), cuda, tuple(gpus))


def _instances(pynvml: Any, gpu: Any, parent: int) -> Iterable[Gpu]:
    most = softly(lambda: int(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)))
    for place in range(0 if isinstance(most, Unknown) else most):
        with suppress(pynvml.NVMLError):  # places may be empty
            yield _gpu(pynvml, pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, place), place, parent=parent)


def _gpu(pynvml: Any, handle: Any, index: int, *, parent: int | None = None, mig: bool = False) -> Gpu:
    uuid, name = softly(lambda: pynvml.nvmlDeviceGetUUID(handle)), softly(lambda: pynvml.nvmlDeviceGetName(handle))
    memory = softly(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    mode = softly(lambda: pynvml.nvmlDeviceGetComputeMode(handle)) if parent is None else 0
    free: int | Unknown = Unknown("NVML gives no memory figures for it")
    if isinstance(memory, Unknown):
        free = memory
    elif memory.total:
        free = int(memory.free)
    return Gpu(
        index=index,
        uuid="" if isinstance(uuid, Unknown) else str(uuid),
        name="unknown" if isinstance(name, Unknown) else str(name),
        parent=parent,
        mig=mig,
        compute_mode="unknown" if isinstance(mode, Unknown) else _MODES.get(mode, "unknown"),
        free=free,
        total=0 if isinstance(memory, Unknown) else int(memory.total),
        holders=softly(lambda: holders_on(pynvml, handle)),
    )


def host() -> Host:
    """The machine's memory."""
    memory = psutil.virtual_memory()
    return Host(memory.available, memory.total)


def limits() -> tuple[Limit, ...]:
    """The soft limits on this process's memory that are set."""
    if resource is None:
        return ()
    found = []
    for name in ("RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_RSS"):
        number = getattr(resource, name, None)
        soft = resource.RLIM_INFINITY if number is None else resource.getrlimit(number)[0]
        if soft != resource.RLIM_INFINITY:
            found.append(Limit(name, soft))
    return tuple(found)
