"""DDP's wrappers around a model: finding them, refusals by name, and how they keep quiet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.hooks import RemovableHandle

from elastic_mbs.distributed import torch_private
from elastic_mbs.engine.shared.trained_model import TrainedModel
from elastic_mbs.errors import UnsupportedError, UsageError


def wrappers_in(roots: Iterable[nn.Module]) -> list[DDP]:
    """Return every DDP wrapper: one may be inside a compiled module, or beside others."""
    modules = (module for root in roots for module in root.modules())
    return list(dict.fromkeys(module for module in modules if isinstance(module, DDP)))


_OWN_FORWARD = (
    "the DDP model has a forward of its own (an attribute, or a subclass's), which would never "
    "run: a call of the wrapper is a call of the module inside here. Put it into that module"
)
_HOOK_SINCE = (
    "the DDP model got a communication hook after the ElasticMBS was made. It would never run: "
    "gradients are summed here, after the whole batch. Leave register_comm_hook out"
)


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
    if torch_private.sums_in_python(ddp):
        yield (
            'DDP was made with torch._dynamo.config.optimize_ddp = "python_reducer", whose hooks '
            "sum in the backward of every piece: leave that setting out"
        )
    if torch_private.has_own_forward(ddp):
        yield _OWN_FORWARD
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


def check_again(ddp: DDP) -> None:
    """Refuse by name what can come after the runtime was made.

    Raises:
        UnsupportedError: a call inside `with ddp.join():`, a new hook or a new forward.
    """
    if torch_private.has_comm_hooks(ddp):
        raise UnsupportedError(_HOOK_SINCE)
    if torch_private.has_own_forward(ddp):
        raise UnsupportedError(_OWN_FORWARD)
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


Refusal = Callable[[nn.Module, object], None]  # a hook before a forward


class OnlyGiven:
    """A block in which no module of some classes may run that the runtime was not given.

    Their collectives come in every piece, where a rank may be alone. They are the ones that a loss
    function can reach, whether it has used them before or not. `__exit__` can be repeated.
    """

    def __init__(
        self, model: TrainedModel, refusals: Mapping[type, Refusal], *, knows_none: bool = False
    ) -> None:
        """Look for modules.

        Args:
            model: the modules that the runtime was given, and those that were met.
            refusals: by class, a hook before the forward that refuses it.
            knows_none: no module of these classes was given: one that is there by now came later.
        """
        self._model = model
        self._refusals = refusals
        self._knows_none = knows_none
        self._handles: list[RemovableHandle] = []
        self._looked = 0, 0, 0  # what there was when modules were looked at
        self._others: list[tuple[nn.Module, Refusal]] = []

    def __enter__(self) -> None:
        model = self._model
        looked = len(model.met), len(model.modules), model.generation
        if looked != self._looked:
            given = () if self._knows_none else model.modules
            others = {*model.met, *model.modules}.difference(given)
            self._others = [
                (module, refuse)
                for module in others
                for kind, refuse in self._refusals.items()
                if isinstance(module, kind)
            ]
            self._looked = looked
        for module, refuse in self._others:
            self._handles.append(module.register_forward_pre_hook(refuse, prepend=True))

    def __exit__(self, *error: object) -> None:
        while self._handles:
            self._handles.pop().remove()


def refuse_wrapper(module: nn.Module, args: object) -> None:
    """Refuse a wrapper that would send buffers now, or sum gradients in the backward."""
    assert isinstance(module, DDP)
    if torch_private.communicates(module):
        raise UnsupportedError(
            "the step runs a DistributedDataParallel that the runtime was not given. It sends "
            "buffers or sums gradients in every piece, where a rank may be alone: give the "
            "wrapper, ElasticMBS(ddp) or ElasticMBS([model, ddp]), or call its .module in the step"
        )


class NotWrapped:
    """A block in which a module that was given without its wrapper may not be called through it.

    `OnlyGiven` sees wrappers that a loss function can reach; this one sees the others.
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
