"""What the facts mean for training with elastic_mbs. Pure: the same facts always give the same findings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from elastic_mbs.cli.doctor.allocator import Setting, conflict, settings
from elastic_mbs.cli.doctor.facts import Facts, Gpu, Nvml, TorchDevice, Unknown
from elastic_mbs.events import format_bytes
from elastic_mbs.memory.processes import describe

LITTLE = 0.1
"""Below this share of free memory there is a warning."""

OLDEST_TORCH = (2, 8)


class Level(StrEnum):
    """How bad it is. Only a problem changes the exit code."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        level: how bad it is.
        topic: what it is about, one word.
        found: what was found.
        means: what it means for training; may be empty where all is well.
        do: what to do; empty where there is nothing.
    """

    level: Level
    topic: str
    found: str
    means: str = ""
    do: str = ""


def judge(facts: Facts) -> list[Finding]:
    """All findings, by topic; the topics in the order in which one would look for a fault."""
    parts = (_versions, _driver, _devices, _modes, _cotenants, _allocator, _host, _limits, _platform)
    return [finding for part in parts for finding in part(facts)]


def _versions(facts: Facts) -> Iterator[Finding]:
    seen = facts.versions
    found = f"elastic_mbs {seen.elastic_mbs}, torch {seen.torch}, Python {seen.python}, psutil {seen.psutil or 'unknown'}, on {seen.system}"
    if _release(seen.torch) < OLDEST_TORCH:
        yield Finding(Level.PROBLEM, "versions", found, "elastic_mbs needs torch 2.8 or later.", "Upgrade torch: pip install --upgrade 'torch>=2.8'.")
    else:
        yield Finding(Level.OK, "versions", found)
    if seen.pynvml is not None:
        yield Finding(
            Level.WARNING,
            "versions",
            f"the package pynvml {seen.pynvml} is installed",
            "It is deprecated, brings the same module as nvidia-ml-py, and may hide it behind an old copy; torch warns of it, too.",
            "pip uninstall -y pynvml && pip install --force-reinstall nvidia-ml-py",
        )
    if seen.nvidia_ml_py is None:
        yield Finding(
            Level.WARNING if _cuda_works(facts) else Level.NOTE,
            "versions",
            "the package nvidia-ml-py is not installed",
            "NVML cannot be asked: free memory comes from the CUDA runtime, and co-tenants cannot be named.",
            "pip install nvidia-ml-py",
        )


def _driver(facts: Facts) -> Iterator[Finding]:
    torch, nvml, wants = facts.torch, facts.nvml, _build(facts)
    gpus = [gpu for gpu in nvml.gpus if gpu.parent is None] if isinstance(nvml, Nvml) else []
    if isinstance(nvml, Nvml):
        found = f"NVML answers: driver {nvml.driver}, which serves CUDA up to {nvml.cuda}; {_count(len(gpus), 'GPU')}"
        yield Finding(Level.OK, "driver", found)
    if torch.cuda is None and torch.hip is None:
        if gpus:
            yield Finding(
                Level.PROBLEM,
                "driver",
                f"torch {facts.versions.torch} is a build without CUDA, and there is {gpus[0].name}",
                "Training runs on the CPU, and nothing here reads the GPU.",
                "Install a build with CUDA: https://pytorch.org/get-started/locally/ has the command.",
            )
        elif isinstance(nvml, Unknown) and not nvml.absent:
            yield Finding(Level.WARNING, "driver", f"NVML is broken: {nvml.why}", *_broken_driver(facts))
        else:
            means = "Training runs on the CPU; memory is read from the host, and MemoryBudget can limit it."
            yield Finding(Level.NOTE, "driver", f"no GPU: torch {facts.versions.torch} has no CUDA, and no driver was found", means)
    elif torch.hip is not None:
        means = "NVML is NVIDIA's: free memory comes from the runtime, and co-tenants cannot be named."
        yield Finding(Level.NOTE, "driver", f"torch is built for ROCm {torch.hip}", means)
    elif isinstance(torch.devices, Unknown) or not torch.devices:
        why = torch.devices.why if isinstance(torch.devices, Unknown) else "torch sees no device"
        if isinstance(nvml, Unknown) and nvml.absent:
            means = "Training runs on the CPU. That is as it should be on a machine without an NVIDIA GPU; otherwise the driver is missing."
            do = "If there is a GPU: install its driver, or start the container with the GPU (docker run --gpus all)."
            yield Finding(Level.NOTE, "driver", f"no NVIDIA driver: {nvml.why}", means, do)
        else:
            means = f"Training on the GPU cannot start ({wants}): {why}"
            yield Finding(Level.PROBLEM, "driver", "torch cannot use the GPU", means, _way_to_a_device(facts))
    elif isinstance(nvml, Unknown) and nvml.absent and _shares_memory(facts):
        yield Finding(Level.NOTE, "driver", f"no NVML: {nvml.why}", "Boards like this often have none, and need none: memory is read from the host.")
    elif isinstance(nvml, Unknown):
        means = "Free memory comes from the CUDA runtime, which is as good; co-tenants cannot be named."
        if not nvml.absent:
            means = "Free memory comes from the CUDA runtime, but is in doubt: micro-batches shrink and do not grow until NVML answers."
        yield Finding(Level.WARNING, "driver", f"CUDA works, NVML does not: {nvml.why}", means, _way_to_nvml(facts))


def _broken_driver(facts: Facts) -> tuple[str, str]:
    return "A GPU that is there cannot be used until the driver answers.", _way_to_nvml(facts)


def _build(facts: Facts) -> str:
    return f"torch is built for CUDA {facts.torch.cuda}" if facts.torch.cuda else "torch is built without CUDA"


def _way_to_a_device(facts: Facts) -> str:
    visible = dict(facts.environment).get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "none", "None", "NoDevFiles"):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides every device: unset it."
    nvml = facts.nvml
    if isinstance(nvml, Nvml):
        if facts.torch.cuda is not None and _release(nvml.cuda)[:1] and _release(nvml.cuda)[0] < _release(facts.torch.cuda)[0]:
            return f"The driver serves CUDA up to {nvml.cuda}: update it, or install a torch that is built for an older CUDA."
        if any(gpu.mig for gpu in nvml.gpus) and not any(gpu.parent is not None for gpu in nvml.gpus):
            return "MIG mode is on and there is no instance: create one (nvidia-smi mig -cgi … -C), or switch MIG off."
        if visible is not None:
            return f"CUDA_VISIBLE_DEVICES={visible!r} may name no device that is there: nvidia-smi -L lists them."
    return _way_to_nvml(facts)


def _way_to_nvml(facts: Facts) -> str:
    capabilities = dict(facts.environment).get("NVIDIA_DRIVER_CAPABILITIES")
    if isinstance(facts.nvml, Unknown) and facts.nvml.absent:
        now = f" (now {capabilities!r})" if capabilities is not None else ""
        return f"In a container, ask for the driver's utilities: NVIDIA_DRIVER_CAPABILITIES=compute,utility{now}."
    if not facts.own_pids:
        return "Start the container again: it may have lost its rights to the device, as after 'systemctl daemon-reload' on the host."
    return "See what nvidia-smi says; after an update of the driver, load its module again or reboot."


def _devices(facts: Facts) -> Iterator[Finding]:
    devices = () if isinstance(facts.torch.devices, Unknown) else facts.torch.devices
    gpus = {gpu.uuid.partition("-")[2]: gpu for gpu in facts.nvml.gpus} if isinstance(facts.nvml, Nvml) else {}
    for device in devices:
        gpu = gpus.get(device.uuid) if device.uuid is not None else None
        yield from _device(facts, device, gpu)
    visible = dict(facts.environment).get("CUDA_VISIBLE_DEVICES")
    moved = [
        (device.index, gpu.index)
        for device in devices
        if device.uuid is not None and (gpu := gpus.get(device.uuid)) is not None and gpu.parent is None and gpu.index != device.index
    ]
    if moved:
        pairs = ", ".join(f"cuda:{ours} is nvidia-smi's {theirs}" for ours, theirs in moved)
        because = f" (CUDA_VISIBLE_DEVICES={visible!r})" if visible is not None else " (CUDA puts the fastest first)"
        means = "elastic_mbs finds devices by UUID, so its readings are right; torch.cuda's own functions on NVML may look at another card."
        yield Finding(
            Level.NOTE, "devices", f"the numbers differ: {pairs}{because}", means, "CUDA_DEVICE_ORDER=PCI_BUS_ID gives both the same order."
        )


def _device(facts: Facts, device: TorchDevice, gpu: Gpu | None) -> Iterator[Finding]:
    place = f"cuda:{device.index} is {device.name}, {format_bytes(device.total)}"
    free = gpu.free if gpu is not None and isinstance(gpu.free, int) else device.free
    amount = f", {format_bytes(free)} free" if isinstance(free, int) else ""
    if device.allocation not in (None, "worked"):
        means = f"An allocation of 1 MiB failed: {device.allocation}"
        yield Finding(Level.PROBLEM, "devices", place + amount, means, "Free the device (see co-tenants), or check its compute mode with nvidia-smi.")
        return
    if gpu is None:
        where = "NVML does not know it" if isinstance(facts.nvml, Nvml) else "NVML was not asked"
    elif gpu.parent is None:
        where = f"nvidia-smi's GPU {gpu.index}, {gpu.uuid}"
    else:
        where = f"a MIG instance of nvidia-smi's GPU {gpu.parent}, {gpu.uuid}"
    yield Finding(Level.OK, "devices", f"{place}{amount} ({where})")
    if device.integrated:
        means = "Its memory is the host's: headroom is what the host has available, so programs on the CPU are co-tenants, too."
        yield Finding(
            Level.NOTE, "devices", f"cuda:{device.index} shares the host's memory", means, "Leave room for the host: start few DataLoader workers."
        )
    elif gpu is None and isinstance(facts.nvml, Nvml):
        means = "Free memory comes from the CUDA runtime, which is as good; co-tenants cannot be named."
        yield Finding(Level.NOTE, "devices", f"NVML does not list cuda:{device.index} ({device.uuid or 'torch tells no UUID'})", means)
    elif gpu is not None and isinstance(gpu.free, Unknown):
        means = "Free memory comes from the CUDA runtime. A discrete card always has figures, so this one or its driver may be failing."
        do = "Look for Xid errors in the kernel's log (dmesg), and at nvidia-smi -q."
        yield Finding(Level.WARNING, "devices", f"NVML has no memory figures for cuda:{device.index}: {gpu.free.why}", means, do)
    if gpu is not None and gpu.parent is not None:
        means = "Memory of the instance is its own: neighbours on other instances cannot take it, and it cannot have theirs."
        yield Finding(
            Level.NOTE, "devices", f"cuda:{device.index} is a MIG instance", means, "A process can use one instance: name it in CUDA_VISIBLE_DEVICES."
        )
    if device.fraction < 1:
        means = f"This process may hold {format_bytes(device.fraction * device.total)} of it; elastic_mbs counts the rest as held by others."
        yield Finding(Level.NOTE, "devices", f"a memory fraction of {device.fraction:g} is set for cuda:{device.index}", means)


def _modes(facts: Facts) -> Iterator[Finding]:
    for gpu in facts.nvml.gpus if isinstance(facts.nvml, Nvml) else ():
        if gpu.compute_mode == "prohibited":
            means = "No process may use it."
            yield Finding(
                Level.PROBLEM,
                "devices",
                f"nvidia-smi's GPU {gpu.index} is in compute mode 'prohibited'",
                means,
                f"nvidia-smi -i {gpu.index} -c DEFAULT",
            )
        elif gpu.compute_mode.startswith("exclusive"):
            means = "One process at a time may use it: nobody takes memory away, and a second process fails at its first use."
            yield Finding(Level.NOTE, "devices", f"nvidia-smi's GPU {gpu.index} is in compute mode '{gpu.compute_mode}'", means)
        if isinstance(gpu.free, Unknown) and not gpu.uuid:
            means = "It cannot be used."
            yield Finding(
                Level.WARNING,
                "devices",
                f"nvidia-smi's GPU {gpu.index} does not answer: {gpu.free.why}",
                means,
                "A GPU that is lost needs a reset or a reboot.",
            )


def _cotenants(facts: Facts) -> Iterator[Finding]:
    if not isinstance(facts.nvml, Nvml):
        return
    seen = _seen(facts)
    for gpu in facts.nvml.gpus:
        place = f"nvidia-smi's GPU {gpu.index}" if gpu.parent is None else f"MIG instance {gpu.index} of nvidia-smi's GPU {gpu.parent}"
        if gpu.uuid.partition("-")[2] not in seen and seen:
            continue
        if isinstance(gpu.holders, tuple) and gpu.holders:
            means = "They can take and give memory while training runs; elastic_mbs follows."
            if not facts.own_pids:
                means += " The driver's PIDs are not the ones in here, so they cannot be named, and this process may be among them."
            elif all(holder.bytes is None for holder in gpu.holders):
                means += " This driver does not tell how much each one holds."
            yield Finding(Level.NOTE, "co-tenants", f"{_count(len(gpu.holders), 'process', 'processes')} on {place}: {describe(gpu.holders)}", means)
        if isinstance(gpu.free, int) and gpu.total and gpu.free < LITTLE * gpu.total and not gpu.mig:
            means = "Training starts at a small micro-batch, or fails at the smallest one, until somebody leaves."
            found = f"{place} has {format_bytes(gpu.free)} of {format_bytes(gpu.total)} free"
            yield Finding(Level.WARNING, "co-tenants", found, means, "Wait, end what is not needed there, or train on another device.")


def _allocator(facts: Facts) -> Iterator[Finding]:
    # ROCm's own name means nothing to CUDA
    environment = [pair for pair in facts.environment if facts.torch.hip is not None or pair[0] != "PYTORCH_HIP_ALLOC_CONF"]
    chosen: list[Setting] = settings(environment)
    if conflict(environment):
        found = "more than one of PYTORCH_ALLOC_CONF and its older names is set, and they differ"
        yield Finding(Level.WARNING, "allocator", found, "Which one counts depends on torch's version.", "Set one of them only.")
    for setting in chosen:
        if setting.error:
            means = "torch refuses such a value when CUDA starts."
            yield Finding(Level.WARNING, "allocator", f"{setting.variable} cannot be read: {setting.error}", means, "Write name:value,name:value.")
    values = {setting.name: setting.value for setting in chosen if not setting.error}
    if dict(facts.environment).get("PYTORCH_NO_CUDA_MEMORY_CACHING") not in (None, "0"):
        means = "Every tensor asks the driver: slow, and without statistics, so that no peak is ever learned and sizes hardly grow."
        yield Finding(Level.WARNING, "allocator", "PYTORCH_NO_CUDA_MEMORY_CACHING is set", means, "Unset it; it is for debugging.")
    if not _cuda_works(facts):
        return
    if "cudaMallocAsync" in (facts.torch.allocator, values.get("backend")):
        means = "It reports zero for several statistics, so that no peak is learned and sizes grow by trial only."
        yield Finding(Level.WARNING, "allocator", "the backend is cudaMallocAsync", means, "Use the native one, with expandable_segments:True.")
    elif values.get("expandable_segments", "").lower() == "true":
        if facts.platform == "win32" or facts.wsl:
            means = "Not every driver there can do this; torch then warns and goes on without."
            yield Finding(Level.NOTE, "allocator", "expandable_segments is on", means)
        else:
            means = (
                "Most fragmentation is gone, so that a predicted peak fits as predicted. Should the driver itself run out in the middle of a "
                "mapping, the process cannot be trusted any more: elastic_mbs then raises PoisonedDeviceError, for a restart from a checkpoint."
            )
            yield Finding(Level.OK, "allocator", "expandable_segments is on", means)
    elif facts.platform != "win32":
        means = "Sizes change while training, which leaves gaps in the memory: some of it cannot be used, and growth stops earlier."
        variable = "PYTORCH_ALLOC_CONF" if _release(facts.versions.torch) >= (2, 9) else "PYTORCH_CUDA_ALLOC_CONF"
        others = "".join(f"{name}:{value}," for name, value in values.items() if name != "expandable_segments")
        but = ", if this board can: not all of its kind do" if _shares_memory(facts) else ""
        yield Finding(Level.NOTE, "allocator", "expandable_segments is off", means, f"export {variable}={others}expandable_segments:True{but}")
    if "per_process_memory_fraction" in values:
        means = "elastic_mbs takes it for the limit that it is."
        yield Finding(Level.NOTE, "allocator", f"per_process_memory_fraction is {values['per_process_memory_fraction']}", means)


def _host(facts: Facts) -> Iterator[Finding]:
    if isinstance(facts.host, Unknown):
        yield Finding(Level.WARNING, "host", f"the host's memory cannot be read: {facts.host.why}", "On a CPU, micro-batches do not grow without it.")
    else:
        found = f"{format_bytes(facts.host.available)} of {format_bytes(facts.host.total)} are available"
        if facts.host.available < LITTLE * facts.host.total:
            means = "DataLoader workers, outputs kept on the host and training on the CPU may be ended by the kernel, without an error."
            yield Finding(Level.WARNING, "host", found, means, "End what is not needed, or start fewer DataLoader workers.")
        else:
            yield Finding(Level.OK, "host", found)
    group = facts.cgroup
    if isinstance(group, Unknown):
        yield Finding(Level.WARNING, "host", f"the cgroup cannot be read: {group.why}", "A container's limit is not known.")
    elif group is not None:
        place, left = f"a cgroup (version {group.version}, {group.path})", format_bytes(group.available)
        found = f"{place} limits this process to {format_bytes(group.limit)}: {left} are left"
        means = "Above it the kernel ends the process, and there is no error to recover from."
        do = "Training on a CPU: memory=MemoryOptions(host_guard=True) turns that into an error that is recovered."
        little = group.available < LITTLE * group.limit
        yield Finding(Level.WARNING if little else Level.NOTE, "host", found, means, do)


def _limits(facts: Facts) -> Iterator[Finding]:
    if isinstance(facts.limits, Unknown):
        yield Finding(Level.NOTE, "limits", f"resource limits cannot be read: {facts.limits.why}")
        return
    for limit in facts.limits:
        found = f"{limit.name} is {format_bytes(limit.bytes)}"
        if limit.name == "RLIMIT_RSS":
            yield Finding(Level.NOTE, "limits", found, "Linux takes no notice of it.")
        elif limit.name == "RLIMIT_AS" and _cuda_works(facts):
            means = (
                "CUDA reserves addresses for the memory of all devices and the host, far more than it uses: its start, or an allocation, will fail."
            )
            yield Finding(Level.PROBLEM, "limits", found, means, "ulimit -v unlimited")
        else:
            means = "Allocations on the host fail above it: as an error that elastic_mbs recovers from where it comes from torch's allocator."
            yield Finding(Level.NOTE, "limits", found, means, f"ulimit {'-v' if limit.name == 'RLIMIT_AS' else '-d'} unlimited, unless it is meant.")


def _platform(facts: Facts) -> Iterator[Finding]:
    if not (facts.wsl or facts.platform == "win32") or not _cuda_works(facts):
        return
    means = (
        "A request for more than is free may succeed and spill into the host's memory: no error, and steps that take many times as long. "
        "Allocator retries and falling throughput are the only signs."
    )
    do = "NVIDIA Control Panel, CUDA - Sysmem Fallback Policy: Prefer No Sysmem Fallback."
    yield Finding(Level.NOTE, "platform", "WSL" if facts.wsl else "Windows", means, do)


def _cuda_works(facts: Facts) -> bool:
    return isinstance(facts.torch.devices, tuple) and bool(facts.torch.devices)


def _shares_memory(facts: Facts) -> bool:
    """Whether every GPU here shares the host's memory."""
    return isinstance(facts.torch.devices, tuple) and all(device.integrated for device in facts.torch.devices)


def _seen(facts: Facts) -> set[str]:
    """UUIDs of the devices that torch sees: the others are somebody else's business."""
    return {device.uuid for device in facts.torch.devices if device.uuid} if isinstance(facts.torch.devices, tuple) else set()


def _release(version: str) -> tuple[int, ...]:
    """`"2.13.0+cu130"` → (2, 13); empty for what is no version."""
    parts = version.partition("+")[0].split(".")[:2]
    return tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else ()


def _count(count: int, one: str, more: str | None = None) -> str:
    return f"{count} {one if count == 1 else more or one + 's'}"
