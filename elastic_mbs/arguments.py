"""The arguments of a method that passes none on to the user's function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from elastic_mbs.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")


def closed(method: Callable[P, T]) -> Callable[P, T]:
    """Refuse arguments that `method` does not have, with the way to give them to a function."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise UsageError(
                f"{method.__name__}(): {error}. It passes nothing on: what a function of yours "
                "needs besides the batch goes into a lambda or functools.partial"
            ) from None
        return method(*args, **kwargs)

    return checked
