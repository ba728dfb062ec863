"""Names of the package, its imports, and the tree of its errors.

Importing it loads nothing heavy, and each decision that a caller makes has one base among the
errors.
"""

import inspect
import re
import subprocess
import sys

import pytest
import torch

import elastic_mbs
from elastic_mbs import errors
from elastic_mbs.errors import (
    ElasticMBSError,
    MisuseError,
    RecoveryError,
    UnsupportedError,
    UsageError,
)


def test_every_public_name_is_there() -> None:
    assert [name for name in elastic_mbs.__all__ if not hasattr(elastic_mbs, name)] == []


def test_importing_the_package_does_not_import_the_compiler() -> None:
    # An optimizer made at import for its attributes loaded torch._dynamo: a second more, and
    # numpy's stream in every snapshot.
    code = (
        "import sys, elastic_mbs; print([name for name in ('torch._dynamo', 'numpy.random', "
        "'matplotlib', 'rich') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and value.__module__ == errors.__name__
]
BRANCHES = {
    UsageError: ValueError,
    MisuseError: RuntimeError,
    UnsupportedError: RuntimeError,
    RecoveryError: RuntimeError,
}


@pytest.mark.parametrize("error", CLASSES)
def test_every_error_is_of_one_branch_and_one_builtin(
    error: type[Exception],
) -> None:
    builtins = [builtin for branch, builtin in BRANCHES.items() if issubclass(error, branch)]
    assert len(builtins) == (error is not ElasticMBSError)
    assert issubclass(error, (ElasticMBSError, *builtins))


def test_the_tree_of_errors_shows_every_one_under_its_base() -> None:
    shown: dict[str, str] = {}
    branch: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"[ ├└│─]*(\w+Error)\b", line):
            depth = found.start(1) // 4
            branch[depth:] = [found[1]]
            shown[found[1]] = branch[depth - 1] if depth else "Exception"
    assert shown == {error.__name__: error.__bases__[0].__name__ for error in CLASSES}


def test_only_what_did_not_fit_is_seen_by_handlers_of_out_of_memory() -> None:
    assert {cls.__name__ for cls in CLASSES if issubclass(cls, torch.OutOfMemoryError)} == {
        "MicroBatchFloorError",
        "OptimizerStepError",
    }
