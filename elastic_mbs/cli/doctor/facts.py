"""The facts of a machine about memory: plain values, collected once and judged elsewhere.

A fact that could not be found out is an `Unknown` with the reason. It never stops the collection of
the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_mbs.memory import CgroupMemory, Holder

# variables of the CUDA allocator's settings, in the order in which torch 2.13 looks for them; the
# first that is set counts
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@dataclass(frozen=True)
class Unknown:
    """Fact that could not be found out, and the reason."""

    why: str
    absent: bool = False  # it is not there at all, rather than broken


@dataclass(frozen=True)
class Versions:
    """Versions of the packages that are installed; None for one that is not."""

    elastic_mbs: str
    python: str
    system: str  # the operating system, in words
    torch: str  # with its local part, such as "2.13.0+cu130"
    psutil: str | None = None
    nvidia_ml_py: str | None = None  # the package that brings the module `pynvml`
    pynvml: str | None = None  # the deprecated package of that name


@dataclass(frozen=True)
class Trainer:
    """A package with an integration (`elastic_mbs.integrations`) that is installed."""

    package: str
    version: str
    oldest: str  # that was tested
    newest: str
    tested: bool  # whether the version lies between them


@dataclass(frozen=True)
class TorchDevice:
    """A CUDA device as torch sees it."""

    index: int  # torch's, after CUDA_VISIBLE_DEVICES
    name: str
    uuid: str | None  # without prefix; None where this torch does not have it
    total: int  # bytes
    integrated: bool = False  # the GPU shares the host's memory
    fraction: float = 1.0  # the share of the device that this process may use
    # bytes, by the runtime; read only where NVML has no figure, because that takes a CUDA context
    free: int | Unknown | None = None
    # what a real allocation came to: "worked", or its error; None where none was tried
    allocation: str | None = None


@dataclass(frozen=True)
class Torch:
    cuda: str | None = None  # version of CUDA that it was built for
    hip: str | None = None  # version of ROCm that it was built for
    devices: tuple[TorchDevice, ...] | Unknown = ()  # `Unknown` has torch's own words
    # "native", "cudaMallocAsync" or "custom"; None where there is no CUDA
    allocator: str | None = None


@dataclass(frozen=True)
class Gpu:
    """A GPU or a MIG instance as NVML sees it."""

    index: int  # NVML's, which `nvidia-smi -i` takes; of a MIG instance, its place on its GPU
    uuid: str  # with the prefix "GPU-" or "MIG-"
    name: str = "GPU"
    parent: int | None = None  # of a MIG instance, the index of its GPU
    mig: bool = False  # the GPU is cut into instances
    compute_mode: str = "default"
    free: int | Unknown = 0  # bytes
    total: int = 0  # bytes
    holders: tuple[Holder, ...] | Unknown = ()  # processes on it


@dataclass(frozen=True)
class Nvml:
    driver: str  # its version
    cuda: str  # the newest version of CUDA that it serves, such as "13.0"
    gpus: tuple[Gpu, ...] = ()  # GPUs, and after each its MIG instances


@dataclass(frozen=True)
class Host:
    available: int  # bytes
    total: int


@dataclass(frozen=True)
class Limit:
    """A resource limit of this process that is set."""

    name: str  # as in `setrlimit`
    bytes: int


@dataclass(frozen=True)
class Network:
    """The means of a job of several processes to reach each other."""

    backends: tuple[str, ...]  # of torch.distributed: "gloo", "nccl"
    address: str | Unknown  # the one to which this host's name leads
    interfaces: tuple[str, ...] = ()  # names of those that are there


@dataclass(frozen=True)
class Facts:
    versions: Versions
    torch: Torch
    nvml: Nvml | Unknown
    # the variables that matter and are set
    environment: Mapping[str, str] = field(default_factory=dict)
    host: Host | Unknown = Unknown("not looked at")
    cgroup: CgroupMemory | Unknown | None = None  # None: there is no limit
    limits: tuple[Limit, ...] | Unknown = ()
    platform: str = "linux"  # as `sys.platform`
    wsl: bool = False  # this is Linux inside Windows
    own_pids: bool = True  # the driver's PIDs mean the same processes here: not so in a container
    trainers: tuple[Trainer, ...] = ()
    network: Network | Unknown | None = None  # None: torch has no process groups here

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return self.nvml.gpus if isinstance(self.nvml, Nvml) else ()

    @property
    def devices(self) -> tuple[TorchDevice, ...]:
        return () if isinstance(self.torch.devices, Unknown) else self.torch.devices

    @property
    def nvml_absent(self) -> bool:
        return isinstance(self.nvml, Unknown) and self.nvml.absent

    @property
    def integrated(self) -> bool:
        """True if every device shares the host's memory."""
        return bool(self.devices) and all(device.integrated for device in self.devices)
