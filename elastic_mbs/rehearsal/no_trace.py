"""A block that leaves no trace: gradients, buffers, streams, modes and edited tensors go back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor

from elastic_mbs.engine.shared.resources import Resources
from elastic_mbs.engine.snapshot import Snapshot
from elastic_mbs.rehearsal.kept import Kept


@contextmanager
def no_trace(
    resources: Resources, key: object, *, training: bool = False
) -> Iterator[tuple[Snapshot, Kept]]:
    """Yield the snapshot and the keeper of a rehearsal, whose gradients begin empty.

    Args:
        resources: the model and its streams.
        key: the kind of rehearsal, by which it is known which buffers change.
        training: modules run in the modes of training.
    """
    snapshot = Snapshot(resources, key)
    # Set aside, whatever loss_fn does: nothing here adds to them. It may have frozen some, too.
    gradients = [(each, each.grad, each.requires_grad) for each in _parameters(resources)]
    kept = Kept(
        resources.model.every, training=training
    )  # the snapshot has the state of all of these

    def put_back() -> None:
        resources.retry("put buffers and random streams back", snapshot.restore)
        resources.retry("put the tensors back that loss_fn edited", kept.restore)
        for leaf, gradient, trainable in gradients:
            leaf.grad = gradient
            if leaf.requires_grad is not trainable:
                leaf.requires_grad_(trainable)

    with ExitStack() as backup, ExitStack() as undo:
        backup.callback(resources.retry, "drop the copies of the buffers", snapshot.close)
        snapshot.take_modes()
        resources.retry("copy buffers and random streams", snapshot.take)
        for stack in (backup, undo):  # should an interrupt strike one, the other is whole
            stack.callback(put_back)
        for leaf, _, _ in gradients:
            leaf.grad = None
        yield snapshot, kept


def _parameters(resources: Resources) -> list[Tensor]:
    """Return the parameters of the model and the leaves in their place, each once."""
    owned = [module._parameters.values() for module in resources.model.modules]
    found = (each for own in owned for each in own if each is not None)
    return list(dict.fromkeys([*found, *resources.model.leaves]))
