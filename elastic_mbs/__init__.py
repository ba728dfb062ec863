"""Training that survives out-of-memory errors: same batch, same gradients, no restart.

The user picks the batch, the runtime the micro-batch.

Which file to open for which change: docs/design.md, "Where to go for which change".
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic_mbs.public import *  # noqa: F403 - public.py lists the names
    from elastic_mbs.public import __all__ as __all__
else:
    import importlib

    def __getattr__(name):
        """Fill in all public names when the first is used: torch takes seconds to import.

        Commands that only read a run log do without it. `from elastic_mbs import events` would be
        such a use; `import elastic_mbs.events` is none.
        """
        public = importlib.import_module("elastic_mbs.public")
        for each in ("__all__", *public.__all__):
            globals().setdefault(each, getattr(public, each))
        if name not in globals():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]

    def __dir__():
        """Return all names, the public ones among them."""
        __getattr__("__all__")
        return sorted(globals())
