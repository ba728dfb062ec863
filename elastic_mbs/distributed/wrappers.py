"""DDP's wrappers around a model: finding them, refusals by name, and how they keep quiet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.hooks import RemovableHandle

from elastic_mbs.distributed import torch_private
from elastic_mbs.errors import UnsupportedError, UsageError


def wrappers_in(roots: Iterable[nn.Module]) -> list[DDP]:
    """Return every DDP wrapper: one may be inside a compiled module, or beside others."""
    modules = (module for root in roots for module in root.modules())
    return list(dict.fromkeys(module for module in modules if isinstance(module, DDP)))


def check(ddp: DDP) -> None:
    """Refuse by name what would not be trained right.

    Raises:
        UnsupportedError: a hook, a mode or a module that needs collectives of its own.
    """
    refused = next(_reasons(ddp), None)
    if refused is not None:
        raise UnsupportedError(refused)


def _reasons(ddp: DDP) -> Iterator[str]:
    hook = torch_private.comm_hook(ddp)
    if hook:
        yield (
            f"the DDP model has a communication hook ({hook}), which would never run: gradients "
            "are summed here, after the whole batch. Leave register_comm_hook out"
        )
    if torch_private.has_buffer_hook(ddp):
        yield "the DDP model has a hook for its buffers, which would never run: leave it out"
    if torch_private.is_mixed(ddp):
        yield (
            "DDP(mixed_precision=…) casts parameters in hooks of its own: use torch.autocast in "
            "loss_fn"
        )
    if torch_private.delays_parameters(ddp):
        yield ("DDP(delay_all_reduce_named_params=…) sums these in hooks of its own: leave it out")
    name = torch_private.sharded(ddp.module)
    if name is not None:
        yield f"the parameter {name!r} is a DTensor: tensor parallelism is not supported"
    yield from refused_modules(ddp.module)


def refused_modules(root: nn.Module) -> Iterator[str]:
    """Yield why modules cannot run alone on each rank, or their gradients not be summed."""
    for path, module in root.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            yield (
                f"{path or 'the model'} is a SyncBatchNorm, which exchanges statistics in every "
                "forward, so a rank that replays would leave the others waiting: keep BatchNorm, "
                "or use elastic_mbs.recipes.convert_ghost_batchnorm"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            yield (
                f"{path or 'the model'} has sparse gradients, which cannot be summed over the "
                "ranks here: sparse=False"
            )


def check_not_joining(ddp: DDP) -> None:
    """Refuse a call inside `with ddp.join():`."""
    if torch_private.is_joining(ddp):
        raise UnsupportedError(
            "`with ddp.join():` waits for collectives that DDP does not make here, and stays in "
            "force for its wrapper: leave it out, and call backward(loss_fn, None) on a rank "
            "whose data have ended"
        )


class Quiet:
    """A block in which a call of a wrapper is a call of the module inside.

    No buffer is sent and no gradient is summed. `__exit__` can be repeated.
    """

    def __init__(self, wrappers: Sequence[DDP]) -> None:
        self._wrappers = wrappers

    def __enter__(self) -> None:
        for ddp in self._wrappers:
            torch_private.silence(ddp)

    def __exit__(self, *error: object) -> None:
        for ddp in self._wrappers:
            torch_private.unsilence(ddp)


class NotWrapped:
    """A block in which a module that was given without its wrapper may not be called through it.

    `__exit__` can be repeated.
    """

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._roots = roots
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> None:
        for root in self._roots:
            self._handles.append(root.register_forward_pre_hook(_refuse_wrapper))

    def __exit__(self, *error: object) -> None:
        while self._handles:
            self._handles.pop().remove()


def _refuse_wrapper(module: nn.Module, args: object) -> None:
    if torch_private.wrapper_in_forward() is not None:
        raise UsageError(
            f"loss_fn calls {type(module).__name__} through DistributedDataParallel, which sums "
            "gradients over the ranks in the backward of every piece, but the runtime was made "
            "for the module inside: give it the wrapper, ElasticMBS(ddp)"
        )
