"""The runtime of a module, for `ElasticMBS.of(model)`.

A module holds a `RuntimePlace` as an ordinary attribute, so both go together. A table of all
modules would keep each of them alive, because a runtime holds its model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import ReferenceType, ref

from torch import nn

from elastic_mbs.errors import UsageError

_NAME = "_elastic_mbs"


class RuntimePlace:
    """The place of a module's runtime. Pickles and deep copies of the module have none.

    Attributes:
        owner: id of the module: a shallow copy of it has the same place, and is another.
        latest: the latest runtime that was made for the module.
        own: the same, where `ElasticMBS.of` made it and nobody else may hold it.
    """

    def __init__(self, owner: nn.Module, latest: Any) -> None:
        self.owner = id(owner)
        self.latest: ReferenceType[Any] = ref(latest)
        self.own: Any = None

    def __reduce__(self) -> tuple[type[dict[Any, Any]], tuple[()]]:
        """Return an empty dict: a saved model needs no elastic_mbs to be loaded."""
        return dict, ()


def register(models: Sequence[nn.Module], runtime: Any) -> None:
    """Make `runtime` the latest of each module."""
    for module in map(_uncompiled, models):
        vars(module)[_NAME] = RuntimePlace(module, runtime)


def runtime_of(model: nn.Module, make: Callable[[], Any]) -> Any:
    """Return the latest runtime of a module, or a new one that lives as long as the module.

    Args:
        model: the module, compiled or not.
        make: makes and registers the runtime of the module.

    Raises:
        UsageError: `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"ElasticMBS.of() got a {type(model).__name__}: give a torch.nn.Module")
    attributes = vars(_uncompiled(model))
    place = attributes.get(_NAME)
    if isinstance(place, RuntimePlace) and place.owner == id(_uncompiled(model)):
        found = place.latest()
        if found is not None:
            return found
    made = make()
    attributes[_NAME].own = made
    return made


def check_same(model: nn.Module, options: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse options that the runtime of a module was not made with.

    Raises:
        UsageError: an option has another value, or was not given.
    """
    for name, value in options.items():
        if name not in given or given[name] != value:
            had = f"{name}={given[name]!r}" if name in given else f"no {name}="
            raise UsageError(
                f"the runtime of this {type(model).__name__} was made with {had}, and "
                f"{name}={value!r} was asked for: give the options where the runtime is first "
                "made and none here, or the same objects (a lambda is another one in each call)"
            )


def _uncompiled(model: nn.Module) -> nn.Module:
    """Return the module behind a wrapper of torch.compile, which has the same parameters."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model
