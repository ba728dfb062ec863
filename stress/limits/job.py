"""The child's side of `child.py`, run as a file, with the order on standard input.

Only the standard library is used here: what else is imported is the job's to say.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import sys
import traceback
from typing import Any, TextIO


def main() -> int:
    """Runs the job that standard input names; returns the exit code."""
    order = json.load(sys.stdin)
    _import_from(*order["package"])
    out = _take_output()
    _leave_no_core()

    def emit(message: dict[str, Any]) -> None:
        out.write(json.dumps({"message": message}) + "\n")
        out.flush()

    module, _, name = order["job"].partition(":")
    try:
        job: Any = importlib.import_module(module)
        for part in name.split("."):
            job = getattr(job, part)
        job(emit, **order["arguments"])
    except Exception as error:
        traceback.print_exc()
        bad_input = any(kind.__module__ == "elastic_mbs.errors" and kind.__name__ == "UsageError" for kind in type(error).__mro__)
        out.write(json.dumps({"error": {"type": type(error).__name__, "text": str(error), "bad_input": bad_input}}) + "\n")
        out.flush()
        return 1
    return 0


def _import_from(name: str, folder: str) -> None:
    """Imports the tool's package from its folder, wherever the path leads."""
    spec = importlib.util.spec_from_file_location(name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder])
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _take_output() -> TextIO:
    """Standard output for ourselves alone; what anybody prints goes to standard error."""
    ours = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return ours


def _leave_no_core() -> None:
    """A crash is told of; its memory is not written to the disk."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


if __name__ == "__main__":  # pragma: no cover  # in a process of its own
    sys.exit(main())
