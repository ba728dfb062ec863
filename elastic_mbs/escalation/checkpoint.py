"""Activation checkpointing: blocks of the model keep their input only, and run again in backward.

A model that offers checkpointing (`gradient_checkpointing_enable`, as those of transformers do) is
asked for it, layer by layer where its layers have a flag. Else the blocks are the children, with
parameters, of the longest `nn.ModuleList` or `nn.Sequential`: the one with the most of them, and of
equals the one with more parameters.

Of some blocks the first ones are taken. They run again last, when the tensors of all later blocks
have been released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from numbers import Number
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elastic_mbs.errors import ReplayUnsafeError
from elastic_mbs.escalation.inputs import Inputs
from elastic_mbs.rollback.attributes import Contents, containers_of
from elastic_mbs.rollback.random_streams import RandomStreams, StreamState

Attributes = dict[str, Any]  # of one module, by name
_ABSENT: Any = object()
_FLAG = "gradient_checkpointing"  # of the layers of transformers


class CheckpointedBlocks:
    """A context manager: inside it the blocks of these models are checkpointed.

    A block draws the same random numbers in backward as in forward, and neither its streams nor its
    attributes (numbers, flags, strings, tensors, containers) move by the second run. A block that
    changes its buffers is refused.

    Args:
        roots: the models.
        streams: the random streams that blocks can draw from.
        count: how many blocks are checkpointed; None for all.
        inputs: takes note of what the blocks are given.

    Attributes:
        blocks: the blocks that are.
    """

    def __init__(
        self,
        roots: Iterable[nn.Module],
        streams: RandomStreams,
        count: int | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        modules = modules_of(roots)
        # checkpointing does not go with torch.compile, which recomputes by rules of its own
        asked = [] if any(map(is_compiled, modules)) else list(filter(_offers, modules))
        every = checkpointable(modules)
        self.blocks = every[:count]
        left = [] if count is None else every[count:]
        self._streams = streams
        self._inputs = inputs or Inputs()
        self._offering = set(asked)  # blocks of one without layers that have a flag: not run again
        self._asked = [_Asked(module, self._how(()), left) for module in asked]
        self._patched: list[tuple[nn.Module, Attributes]] = []  # with what was there before

    def _how(self, modules: Iterable[nn.Module]) -> dict[str, Any]:
        """Return the options of a checkpoint around these modules."""
        return {
            "use_reentrant": False,
            "context_fn": partial(contexts, list(modules), self._streams),
        }

    def __enter__(self) -> CheckpointedBlocks:
        for model in self._asked:
            model.switch_on()
        for block in self.blocks:
            self._patched.append(
                (block, {name: own for name, own in vars(block).items() if name == "forward"})
            )
            named = partial(in_module, block, block.forward)
            run = (
                block.forward
                if self._asked
                else partial(checkpoint, named, **self._how(block.modules()))
            )
            block.forward = partial(self._run, block, run)
        return self

    def _run(self, block: nn.Module, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if block not in self._offering:
            self._inputs.note(block, args, kwargs)
        return _run_unchanged(block, run, *args, **kwargs)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put everything back. May be repeated."""
        while self._patched:
            block, own = self._patched[-1]
            vars(block).pop("forward", None)
            vars(block).update(own)
            self._patched.pop()
        for model in reversed(self._asked):  # one can be inside another
            model.switch_off()


class _Asked:
    """A model with checkpointing of its own, and what switching it on has changed."""

    def __init__(self, model: nn.Module, how: dict[str, Any], left: Iterable[nn.Module]) -> None:
        self._model: Any = model
        self._how = how
        self._left = list(left)  # its layers that are not checkpointed
        # of each module, while it is on: its attributes and the keys of its hooks before
        self._before: list[tuple[nn.Module, Attributes, dict[str, set[int]]]] = []

    def switch_on(self) -> None:
        self._before = [
            (module, dict(vars(module)), {name: set(own) for name, own in _hooks_of(module)})
            for module in self._model.modules()
        ]
        name = _name_of(self._model)
        getattr(self._model, f"{name}_enable")(**{f"{name}_kwargs": self._how})
        for layer in self._left:
            vars(layer)[_FLAG] = False
        for module, attributes, _ in self._before:
            present = vars(module)
            before = {name: attributes.get(name, _ABSENT) for name in present}
            attributes.clear()  # of what forward changes later nothing is put back
            attributes.update(
                {name: value for name, value in before.items() if present[name] is not value}
            )

    def switch_off(self) -> None:
        """Disable checkpointing, and put back what enabling it had changed. May be repeated.

        transformers leaves hooks and functions behind with which the model cannot be pickled.
        """
        if not self._before:
            return
        getattr(self._model, f"{_name_of(self._model)}_disable")()
        for module, attributes, hooks in self._before:
            _update(module, attributes)
            for name, own in _hooks_of(module):
                for key in own.keys() - hooks[name]:
                    del own[key]
        self._before = []


def _hooks_of(module: nn.Module) -> list[tuple[str, dict[int, Any]]]:
    """Return the registries of a module's hooks, by name."""
    return [
        (name, value)
        for name, value in vars(module).items()
        if "_hooks" in name and isinstance(value, dict)
    ]


