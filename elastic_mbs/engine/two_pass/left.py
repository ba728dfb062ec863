"""State that a loss over embeddings changes: it runs once, between two passes that run again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from elastic_mbs.errors import ReplayUnsafeError
from elastic_mbs.rollback.attributes import (
    ABSENT,
    CONTAINERS,
    Contents,
    containers_of,
    tensors_of,
)
from elastic_mbs.rollback.places import copyable, versions


class LeftByLoss:
    """Attributes of modules before a loss, and as the loss has left them.

    The second pass begins with the state of the first. So what the loss has changed waits until
    that pass has ended: by hand, too, all samples are embedded before the loss runs.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Note the state before the loss. Of tensors it is the version, not the value."""
        self._attributes = [(vars(module), dict(vars(module))) for module in modules]
        self._containers = [
            Contents.of(module, name) for module in modules for name in containers_of(module)
        ]
        self._tensors = [
            (f"{type(module).__name__}.{name}", vars(module)[name])
            for module in modules
            for name in tensors_of(module)
        ]
        self._versions = versions([tensor for _, tensor in self._tensors])
        self._values: list[tuple[Tensor, Tensor]] = []  # of tensors that the loss has edited

    def undo(self) -> None:
        """Put the state back, before the loss runs again.

        Raises:
            ReplayUnsafeError: the loss has edited a tensor in place.
        """
        edited = self._edited()
        if edited:
            raise ReplayUnsafeError(
                f"loss_fn has changed {edited[0][0]} in place and run out of memory after it, so "
                "it cannot run again: put a new tensor there (self.x = self.x + 1), or change it "
                "after the call"
            )
        for own, before in self._attributes:
            for name in own.keys() - before.keys():
                del own[name]
        self._put()

    def end(self) -> None:
        """Note what the loss has changed, and drop the rest."""
        # first, because it can run out of memory and is tried again then
        self._values = [
            (tensor, tensor.detach().clone()) for _, tensor in self._edited() if copyable(tensor)
        ]
        self._attributes = [
            (own, changed) for own, before in self._attributes if (changed := _changed(own, before))
        ]
        self._containers = [
            Contents.of(each.module, each.name)
            for each in self._containers
            if each.changed() and isinstance(vars(each.module).get(each.name), CONTAINERS)
        ]

    def put(self) -> None:
        """Put the state in place that the loss has left. Can be repeated."""
        self._put()
        with torch.no_grad():
            for tensor, value in self._values:
                # `data` has a version of its own: graphs of the user's stay valid
                tensor.data.copy_(value)

    def _edited(self) -> list[tuple[str, Tensor]]:
        now = versions([tensor for _, tensor in self._tensors])
        return [
            each
            for each, new, old in zip(self._tensors, now, self._versions, strict=True)
            if new != old
        ]

    def _put(self) -> None:
        for own, values in self._attributes:
            for name, value in values.items():
                _set(own, name, value)
        for contents in self._containers:
            contents.put_back()


def _changed(own: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes that are others now, as they are now."""
    now = {name: own.get(name, ABSENT) for name in [*own, *(before.keys() - own.keys())]}
    return {name: value for name, value in now.items() if value is not before.get(name, ABSENT)}


def _set(own: dict[str, Any], name: str, value: Any) -> None:
    if value is ABSENT:
        own.pop(name, None)
    elif own.get(name, ABSENT) is not value:
        own[name] = value
