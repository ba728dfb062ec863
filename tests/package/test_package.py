"""What the package names is there, and importing it brings nothing heavy along."""

from __future__ import annotations

import subprocess
import sys

import elastic_mbs


def test_every_public_name_is_there() -> None:
    assert [name for name in elastic_mbs.__all__ if not hasattr(elastic_mbs, name)] == []


def test_importing_the_package_does_not_import_the_compiler() -> None:
    """An optimizer made at import for its attributes brought torch._dynamo along: a second more, and numpy's stream in every snapshot."""
    code = "import sys, elastic_mbs; print([name for name in ('torch._dynamo', 'numpy.random', 'matplotlib', 'rich') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
