"""A device that torch does not know, "fakeaccel", by torch's open registration for backends.

Its registration holds for the whole process and cannot be taken back, so tests of it run in a
process of their own.
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import rename_privateuse1_backend

SOURCE = Path(__file__).with_name("backend.cpp")
NAME = "fakeaccel"
COMPILER = shlex.split(os.environ.get("CXX", "")) or ["c++"]


def has_compiler() -> bool:
    return shutil.which(COMPILER[0]) is not None


def library() -> Path:
    """Return the compiled backend; compile it where its source or torch is new."""
    key = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__file__} {torch.__version__}".encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elastic_mbs"
    path = cache / f"{NAME}-{key.hexdigest()[:16]}.so"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            made = Path(folder) / path.name
            subprocess.run([*COMPILER, *_arguments(made)], check=True)
            made.replace(path)
    return path


def _arguments(made: Path) -> list[str]:
    root = Path(torch.__file__).parent
    include, libraries = root / "include", root / "lib"
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-w", f"-I{include}"]
    flags += [f"-I{include / 'torch/csrc/api/include'}", "-o", str(made), str(SOURCE)]
    return [*flags, f"-L{libraries}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libraries}"]


def get(name: str) -> int:
    """Return a figure of the device: "live", "peak", "limit", "clock" or "refusals"."""
    figure: int = torch.ops.fakeaccel.get(name)
    return figure


def turn(name: str, value: int) -> None:
    """Set "limit", "typed" (errors by torch's type) or "events", or reset "peak"."""
    torch.ops.fakeaccel.set(name, value)


def register() -> Any:
    """Make the device known to torch for good, and return its module."""
    torch.ops.load_library(library())
    rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, module := bare_module())
    return module


def bare_module() -> Any:
    """Return a module with the functions that torch needs, and the generator's."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.is_available = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = _get_state
    module.set_rng_state = _set_state
    return module


def with_figures(module: Any, total: int) -> None:
    """Give the module the functions that report memory."""
    module.mem_get_info = lambda device: (get("limit") - get("live"), total)
    module.memory_reserved = lambda device: get("live")
    module.memory_stats = lambda device: {
        f"{kind}_bytes.all.{name}": get(figure)
        for kind in ("active", "reserved")
        for name, figure in (("current", "live"), ("peak", "peak"))
    }
    module.reset_peak_memory_stats = lambda device: turn("peak", 0)


def _get_state(device: object = None) -> Tensor:
    state: Tensor = torch.ops.fakeaccel.get_state()
    return state


def _set_state(state: Tensor, device: object = None) -> None:
    torch.ops.fakeaccel.set_state(state)
