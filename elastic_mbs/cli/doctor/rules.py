"""The rules that judge facts: conditions and figures of the table in `rules.toml`.

The same facts always give the same findings.
"""

from __future__ import annotations

import re
import string
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources
from types import SimpleNamespace
from typing import Any

from elastic_mbs import DistributedOptions
from elastic_mbs.cli.doctor.facts import (
    ALLOCATOR,
    Facts,
    Gpu,
    Network,
    Nvml,
    TorchDevice,
    Unknown,
)
from elastic_mbs.events import format_bytes
from elastic_mbs.memory import CgroupMemory, Holder
from elastic_mbs.memory.processes import describe

LITTLE = 0.1  # a smaller share of free memory is little
# what generates texts beside a training, by how the names of its processes begin, in small letters
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
_SETTING = re.compile(r"(\w+):(\[[^\]]*\]|[^,\[\]]+)")  # in name:value,name:[a:b,c:d]


class Level(StrEnum):
    """The severity of a finding. Only a problem changes the exit code."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """A judgement on one fact, with its meaning and what to do."""

    level: Level
    topic: str  # one word
    found: str
    means: str = ""  # for training; may be empty where all is well
    do: str = ""  # empty where there is nothing to do


class Words(string.Formatter):
    """Formatter of templates; its format `B` writes bytes."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return (
            format_bytes(value)
            if format_spec == "B"
            else str(super().format_field(value, format_spec))
        )


# `s` is the subject of a rule: see `subjects`
CONDITIONS: dict[str, Callable[[Any], object]] = {
    "always": lambda s: True,
    "torch is too old": lambda s: release(s.f.versions.torch) < (2, 8),
    "the deprecated pynvml is installed": lambda s: s.f.versions.pynvml is not None,
    "the trainer's version was tested": lambda s: s.t.tested,
    # driver
    "NVML answers": lambda s: isinstance(s.f.nvml, Nvml),
    "NVML is broken": lambda s: isinstance(s.f.nvml, Unknown) and not s.f.nvml.absent,
    "there is no NVML": lambda s: s.f.nvml_absent,
    "torch has no CUDA": lambda s: s.f.torch.cuda is None and s.f.torch.hip is None,
    "there is a GPU": lambda s: s.f.gpus,
    "torch is built for ROCm": lambda s: s.f.torch.hip is not None,
    "torch sees no device": lambda s: not s.f.devices,
    "torch sees a device": lambda s: s.f.devices,
    "every device shares the host's memory": lambda s: s.f.integrated,
    # devices
    "an allocation failed": lambda s: s.d.allocation not in (None, "worked"),
    "the device shares the host's memory": lambda s: s.d.integrated,
    "NVML does not list the device": lambda s: s.g is None and isinstance(s.f.nvml, Nvml),
    "NVML has no figures for the device": lambda s: (
        s.g is not None and isinstance(s.g.free, Unknown)
    ),
    "the device is a MIG instance": lambda s: s.g is not None and s.g.parent is not None,
    "a memory fraction is set": lambda s: s.d.fraction < 1,
    "torch numbers devices in another order": lambda s: s.moved,
    "the GPU is prohibited": lambda s: s.g.compute_mode == "prohibited",
    "the GPU is exclusive": lambda s: s.g.compute_mode.startswith("exclusive"),
    "the GPU does not answer": lambda s: isinstance(s.g.free, Unknown) and not s.g.uuid,
    # co-tenants
    "there are co-tenants": lambda s: s.ours and s.holders,
    "one of them is an engine": lambda s: s.engines,
    "little of the GPU is free": lambda s: (
        s.ours and isinstance(s.g.free, int) and s.g.free < LITTLE * s.g.total and not s.g.mig
    ),
    # allocator
    "allocator settings conflict": lambda s: conflict(s.environment),
    "the cache is off": lambda s: s.environment.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "0") != "0",
    "the backend is cudaMallocAsync": lambda s: (
        "cudaMallocAsync" in (s.f.torch.allocator, s.settings.get("backend"))
    ),
    "segments are expandable": lambda s: (
        s.settings.get("expandable_segments", "").lower() == "true"
    ),
    "segments could be expandable": lambda s: s.f.platform != "win32",
    "the driver can spill into the host's memory": lambda s: s.f.wsl or s.f.platform == "win32",
    # host, limits, platform
    "the host's memory is unknown": lambda s: isinstance(s.f.host, Unknown),
    "little of the host's memory is left": lambda s: s.f.host.available < LITTLE * s.f.host.total,
    "the cgroup is unknown": lambda s: isinstance(s.f.cgroup, Unknown),
    "there is a cgroup": lambda s: s.f.cgroup is not None,
    "little of the cgroup's limit is left": lambda s: (
        isinstance(s.f.cgroup, CgroupMemory) and s.f.cgroup.available < LITTLE * s.f.cgroup.limit
    ),
    "resource limits are unknown": lambda s: isinstance(s.f.limits, Unknown),
    "addresses are limited": lambda s: s.l.name == "RLIMIT_AS",
    # jobs of several processes
    "there are process groups": lambda s: isinstance(s.f.network, Network),
    "the network is unknown": lambda s: isinstance(s.f.network, Unknown),
    "an interface is named that is not there": lambda s: s.interface and not s.interface_is_there,
    "an interface is named": lambda s: s.interface,
    "the host's name leads nowhere": lambda s: isinstance(s.f.network.address, Unknown),
    "the host's name leads to itself alone": lambda s: s.f.network.address.startswith("127."),
    "errors of NCCL are not handled": lambda s: (
        s.environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0"
        and s.environment.get("TORCH_NCCL_BLOCKING_WAIT", "0") == "0"
    ),
    "torchrun started this": lambda s: "TORCHELASTIC_RUN_ID" in s.environment,
    "torchrun starts nothing again": lambda s: (
        s.environment.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0"
    ),
    "a new start finds the old store": lambda s: (
        s.environment.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1"
    ),
}


