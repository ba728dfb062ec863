"""Compiles the stub of libnvidia-ml.so.1 and runs code against it with the real pynvml, in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

# the package without its __init__, which imports torch: seconds for each process, and none of them needs it
_PRELUDE = """
import json, os, sys, types
for name in ("elastic_mbs", "elastic_mbs.memory", "elastic_mbs.cli.doctor"):
    module = types.ModuleType(name)
    module.__path__ = [os.path.join({root!r}, *name.split("."))]
    sys.modules[name] = module

class Clock:
    now = 0.0
    def __call__(self):
        return self.now

def driver(text):
    part = os.environ["NVML_STUB_STATE"] + ".new"
    with open(part, "w") as file:
        file.write(text)
    os.replace(part, os.environ["NVML_STUB_STATE"])

def tell(**values):
    print(json.dumps(values, default=lambda value: vars(value)))
"""


class NvmlStub:
    """A compiled stub and the file that it reads.

    Args:
        folder: where both are put.
        old: leave out what old drivers do not have.
    """

    def __init__(self, folder: Path, *, old: bool = False) -> None:
        compiler = shutil.which("cc")
        if compiler is None or sys.platform != "linux":
            why = "the stub of NVML needs Linux and a C compiler (cc)"
            if os.environ.get("CI") == "true":
                pytest.fail(why)
            pytest.skip(why)
        self.folder = folder
        self.state = folder / "state"
        command = [compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", str(folder / "libnvidia-ml.so.1")]
        command += ["-DV1_ONLY"] * old + [str(Path(__file__).with_name("nvml_stub.c"))]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr

    def run(self, state: str, code: str, *, torch: bool = False, **environment: str) -> list[dict[str, Any]]:
        """Runs code under a driver.

        Args:
            state: what the file says at the start; `driver(text)` in the code rewrites it.
            code: Python; what it gives to `tell(name=value)` comes back.
            torch: import the package whole, with torch; takes seconds.
            environment: variables to set.

        Returns:
            One dict for each `tell`.
        """
        self.state.write_text(state)
        prelude = _PRELUDE.format(root=str(ROOT))
        if torch:
            prelude = prelude.replace("for name in (", "for name in () and (")
        variables = os.environ | {"LD_LIBRARY_PATH": str(self.folder), "NVML_STUB_STATE": str(self.state), "PYTHONPATH": str(ROOT)} | environment
        command = [sys.executable, "-c", prelude + textwrap.dedent(code)]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]
