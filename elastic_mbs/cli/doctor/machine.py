"""The facts of this machine, read from torch, NVML and the system.

Each question fails softly, into an `Unknown` with the reason.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist

from elastic_mbs.cli.doctor.facts import (
    ALLOCATOR,
    Facts,
    Gpu,
    Host,
    Limit,
    Network,
    Nvml,
    Torch,
    TorchDevice,
    Trainer,
    Unknown,
    Versions,
)
from elastic_mbs.integrations.frameworks import FRAMEWORKS
from elastic_mbs.memory import cgroup_memory
from elastic_mbs.memory.processes import holders_on, pids_are_ours
from elastic_mbs.version import __version__

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]  # a module elsewhere, absent on Windows

T = TypeVar("T")

VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    *ALLOCATOR,
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "NVIDIA_DRIVER_CAPABILITIES",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
)
_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


def collect(*, allocate: bool = False, root: Path = Path("/")) -> Facts:
    """Collect all facts of this machine and process.

    With `allocate` a little is allocated on each CUDA device, too; a CUDA context (a few hundred
    MiB) stays there. Files are read below `root`.
    """
    nvml = nvml_facts()
    return Facts(
        versions=versions(),
        torch=torch_facts(nvml, allocate=allocate),
        nvml=nvml,
        environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
        host=softly(lambda: Host(psutil.virtual_memory().available, psutil.virtual_memory().total)),
        cgroup=softly(lambda: cgroup_memory(root)),
        limits=softly(limits),
        platform=sys.platform,
        wsl=sys.platform == "linux" and "microsoft" in platform.release().lower(),
        own_pids=pids_are_ours(),
        trainers=known(trainers, ()),
        network=softly(network),
    )


def softly(question: Callable[[], T]) -> T | Unknown:
    """Return the answer, or the reason that there is none."""
    try:
        return question()
    except Exception as error:
        # a diagnosis has to come to its end, whatever is wrong with the machine
        return Unknown(in_one_line(error))


def known(question: Callable[[], T], default: T) -> T:
    """Return the answer, or `default` where there is none."""
    return default if isinstance(answer := softly(question), Unknown) else answer


def in_one_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def versions() -> Versions:
    packages = {}
    for package in ("psutil", "nvidia-ml-py", "pynvml"):
        with suppress(importlib.metadata.PackageNotFoundError):
            packages[package.replace("-", "_")] = importlib.metadata.version(package)
    system = f"{platform.system()} {platform.release()} ({platform.machine()})"
    return Versions(
        __version__, platform.python_version(), system, str(torch.__version__), **packages
    )


def trainers() -> tuple[Trainer, ...]:
    return tuple(
        Trainer(each.package, found, each.oldest, each.newest, bool(each.tested))
        for each in FRAMEWORKS
        if (found := each.installed)
    )


def torch_facts(nvml: Nvml | Unknown, *, allocate: bool = False) -> Torch:
    """Return the facts of torch.

    The runtime is not asked for free memory where NVML has it.
    """
    cuda, hip = torch.version.cuda, torch.version.hip
    if cuda is None and hip is None:
        return Torch()
    read = (
        {gpu.uuid.partition("-")[2] for gpu in nvml.gpus if isinstance(gpu.free, int)}
        if isinstance(nvml, Nvml)
        else set()
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        started = softly(torch.cuda.init)
        devices = started or softly(
            lambda: tuple(
                _device(index, read, allocate) for index in range(torch.cuda.device_count())
            )
        )
    if isinstance(devices, Unknown) and warned:
        # torch warns of what is wrong with the driver, and then raises that there is no device
        devices = Unknown(f"{str(warned[0].message).splitlines()[0]} ({devices.why})")
    return Torch(cuda, hip, devices, known(torch.cuda.get_allocator_backend, None))


def _device(index: int, read: set[str], allocate: bool) -> TorchDevice:
    properties = torch.cuda.get_device_properties(index)
    uuid = str(properties.uuid) if hasattr(properties, "uuid") else None
    integrated = bool(getattr(properties, "is_integrated", False))
    tried = (
        softly(lambda: torch.ones(1 << 18, device=f"cuda:{index}").sum().item())
        if allocate
        else None
    )
    return TorchDevice(
        index=index,
        name=properties.name,
        uuid=uuid,
        total=int(properties.total_memory),
        integrated=integrated,
        fraction=known(lambda: float(torch.cuda.get_per_process_memory_fraction(index)), 1.0),
        free=None
        if uuid in read or integrated
        else softly(lambda: int(torch.cuda.mem_get_info(index)[0])),
        allocation=tried.why if isinstance(tried, Unknown) else "worked" if allocate else None,
    )


def nvml_facts() -> Nvml | Unknown:
    """Return the facts that NVML reports, or the reason that there are none."""
    try:
        import pynvml
    except Exception as error:
        return Unknown(
            f"the module pynvml cannot be imported: {in_one_line(error)}",
            absent=isinstance(error, ImportError),
        )
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        absent = isinstance(
            error, (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded)
        )
        return Unknown(in_one_line(error), absent=absent)
    try:
        return softly(lambda: _nvml(pynvml))
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _nvml(pynvml: Any) -> Nvml:
    newest = known(lambda: int(pynvml.nvmlSystemGetCudaDriverVersion_v2()), 0)
    gpus = tuple(
        gpu for index in range(pynvml.nvmlDeviceGetCount()) for gpu in _gpus(pynvml, index)
    )
    return Nvml(
        str(pynvml.nvmlSystemGetDriverVersion()),
        f"{newest // 1000}.{newest % 1000 // 10}" if newest else "unknown",
        gpus,
    )


def _gpus(pynvml: Any, index: int) -> Iterator[Gpu]:
    """Return a GPU and its MIG instances."""
    handle = softly(lambda: pynvml.nvmlDeviceGetHandleByIndex(index))
    if isinstance(handle, Unknown):  # one that has fallen off the bus keeps its number
        yield Gpu(index, "", "unknown", free=handle)
        return
    # now; after the next reset is the second figure
    mig = known(lambda: bool(pynvml.nvmlDeviceGetMigMode(handle)[0] == 1), False)
    yield _gpu(pynvml, handle, index, mig=mig)
    for place in range(
        known(lambda: int(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)), 0) if mig else 0
    ):
        with suppress(pynvml.NVMLError):  # places may be empty
            yield _gpu(
                pynvml,
                pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place),
                place,
                parent=index,
            )


def _gpu(
    pynvml: Any, handle: Any, index: int, *, parent: int | None = None, mig: bool = False
) -> Gpu:
    memory = softly(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    free = (
        memory
        if isinstance(memory, Unknown)
        else int(memory.free)
        if memory.total
        else Unknown("NVML gives no memory figures for it")
    )
    return Gpu(
        index=index,
        uuid=known(lambda: str(pynvml.nvmlDeviceGetUUID(handle)), ""),
        name=known(lambda: str(pynvml.nvmlDeviceGetName(handle)), "unknown"),
        parent=parent,
        mig=mig,
        compute_mode=_MODES.get(
            known(lambda: pynvml.nvmlDeviceGetComputeMode(handle), -1), "unknown"
        )
        if parent is None
        else "default",
        free=free,
        total=0 if isinstance(memory, Unknown) else int(memory.total),
        holders=softly(lambda: holders_on(pynvml, handle)),
    )


def network() -> Network | None:
    """Return what ranks of a job reach each other by; None where torch has no process groups."""
    if not dist.is_available():
        return None
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return Network(
        tuple(name for name, available in there.items() if available),
        softly(lambda: socket.gethostbyname(socket.gethostname())),
        tuple(psutil.net_if_addrs()),
    )


def limits() -> tuple[Limit, ...]:
    """Return the soft limits on this process's memory that are set."""
    found = []
    for name in ("RLIMIT_AS", "RLIMIT_DATA") if resource is not None else ():
        soft = resource.getrlimit(getattr(resource, name))[0]
        if soft != resource.RLIM_INFINITY:
            found.append(Limit(name, soft))
    return tuple(found)