@cache
def table() -> dict[str, dict[str, list[dict[str, str]]]]:
    """Return the rules by topic and group, in order."""
    return tomllib.loads(
        resources.files(__package__).joinpath("rules.toml").read_text(encoding="utf-8")
    )


def judge(facts: Facts) -> list[Finding]:
    """Return all findings, by topic."""
    scopes = subjects(facts)
    return [
        finding
        for topic, groups in table().items()
        for group, rules in groups.items()
        for subject in scopes[group.partition("-")[0]]
        for finding in _first(topic, rules, subject)
    ]


def _first(topic: str, rules: list[dict[str, str]], subject: SimpleNamespace) -> list[Finding]:
    """Return the finding of the first rule that applies."""
    for rule in rules:
        level = next(level for level in Level if level in rule)
        if all(CONDITIONS[condition](subject) for condition in rule[level].split(", ")):
            return [
                Finding(
                    level,
                    topic,
                    *(
                        Words().vformat(rule.get(name, ""), (), vars(subject))
                        for name in ("found", "means", "do")
                    ),
                )
            ]
    return []


def subjects(facts: Facts) -> dict[str, list[SimpleNamespace]]:
    """Return the subjects of the groups of rules, by the group's name.

    They are the machine, each device of torch, each GPU of NVML, each resource limit, each trainer.
    """
    machine = _machine(facts)
    gpus = {gpu.uuid.partition("-")[2]: gpu for gpu in facts.gpus}
    limits = facts.limits if isinstance(facts.limits, tuple) else ()
    return {
        "machine": [SimpleNamespace(**machine)],
        "device": [
            SimpleNamespace(**machine, **_device(facts, device, gpus.get(device.uuid or "")))
            for device in facts.devices
        ],
        "gpu": [SimpleNamespace(**machine, **_gpu(facts, gpu)) for gpu in facts.gpus],
        "trainer": [SimpleNamespace(**machine, t=trainer) for trainer in facts.trainers],
        "limit": [
            SimpleNamespace(**machine, l=limit, flag="-v" if limit.name == "RLIMIT_AS" else "-d")
            for limit in limits
        ],
    }


