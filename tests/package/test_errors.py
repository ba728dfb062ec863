"""One base for each decision that a caller makes."""

import inspect
import re

import pytest
import torch

from elastic_mbs import errors
from elastic_mbs.errors import ElasticMBSError, MicroBatchFloorError, MisuseError, RecoveryError, UnsupportedError, UsageError

CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and value.__module__ == errors.__name__]


def drawn_tree() -> dict[str, str]:
    """The tree in the module's docstring: each class → the one that it hangs from."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        drawn = re.match(r"((?:[│ ]   )*)(├── |└── )?([A-Z]\w+Error)\b", line)
        if drawn:
            depth = len(drawn[1]) // 4 + (drawn[2] is not None)
            path = [*path[:depth], drawn[3]]
            parents[drawn[3]] = path[depth - 1] if depth else ""
    return parents


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    classes = {cls.__name__: next((base.__name__ for base in cls.__bases__ if base in CLASSES), "") for cls in CLASSES}
    assert drawn_tree() == classes
    assert len(classes) > 10


@pytest.mark.parametrize("error", CLASSES)
def test_every_error_has_our_base_and_says_when_it_occurs(error: type[Exception]) -> None:
    assert issubclass(error, ElasticMBSError)
    doc = error.__dict__.get("__doc__")
    assert doc
    assert doc.endswith(".")


@pytest.mark.parametrize("error", CLASSES)
def test_every_error_carries_its_message_and_notes(error: type[Exception]) -> None:
    with pytest.raises(ElasticMBSError, match="batch of 64") as caught:
        raise error("batch of 64")
    caught.value.add_note("call zero_grad()")
    assert caught.value.__notes__ == ["call zero_grad()"]


@pytest.mark.parametrize(
    ("base", "builtin"), [(UsageError, ValueError), (MisuseError, RuntimeError), (UnsupportedError, RuntimeError), (RecoveryError, RuntimeError)]
)
def test_each_branch_is_also_the_builtin_that_callers_expect(base: type[Exception], builtin: type[Exception]) -> None:
    members = [cls for cls in CLASSES if issubclass(cls, base)]
    assert members
    assert all(issubclass(cls, builtin) for cls in members)


def test_no_error_hangs_from_two_branches() -> None:
    branches = (UsageError, MisuseError, UnsupportedError, RecoveryError)
    for cls in CLASSES:
        assert sum(issubclass(cls, branch) for branch in branches) == (cls is not ElasticMBSError)


def test_only_what_did_not_fit_is_seen_by_handlers_of_out_of_memory() -> None:
    assert {cls.__name__ for cls in CLASSES if issubclass(cls, torch.OutOfMemoryError)} == {"MicroBatchFloorError", "OptimizerStepError"}
    with pytest.raises(torch.OutOfMemoryError):
        raise MicroBatchFloorError("2.0 GiB asked for")
