"""Building the simulated CUDA with the system's compiler, and running under it.

It is built once for each version of its sources and of torch.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from elastic_mbs.errors import UsageError

from .. import sources

HERE = Path(__file__).parent
RUNTIME, OPERATIONS = "libcudart.so.13", "libsimcuda_operations.so"
NAMES = ("libcuda.so.1", "libnvidia-ml.so.1")  # under which the runtime is looked for, too
ABI = 13  # of CUDA: older ones have other names and other structures
WAY_OUT = "`make simcuda` makes an environment with one"


def inside() -> bool:
    """Return whether this process runs under the simulation."""
    return Path(os.environ.get("LD_PRELOAD", "")).name == RUNTIME


def environment() -> dict[str, str]:
    """Return the variables under which a process sees the simulated devices.

    Missing libraries are built, which takes a minute.
    """
    folder = built()
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")]))
    # huge pages: every result is made in memory that is fresh from the kernel, page by page (a
    # third of the time on large tensors)
    return {
        "LD_PRELOAD": str(folder / RUNTIME),
        "LD_LIBRARY_PATH": path,
        "SIMCUDA_OPERATIONS": str(folder / OPERATIONS),
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }


def trouble() -> str | None:
    """Return why the simulation cannot be had in this environment; None if it can."""
    if inside():
        return None
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return f"the simulated CUDA needs Linux with glibc, and this is {sys.platform}"
    version = _cuda_of_torch()
    if version is None or version.split(".")[0] != str(ABI):
        return (
            f"the simulated CUDA needs torch with CUDA {ABI}, and this one has "
            f"{version or 'none'}: {WAY_OUT}"
        )
    if not all((folder / "cuda_runtime_api.h").exists() for folder in _headers()):
        return (
            "the simulated CUDA needs the headers that torch's CUDA wheels bring, and they are not "
            f"in {_headers()[0]}: {WAY_OUT}"
        )
    if shutil.which(_compiler()[0]) is None:
        return (
            f"the simulated CUDA needs a C++ compiler, and there is no {_compiler()[0]!r}: install "
            "one (apt install g++), or name yours in CXX"
        )
    return sources.missing(HERE / "runtime", "the simulated CUDA")


def trouble_here() -> str | None:
    """Return why this process sees no simulated device; None if it does."""
    return (
        None
        if inside()
        else trouble()
        or "the simulated devices are there only for a process that was started under them: ask "
        "for --kind simcuda"
    )


def start_again() -> NoReturn:
    """Start this very command once more, under the simulation and in the same process.

    Raises:
        UsageError: the simulation cannot be had.
    """
    variables = {"SIMCUDA_FILE": str(_own_device()), **os.environ, **environment()}
    print("under the simulated CUDA: torch's allocator and real numbers, no device", flush=True)
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], variables)


def _own_device() -> Path:
    """Return a file of this process's own: two runs beside each other do not share a device.

    The files of runs that have ended are removed.
    """
    folder, name = Path("/dev/shm"), f"simcuda-{os.getuid()}-"
    for old in folder.glob(f"{name}*"):
        if not Path("/proc", old.name.removeprefix(name)).exists():
            old.unlink(missing_ok=True)
    return folder / f"{name}{os.getpid()}"


@functools.cache
def built() -> Path:
    """Return the folder with the libraries, built where they are not there yet.

    Raises:
        UsageError: they cannot be built.
    """
    if inside():
        return Path(os.environ["LD_PRELOAD"]).parent
    problem = trouble()
    if problem is not None:
        raise UsageError(problem)
    key = hashlib.sha256(
        b"\0".join(
            [
                _torch().as_posix().encode(),
                importlib.metadata.version("torch").encode(),
                *(path.read_bytes() for path in sorted(HERE.glob("*/*.*"))),
            ]
        )
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elastic_mbs"
    folder = cache / f"simcuda-{key.hexdigest()[:16]}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as made:
            _build(Path(made))
            shutil.copytree(made, half := Path(f"{made}.half"), symlinks=True)
        try:
            half.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(half)
    return folder


def _build(folder: Path) -> None:
    """Compile the libraries into a folder, both at the same time."""
    commands = _commands(folder)
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    for process, command in zip(running, commands, strict=True):
        said = process.communicate()[0]
        if process.returncode:
            raise UsageError(
                f"the simulated CUDA does not compile with {shlex.join(map(str, command))}, which "
                f"said:\n{said.strip()[-2000:]}"
            )
    for name in NAMES:
        (folder / name).symlink_to(RUNTIME)


def _commands(folder: Path) -> list[list[str | Path]]:
    """Return the compiler's commands for the runtime and for the operations."""
    torch = _torch()
    includes = [
        f"-I{path}"
        for path in (*_headers(), torch / "include", torch / "include/torch/csrc/api/include")
    ]
    common = [*_compiler(), "-std=c++17", "-O1", "-fPIC", "-shared", *includes]
    libraries = [
        f"-L{torch / 'lib'}",
        "-lc10",
        "-ltorch_cpu",
        "-lc10_cuda",
        f"-Wl,-rpath,{torch / 'lib'}",
    ]
    script = folder / "versions"
    script.write_text(f"{RUNTIME} {{ global: *; }};\n")
    runtime = [f"-Wl,-soname,{RUNTIME}", f"-Wl,--version-script={script}", "-ldl", "-lpthread"]
    return [
        [
            *common,
            "-Wall",
            "-Wno-deprecated-declarations",
            "-o",
            folder / RUNTIME,
            *sorted((HERE / "runtime").glob("*.cpp")),
            *runtime,
        ],
        [
            *common,
            "-w",
            "-D_GLIBCXX_USE_CXX11_ABI=1",
            "-o",
            folder / OPERATIONS,
            HERE / "torch_ops/operations.cpp",
            *libraries,
        ],
    ]


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _cuda_of_torch() -> str | None:
    import torch

    return torch.version.cuda


def _headers() -> Sequence[Path]:
    """Return the folders of CUDA's headers; its own wheel lacks some that Triton's has."""
    packages = _torch().parent
    return packages / f"nvidia/cu{ABI}/include", packages / "triton/backends/nvidia/include"


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]
