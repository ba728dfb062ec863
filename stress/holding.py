"""What is held at once after a call, when nothing has been collected and no other backward has run: of a failed attempt it must be nothing."""

from __future__ import annotations

from torch import nn

from .worlds import ShimWorld, World


def held_beside_gradients(world: World, model: nn.Module) -> int:
    """Bytes that this process holds, as the world counts them, without the gradients of a model."""
    least = world.fence.minimum if isinstance(world, ShimWorld) else 1
    storages = {}
    for leaf in model.parameters():
        if leaf.grad is not None:
            grad = leaf.grad._values() if leaf.grad.is_sparse else leaf.grad
            storages[grad.untyped_storage().data_ptr()] = grad.untyped_storage().nbytes()
    return world.live() - sum(size for size in storages.values() if size >= least)