def _machine(facts: Facts) -> dict[str, Any]:
    v, environment = facts.versions, dict(facts.environment)
    if facts.torch.hip is None:
        environment.pop("PYTORCH_HIP_ALLOC_CONF", None)  # ROCm's own name means nothing to CUDA
    conf = settings(environment)
    others = "".join(
        f"{name}:{value}," for name, value in conf.items() if name != "expandable_segments"
    )
    variable = "PYTORCH_ALLOC_CONF" if release(v.torch) >= (2, 9) else "PYTORCH_CUDA_ALLOC_CONF"
    doubt = ", if this board can: not all of its kind do" if facts.integrated else ""
    return {
        "f": facts,
        "versions": f"elastic_mbs {v.elastic_mbs}, torch {v.torch}, Python {v.python}, psutil "
        f"{v.psutil or 'unknown'}, on {v.system}",
        "gpus": sum(gpu.parent is None for gpu in facts.gpus),
        "no_device": facts.torch.devices.why
        if isinstance(facts.torch.devices, Unknown)
        else "torch sees no device",
        "nvml_remedy": _nvml_remedy(facts),
        "device_remedy": _device_remedy(facts),
        "moved": _moved(facts),
        "environment": environment,
        "settings": conf,
        "export": f"{variable}={others}expandable_segments:True{doubt}",
        "system": "WSL" if facts.wsl else "Windows",
        **_network(facts),
    }


def _network(facts: Facts) -> dict[str, Any]:
    """Return the words about the network."""
    network = facts.network
    interface = facts.environment.get("GLOO_SOCKET_IFNAME", "")
    names = network.interfaces if isinstance(network, Network) else ()
    backends = network.backends if isinstance(network, Network) else ()
    return {
        "interface": interface,
        "interface_is_there": set(interface.split(",")) <= set(names),
        "interfaces": ", ".join(names),
        "backends": ", ".join(backends) or "none",
        "timeout": DistributedOptions().timeout,
        "restarts": facts.environment.get("TORCHELASTIC_MAX_RESTARTS", "0"),
    }


def _device(facts: Facts, device: TorchDevice, gpu: Gpu | None) -> dict[str, Any]:
    free = gpu.free if gpu is not None and isinstance(gpu.free, int) else device.free
    amount = f", {format_bytes(free)} free" if isinstance(free, int) else ""
    where = "NVML has no reading of it" if gpu is None else f"{_place(gpu)}, {gpu.uuid}"
    place = f"cuda:{device.index} is {device.name}, {format_bytes(device.total)}{amount}"
    return {
        "d": device,
        "g": gpu,
        "place": place,
        "where": where,
        "fraction": device.fraction * device.total,
    }


def _gpu(facts: Facts, gpu: Gpu) -> dict[str, Any]:
    holders = gpu.holders if isinstance(gpu.holders, tuple) else ()
    seen = {device.uuid for device in facts.devices if device.uuid is not None}
    unnamed = ""
    if not facts.own_pids:
        unnamed = (
            " The driver's PIDs are not the ones in here, so they cannot be named, and this "
            "process may be among them."
        )
    elif all(holder.bytes is None for holder in holders):
        unnamed = " This driver does not report how much each one holds."
    return {
        "g": gpu,
        "place": _place(gpu),
        "count": "1 process" if len(holders) == 1 else f"{len(holders)} processes",
        "holders": describe(holders),
        "engines": " and ".join(_engines(holders)),
        "unnamed": unnamed,
        "ours": not seen or gpu.uuid.partition("-")[2] in seen,  # the other GPUs are of no concern
    }


