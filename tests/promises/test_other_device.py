"""Promises on a device that torch does not know (PrivateUse1)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import other_device

TESTS = Path(__file__).with_name("on_other_device.py")


@pytest.mark.skipif(not other_device.has_compiler(), reason="needs a C++ compiler")
def test_a_device_unknown_to_torch_is_trained_on_exactly_or_refused() -> None:
    root = TESTS.parents[2]
    command = [sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", str(TESTS)]
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