def _name_of(module: nn.Module) -> str | None:
    """Return the name by which a module offers checkpointing; None where it offers none.

    transformers has renamed it, and warns of the old name.
    """
    names = ("activation_checkpointing", "gradient_checkpointing")
    return next((name for name in names if hasattr(module, f"{name}_enable")), None)


def _offers(module: nn.Module) -> bool:
    """Return whether a module has checkpointing of its own that is off."""
    name = _name_of(module)
    offered = name is not None and getattr(module, "supports_gradient_checkpointing", True)
    return bool(offered) and not getattr(module, f"is_{name}", False)


def modules_of(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules and all below them, each once."""
    return list(dict.fromkeys(module for root in roots for module in root.modules()))


def checkpointable(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks among a model's modules, in the order in which they run."""
    if any(map(is_compiled, modules)):
        return []
    offering = list(filter(_offers, modules))
    return _flagged(offering) or offering or blocks_of(modules)


def _flagged(models: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the layers that these models checkpoint one by one, each by a flag of its own."""
    flagged = [module for module in modules_of(models) if isinstance(_flag_of(module), bool)]
    return [
        module
        for module in flagged
        if not any(inner is not module and inner in flagged for inner in module.modules())
    ]


def _flag_of(module: nn.Module) -> object:
    return getattr(module, _FLAG, None)


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module runs through torch.compile."""
    return (
        getattr(module, "_compiled_call_impl", None) is not None
        or type(module).__name__ == "OptimizedModule"
    )


def blocks_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the children, with parameters, of the longest list among the modules."""
    lists = [module for module in modules if isinstance(module, nn.ModuleList | nn.Sequential)]
    found = [
        [child for child in module.children() if any(True for _ in child.parameters())]
        for module in lists
    ]
    return max(
        found,
        key=lambda blocks: (
            len(blocks),
            sum(p.numel() for block in blocks for p in block.parameters()),
        ),
        default=[],
    )


def contexts(
    modules: list[nn.Module], streams: RandomStreams | None = None
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a block's forward, which begins now, and of its run in backward.

    Args:
        modules: the block and everything below it.
        streams: the random streams that it can draw from; None where it draws nothing.
    """
    return nullcontext(), _AsInForward(streams, modules)


class _AsInForward:
    """A context manager: inside it streams and modules are as they were when it was made.

    A block runs again for each backward through it, so this is entered as often (with a gradient
    penalty, inside itself).
    """

    def __init__(self, streams: RandomStreams | None, modules: list[nn.Module]) -> None:
        self._streams = streams
        self._modules = modules
        self._then = self._read(), list(map(_plain_of, modules)), self._contents()
        self._outside: list[tuple[StreamState | None, list[Attributes], list[Contents]]] = []

    def _read(self) -> StreamState | None:
        return None if self._streams is None else self._streams.read(hosts=True)

    def __enter__(self) -> None:
        state, attributes, contents = self._then
        # what is a number then can be something else now: all that is touched is kept
        touched = [
            {name: vars(module).get(name, _ABSENT) for name in (*_plain_of(module), *saved)}
            for module, saved in zip(self._modules, attributes, strict=True)
        ]
        self._outside.append((self._read(), touched, self._contents()))
        self._put_back(state, attributes, contents)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._put_back(*self._outside.pop())

    def _contents(self) -> list[Contents]:
        return [
            Contents.of(module, name) for module in self._modules for name in containers_of(module)
        ]

    def _put_back(
        self, state: StreamState | None, attributes: list[Attributes], contents: list[Contents]
    ) -> None:
        if self._streams is not None and state is not None:
            self._streams.restore(state)
        for module, saved in zip(self._modules, attributes, strict=True):
            for name in _plain_of(module).keys() - saved.keys():
                del vars(module)[name]
            _update(module, saved)
        for each in contents:
            each.put_back()


def _plain_of(module: nn.Module) -> Attributes:
    """Return the numbers, flags and strings of a module, and its tensors, each as it is."""
    return {
        name: value
        for name, value in vars(module).items()
        if value is None or isinstance(value, Number | str | Tensor)
    }


def _update(module: nn.Module, attributes: Attributes) -> None:
    """Set attributes of a module, and delete those that are `_ABSENT`."""
    present = vars(module)
    for name, value in attributes.items():
        if value is _ABSENT:
            present.pop(name, None)
        else:
            present[name] = value


def in_module(module: nn.Module, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a module. In backward this frame alone tells which module it is of."""
    return run(*args, **kwargs)


def _run_unchanged(block: nn.Module, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run a block that must not change its buffers: it would change them again in backward."""
    before = _buffers(block)
    out = run(*args, **kwargs)
    changed = [name for name, state in _buffers(block).items() if before.get(name) != state]
    if changed:
        raise ReplayUnsafeError(
            f"{type(block).__name__} changes its buffer {changed[0]!r} when it runs, and "
            "checkpointing would run it twice for each piece: "
            "use escalate=('offload',), a layer without running statistics (GroupNorm), or "
            "checkpointing of your own"
        )
    return out


def _buffers(block: nn.Module) -> dict[str, tuple[int, int]]:
    return {name: (id(buffer), buffer._version) for name, buffer in block.named_buffers()}
