"""Names of the package, its imports, and the tree of its errors.

Importing it loads nothing heavy, and each decision that a caller makes has one base among the
errors.
"""

import inspect
import re
import subprocess
import sys
from typing import assert_type

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


def told_by_a_fresh_interpreter(code: str) -> str:
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return found.stdout


def test_every_public_name_is_there() -> None:
    assert [name for name in elastic_mbs.__all__ if not hasattr(elastic_mbs, name)] == []
    assert {*elastic_mbs.__all__} <= {*dir(elastic_mbs)}


FIRST_USES = """
import sys
for use in (
    "elastic_mbs.ElasticMBS",
    "from elastic_mbs import ElasticMBS",
    "from elastic_mbs import *; ElasticMBS",
    "assert 'ElasticMBS' in dir(elastic_mbs)",
    "elastic_mbs.memory.MemoryBudget",  # a module that no line has imported
    "from elastic_mbs import recipes; recipes.linear_scaling",
):
    for name in [name for name in sys.modules if name.startswith("elastic_mbs")]:
        del sys.modules[name]
    import elastic_mbs
    before = "ElasticMBS" in vars(elastic_mbs)
    elastic_mbs.cut = "mine"
    exec(use)
    print(before, {*elastic_mbs.__all__} <= {*vars(elastic_mbs)}, elastic_mbs.cut)
"""


def test_the_first_use_of_a_name_brings_all_and_overwrites_none() -> None:
    told = told_by_a_fresh_interpreter(FIRST_USES)
    assert told.splitlines() == ["False True mine"] * 6


def test_an_unknown_name_is_an_error_that_names_the_package() -> None:
    with pytest.raises(AttributeError, match="'elastic_mbs' has no attribute 'Elastic'"):
        elastic_mbs.Elastic  # type: ignore[attr-defined]  # noqa: B018 - mypy has to miss it, too


def test_a_type_checker_knows_the_names() -> None:
    # mypy holds it (`make lint`): none of them is Any.
    assert_type(elastic_mbs.Policy(), elastic_mbs.Policy)
    assert_type(elastic_mbs.__version__, str)


def test_importing_the_package_does_not_import_the_compiler() -> None:
    # An optimizer made at import for its attributes loaded torch._dynamo: a second more, and
    # numpy's stream in every snapshot.
    code = (
        "import sys; from elastic_mbs import ElasticMBS; print([name for name in ("
        "'torch._dynamo', 'numpy.random', 'matplotlib', 'rich') if name in sys.modules])"
    )
    assert told_by_a_fresh_interpreter(code) == "[]\n"


CLASSES = [value for value in vars(errors).values() if inspect.isclass(value)]
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


def test_tracebacks_name_one_module_for_all_errors() -> None:
    assert {getattr(errors, name).__module__ for name in errors.__all__} == {errors.__name__}


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
