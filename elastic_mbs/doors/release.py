"""Memory handed over between two phases of a program: training, a rollout, an evaluation, saving.

On an accelerator the allocator's cache goes back to the device, so the bytes freed are the fall of
its reserved memory. A host has no such cache: there, and on a device without figures, they are the
bytes of the tensors dropped that nobody else holds.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from elastic_mbs.device import accelerator_of
from elastic_mbs.engine.outcome.result import StepResult, output_tensors, without_outputs
from elastic_mbs.engine.shared.resources import Resources
from elastic_mbs.engine.shared.running import running_call
from elastic_mbs.errors import MisuseError


class Release:
    """A release of memory: things are dropped one by one, and `finish` tells the bytes freed."""

    def __init__(self, resources: Resources) -> None:
        """Begin.

        Raises:
            MisuseError: a call is running.
        """
        if running_call() is not None:
            raise MisuseError(
                "release() ran inside a step function or a callback, whose call still needs its "
                "memory: release between two calls"
            )
        resources.follow_model()
        self._resources = resources
        self._reserved = {device: _reserved(device) for device in resources.devices}
        self._watched: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def outputs(self, result: StepResult | None) -> StepResult | None:
        """Return a result without its outputs; the caller's own still has them."""
        if result is None:
            return None
        self._watch(output_tensors(result))
        return without_outputs(result)

    def gradients(self) -> None:
        """Drop the gradients of the model."""
        self._resources.refresh_model()
        for leaf in self._resources.model.leaves:
            self._watch([leaf.grad])
            leaf.grad = None

    def finish(self) -> int:
        """Drop the copies of buffers, empty the caches, and return the bytes freed."""
        buffers = self._resources.buffers
        self._watch(buffers.held())
        buffers.let_go()
        self._resources.release(thorough=True)
        fell = sum(
            before - now
            for device, before in self._reserved.items()
            if before is not None and (now := _reserved(device)) is not None
        )
        gone = sum(size for storage, size in self._watched.values() if storage() is None)
        return max(0, fell) + gone

    def _watch(self, tensors: Iterable[Tensor | None]) -> None:
        """Watch the tensors that no allocator's figures will tell of."""
        for tensor in tensors:
            if (
                tensor is not None
                and tensor.layout is torch.strided
                and self._reserved.get(tensor.device) is None
            ):
                storage = tensor.untyped_storage()
                self._watched[storage._cdata] = weakref.ref(storage), storage.nbytes()


def _reserved(device: torch.device) -> int | None:
    """Return the bytes that torch's allocator holds of a device; None where it has no figures."""
    accelerator = accelerator_of(device)
    if accelerator is None:
        return None
    try:
        return accelerator.memory_reserved()
    except RuntimeError:
        return None
