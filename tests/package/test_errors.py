"""One base for each decision that a caller makes."""

import inspect

import pytest
import torch

from elastic_mbs import errors
from elastic_mbs.errors import ElasticMBSError, MisuseError, RecoveryError, UnsupportedError, UsageError

CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and value.__module__ == errors.__name__]
BRANCHES = {UsageError: ValueError, MisuseError: RuntimeError, UnsupportedError: RuntimeError, RecoveryError: RuntimeError}


@pytest.mark.parametrize("error", CLASSES)
def test_every_error_is_of_one_branch_and_of_the_builtin_that_callers_expect(error: type[Exception]) -> None:
    builtins = [builtin for branch, builtin in BRANCHES.items() if issubclass(error, branch)]
    assert len(builtins) == (error is not ElasticMBSError)
    assert issubclass(error, (ElasticMBSError, *builtins))


def test_only_what_did_not_fit_is_seen_by_handlers_of_out_of_memory() -> None:
    assert {cls.__name__ for cls in CLASSES if issubclass(cls, torch.OutOfMemoryError)} == {"MicroBatchFloorError", "OptimizerStepError"}
