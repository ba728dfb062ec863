"""Errors that wrap others, as a step function raises them and as the engine catches them."""

from collections.abc import Callable

import torch

from elastic_mbs.memory.oom import Verdict, classify
from tests.helpers.oom_tables import CUDA_REPORT


class Wrapper(Exception):
    pass


def fail(text: str = CUDA_REPORT, kind: type[Exception] = torch.OutOfMemoryError) -> None:
    raise kind(text)


def raised_from(error: BaseException, cause: BaseException | None) -> None:
    try:
        fail()
    except torch.OutOfMemoryError:
        raise error from cause


def raised_while_handling(error: BaseException, text: str = CUDA_REPORT) -> None:
    try:
        fail(text)
    except torch.OutOfMemoryError:
        raise error  # noqa: B904 - that it is not linked is the point


def caught(function: Callable[..., object], *args: object) -> BaseException:
    """As the engine does it: `classify` sees what its own frame has caught."""
    try:
        function(*args)
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def judged(error: BaseException) -> Verdict:
    """The verdict on an error that is out of memory."""
    verdict = classify(error)
    assert verdict is not None
    return verdict
