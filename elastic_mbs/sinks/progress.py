"""A progress bar of tqdm with the micro-batch, the out-of-memory errors and the headroom."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from elastic_mbs.error_bases import UsageError


def progress_bar(
    iterable: Iterable[Any] | None, postfix: Callable[[], str], options: Mapping[str, Any]
) -> Any:
    """Return a `tqdm` over `iterable` that asks for `postfix` whenever it is drawn.

    Args:
        iterable: as for `tqdm`.
        postfix: gives the text at the end of the line; a postfix of the user's own comes first.
        options: passed on to `tqdm`.

    Raises:
        UsageError: tqdm is not installed.
    """
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise UsageError(
            "mbs.progress() needs tqdm, which is not installed: pip install 'elastic-mbs[progress]'"
        ) from error

    class Bar(tqdm):  # type: ignore[misc]  # tqdm has no annotations
        @property
        def format_dict(self) -> Any:
            found = super().format_dict
            found["postfix"] = ", ".join(filter(None, (found["postfix"], postfix())))
            return found

    return Bar(iterable, **options)
