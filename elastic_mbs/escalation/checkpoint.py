"""Activation checkpointing: blocks of the model keep their input only, and run again in backward.

Where the model offers it (`gradient_checkpointing_enable`, as those of transformers do) it is asked
to. Else the blocks are the children, with parameters, of the longest `nn.ModuleList` or
`nn.Sequential`: the one with the most of them, and of equals the one with more parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from elastic_mbs.errors import ReplayUnsafeError
from elastic_mbs.rollback.random_streams import RandomStreams, StreamState


class CheckpointedBlocks:
    """A context manager: inside it the blocks of these models are checkpointed.

    What a block draws from any of the streams is drawn again in backward, and no stream moves by
    it. A block that changes its buffers is refused.
    """

    def __init__(self, roots: Iterable[nn.Module], streams: RandomStreams) -> None:
        modules = list(dict.fromkeys(module for root in roots for module in root.modules()))
        # it does not go with torch.compile, which recomputes by rules of its own
        compiled = any(map(_is_compiled, modules))
        self._asked = [] if compiled else list(filter(_offers, modules))
        self.blocks = [] if compiled else self._asked or blocks_of(modules)
        self._how: dict[str, Any] = {
            "use_reentrant": False,
            "context_fn": partial(_contexts, streams),
        }
        self._patched: list[tuple[nn.Module, dict[str, Any]]] = []  # with what was there before

    def __enter__(self) -> CheckpointedBlocks:
        for module in self._asked:
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=self._how)  # type: ignore[operator]  # it is a method
        for block in self.blocks:
            self._patched.append(
                (block, {name: own for name, own in vars(block).items() if name == "forward"})
            )
            run = block.forward if self._asked else partial(checkpoint, block.forward, **self._how)
            block.forward = partial(_run_unchanged, block, run)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Puts everything back. Can be repeated."""
        while self._patched:
            block, own = self._patched[-1]
            vars(block).pop("forward", None)
            vars(block).update(own)
            self._patched.pop()
        for module in self._asked:
            module.gradient_checkpointing_disable()  # type: ignore[operator]  # it is a method


def _offers(module: nn.Module) -> bool:
    """Whether it has checkpointing of its own that is off."""
    offered = hasattr(module, "gradient_checkpointing_enable") and getattr(
        module, "supports_gradient_checkpointing", True
    )
    return bool(offered) and not getattr(module, "is_gradient_checkpointing", False)


def _is_compiled(module: nn.Module) -> bool:
    return (
        getattr(module, "_compiled_call_impl", None) is not None
        or type(module).__name__ == "OptimizedModule"
    )


def blocks_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The children, with parameters, of the longest list among the modules; none where there is no list."""
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


def _contexts(
    streams: RandomStreams,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Of a block's forward, which begins now, and of its run in backward."""
    return nullcontext(), _drawing_from(streams, streams.read(hosts=True))


@contextmanager
def _drawing_from(streams: RandomStreams, state: StreamState) -> Iterator[None]:
    present = streams.read(hosts=True)
    streams.restore(state)
    try:
        yield
    finally:
        streams.restore(present)


def _run_unchanged(block: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a block that must not change its buffers: it would do so a second time in backward."""
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
