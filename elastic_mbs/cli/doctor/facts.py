"""What a machine is like, as far as memory goes: plain values, collected once and judged elsewhere.

What could not be found out is an `Unknown` in its place, with the reason. It never stops the collection of the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_mbs.memory.cgroup import CgroupMemory
from elastic_mbs.memory.processes import Holder


@dataclass(frozen=True)
class Unknown:
    """What could not be found out.

    Attributes:
        why: in words.
        absent: the thing asked is not there at all, rather than broken.
    """

    why: str
    absent: bool = False


@dataclass(frozen=True)
class Versions:
    """Versions of what is installed; None where it is not.

    Attributes:
        elastic_mbs: of this package.
        python: of the interpreter.
        system: of the operating system, in words.
        torch: with its local part, such as "2.13.0+cu130".
        psutil: of that package.
        nvidia_ml_py: of the package that brings the module `pynvml`.
        pynvml: of the deprecated package of that name.
    """

    elastic_mbs: str
    python: str
    system: str
    torch: str
    psutil: str | None = None
    nvidia_ml_py: str | None = None
    pynvml: str | None = None


@dataclass(frozen=True)
class TorchDevice:
    """A CUDA device as torch sees it.

    Attributes:
        index: torch's, after CUDA_VISIBLE_DEVICES.
        name: the card's.
        uuid: without prefix; None where this torch does not tell.
        total: bytes.
        integrated: whether the GPU shares the host's memory.
        fraction: the share of the device that this process may use.
        free: bytes, by the runtime; asked for only where NVML does not tell, because that takes a CUDA context.
        allocation: what a real allocation came to: "worked", or its error; None where none was asked for.
    """

    index: int
    name: str
    uuid: str | None
    total: int
    integrated: bool = False
    fraction: float = 1.0
    free: int | Unknown | None = None
    allocation: str | None = None


@dataclass(frozen=True)
class Torch:
    """What this build of torch can do.

    Attributes:
        cuda: version of CUDA that it was built for, None for none.
        hip: version of ROCm that it was built for, None for none.
        devices: what it sees; `Unknown` with torch's own words where it sees none.
        allocator: "native", "cudaMallocAsync" or "custom"; None where there is no CUDA.
    """

    cuda: str | None = None
    hip: str | None = None
    devices: tuple[TorchDevice, ...] | Unknown = ()
    allocator: str | None = None


@dataclass(frozen=True)
class Gpu:
    """A GPU or a MIG instance as NVML sees it.

    Attributes:
        index: NVML's, which `nvidia-smi -i` takes; of a MIG instance, its place on its GPU.
        uuid: with the prefix "GPU-" or "MIG-".
        name: the card's.
        parent: of a MIG instance, the index of its GPU.
        mig: whether the GPU is cut into instances.
        compute_mode: "default", "exclusive process", "prohibited".
        free: bytes; `Unknown` where NVML does not tell.
        total: bytes.
        holders: processes on it; `Unknown` where NVML does not tell.
    """

    index: int
    uuid: str
    name: str = "GPU"
    parent: int | None = None
    mig: bool = False
    compute_mode: str = "default"
    free: int | Unknown = 0
    total: int = 0
    holders: tuple[Holder, ...] | Unknown = ()


@dataclass(frozen=True)
class Nvml:
    """What NVML says.

    Attributes:
        driver: its version.
        cuda: the newest version of CUDA that it serves, such as "13.0".
        gpus: GPUs, and after each its MIG instances.
    """

    driver: str
    cuda: str
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True)
class Host:
    """The machine's memory, in bytes."""

    available: int
    total: int


@dataclass(frozen=True)
class Limit:
    """A resource limit of this process that is set: the name as in `setrlimit`, and its bytes."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Facts:
    """All of it.

    Attributes:
        versions: of what is installed.
        torch: what torch can do.
        nvml: what the driver says.
        environment: the variables that matter and are set.
        host: the machine's memory.
        cgroup: the control group's limit, None for none.
        limits: resource limits that are set.
        platform: "linux", "win32", "darwin" …, as `sys.platform`.
        wsl: whether this is Linux inside Windows.
        own_pids: whether the driver's PIDs mean the same processes here: not so in a container.
    """

    versions: Versions
    torch: Torch
    nvml: Nvml | Unknown
    environment: tuple[tuple[str, str], ...] = ()
    host: Host | Unknown = Unknown("not looked at")
    cgroup: CgroupMemory | Unknown | None = None
    limits: tuple[Limit, ...] | Unknown = ()
    platform: str = "linux"
    wsl: bool = False
    own_pids: bool = True
