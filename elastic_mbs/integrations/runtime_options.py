"""The options of `ElasticMBS` that a user gives by way of a framework."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from elastic_mbs.errors import UsageError
from elastic_mbs.runtime import ElasticMBS


def check_names(
    what: str, options: Any, *, own: Iterable[str] = (), taken: Iterable[str] = ()
) -> None:
    """Raises a `UsageError` for what is no dict of options by name; `own` are the integration's, `taken` follow from the framework."""
    known = [
        name
        for name in (*inspect.signature(ElasticMBS).parameters, *own)
        if name not in {"model", *taken}
    ]
    if not isinstance(options, Mapping):
        raise UsageError(f"{what}: {options!r} is no dict of options; there are {', '.join(known)}")
    if unknown := [name for name in options if name not in known]:
        raise UsageError(f"{what} has no option {unknown[0]!r}; there are {', '.join(known)}")