def _engines(holders: Iterable[Holder]) -> list[str]:
    """Return the engines among processes, each once."""
    names = [(holder.name or "").lower() for holder in holders]
    return [
        engine for start, engine in ENGINES.items() if any(name.startswith(start) for name in names)
    ]


def _place(gpu: Gpu) -> str:
    return (
        f"nvidia-smi's GPU {gpu.index}"
        if gpu.parent is None
        else f"MIG instance {gpu.index} of nvidia-smi's GPU {gpu.parent}"
    )


def _moved(facts: Facts) -> str:
    """Name the devices with different numbers for torch and nvidia-smi, and the reason.

    Empty where there is none.
    """
    index = {gpu.uuid.partition("-")[2]: gpu.index for gpu in facts.gpus if gpu.parent is None}
    moved = [
        (device.index, index[device.uuid])
        for device in facts.devices
        if device.uuid in index and index[device.uuid] != device.index
    ]
    if not moved:
        return ""
    visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
    because = (
        "CUDA puts the fastest first" if visible is None else f"CUDA_VISIBLE_DEVICES={visible!r}"
    )
    return (
        ", ".join(f"cuda:{ours} is nvidia-smi's {theirs}" for ours, theirs in moved)
        + f" ({because})"
    )


def _device_remedy(facts: Facts) -> str:
    visible, nvml = facts.environment.get("CUDA_VISIBLE_DEVICES"), facts.nvml
    if visible is not None and visible.strip() in ("", "-1", "none", "None", "NoDevFiles"):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides every device: unset it."
    if isinstance(nvml, Nvml):
        if facts.torch.cuda is not None and release(nvml.cuda)[:1] < release(facts.torch.cuda)[:1]:
            return (
                f"The driver serves CUDA up to {nvml.cuda}: update it, or install a torch that is "
                "built for an older CUDA."
            )
        if any(gpu.mig for gpu in nvml.gpus) and not any(
            gpu.parent is not None for gpu in nvml.gpus
        ):
            return (
                "MIG mode is on and there is no instance: create one (nvidia-smi mig -cgi … -C), "
                "or switch MIG off."
            )
        if visible is not None:
            return (
                f"CUDA_VISIBLE_DEVICES={visible!r} may name no device that is there: "
                "nvidia-smi -L lists them."
            )
    return _nvml_remedy(facts)


def _nvml_remedy(facts: Facts) -> str:
    if facts.nvml_absent and facts.versions.nvidia_ml_py is None:
        return "pip install nvidia-ml-py"
    if facts.nvml_absent:
        now = facts.environment.get("NVIDIA_DRIVER_CAPABILITIES")
        is_now = "" if now is None else f" (now {now!r})"
        return (
            "In a container, ask for the driver's utilities: "
            f"NVIDIA_DRIVER_CAPABILITIES=compute,utility{is_now}."
        )
    if not facts.own_pids:
        return (
            "Start the container again: it may have lost its rights to the device, as after "
            "'systemctl daemon-reload' on the host."
        )
    return (
        "See what nvidia-smi says; after an update of the driver, load its module again or reboot."
    )


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, `"2.13.0+cu130"` → (2, 13); empty for other texts."""
    parts = version.partition("+")[0].split(".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else ()


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the allocator's settings.

    Those that torch cannot read are left out: torch says so itself when CUDA starts.
    """
    return next((_parse(environment[name]) for name in ALLOCATOR if name in environment), {})


def conflict(environment: Mapping[str, str]) -> bool:
    """Return True if two of the variables are set to different values."""
    return (
        len(
            {
                frozenset(_parse(environment[name]).items())
                for name in ALLOCATOR
                if name in environment
            }
        )
        > 1
    )


def _parse(text: str) -> dict[str, str]:
    return dict(_SETTING.findall("".join(text.split())))
