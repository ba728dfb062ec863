"""Checks of the arguments of `ElasticMBS`'s methods."""

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


def check_place(outputs: object) -> None:
    """Refuse a place for the outputs of an evaluation that is none."""
    if outputs is None:
        raise UsageError(
            'evaluate(outputs=None) would return nothing: use outputs="cpu" (the default) or '
            '"device", and let fn return only what is needed'
        )
    if outputs not in ("cpu", "device"):
        raise UsageError(
            f'outputs={outputs!r} is not known: use "cpu" (the default), or "device" for '
            "outputs that do not fill it"
        )
