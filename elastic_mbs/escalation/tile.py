"""Tiles: a position-wise module runs on a few positions at a time, each tile again in backward.

    input (…, positions, features) ──► tile ──► module ──► tile ──► output
                                       tile ──► module ──► tile      (joined)
                                        …

What such a module keeps for backward, in a transformer most of the memory of a block, is there for
one tile at a time. Sums of weights' gradients over the tiles are the same to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from elastic_mbs.escalation.checkpoint import contexts, in_module, is_compiled, modules_of
from elastic_mbs.escalation.inputs import Inputs
from elastic_mbs.escalation.position_wise import PositionWise, may_be_position_wise
from elastic_mbs.rollback.random_streams import RandomStreams

SMALL = 2**20  # bytes inside a module that are not worth it
WORTH = 4  # times its output that a module has to keep: a norm keeps less
FEWEST, MOST = 8, 64  # tiles of a module


class TiledModules:
    """A context manager: inside it the position-wise modules of these models run in tiles.

    They are found when they are called, the outermost first.

    Args:
        roots: the models.
        streams: the random streams that modules can draw from; those that do are left alone.
        verdicts: the knowledge which modules are position-wise.
        free: returns the bytes that are free, or None where that is not known.
        inputs: takes note of what the modules are given.
    """

    def __init__(
        self,
        roots: Iterable[nn.Module],
        streams: RandomStreams,
        verdicts: PositionWise,
        free: Callable[[], int | None],
        inputs: Inputs,
    ) -> None:
        modules = modules_of(roots)
        compiled = any(map(is_compiled, modules))
        self._candidates = [] if compiled else list(filter(_is_candidate, modules))
        self._streams = streams
        self._verdicts = verdicts
        self._free = free
        self._inputs = inputs
        self._within: set[nn.Module] = set()  # modules below those that have run in tiles
        self._patched: list[tuple[nn.Module, Any]] = []  # with the forward that it had of its own

    def __enter__(self) -> Self:
        for module in self._candidates:
            self._patched.append((module, vars(module).get("forward")))
            vars(module)["forward"] = partial(self._forward, module, module.forward)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put the modules' own forwards back. May be repeated."""
        self._within.clear()
        while self._patched:
            module, own = self._patched[-1]
            _set_forward(module, own)
            self._patched.pop()

    def _forward(
        self, module: nn.Module, run: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a module, in tiles where it is position-wise and that is worth it."""
        input = args[0] if len(args) == 1 and not kwargs else None
        # Layers of a module in tiles run as they are, and so they do where a checkpoint of the
        # user's runs them again by itself.
        if module in self._within or not (isinstance(input, Tensor) and _can_tile(input)):
            return run(*args, **kwargs)
        tiles = self._tiles(module, input)
        if tiles == 1:
            return run(input)
        self._inputs.note(module, input)
        layers = list(module.modules())
        self._within.update(layers[1:])
        size = -(-input.shape[-2] // tiles)
        # a module that is used several times can be set up by its caller for each use
        how: Any = {"use_reentrant": False, "context_fn": partial(contexts, layers)}
        named = partial(in_module, module, run)
        parts = [checkpoint(named, tile, **how) for tile in input.split(size, -2)]
        return torch.cat(parts, -2)

    def _tiles(self, module: nn.Module, input: Tensor) -> int:
        """Return how many tiles a module runs in.

        A tile's forward and backward together are to take a quarter of the free memory.
        """
        with _unpatched(module):
            kept = self._verdicts.kept(module, input, self._streams)
        if kept is None or kept.inside < WORTH * kept.output:
            return 1
        positions = input.numel() // input.shape[-1]
        inside = kept.inside * positions * input.itemsize // torch.float64.itemsize
        if inside < SMALL:
            return 1
        free = self._free()
        wanted = 0 if free is None else 8 * inside // max(1, free)
        return min(max(FEWEST, wanted), MOST, input.shape[-2])


def _can_tile(input: Tensor) -> bool:
    return (
        torch.is_grad_enabled()
        and type(input) in (Tensor, FakeTensor)
        and input.ndim > 1
        and input.shape[-2] > 1
        and input.is_floating_point()
    )


@contextmanager
def _unpatched(module: nn.Module) -> Iterator[None]:
    """Give a module and its children the forwards of their classes inside the block."""
    patched = [
        (each, vars(each)["forward"]) for each in module.modules() if "forward" in vars(each)
    ]
    try:
        for each, _ in patched:
            _set_forward(each, None)
        yield
    finally:
        for each, own in patched:
            _set_forward(each, own)


def _set_forward(module: nn.Module, own: Any) -> None:
    if own is None:
        vars(module).pop("forward", None)
    else:
        vars(module)["forward"] = own


def _is_candidate(module: nn.Module) -> bool:
    """Return whether a module may run in tiles.

    A single layer of torch keeps little more than its input.
    """
    layers = list(module.modules())
    single = len(layers) == 1 and type(module).__module__.startswith("torch.nn.modules.")
    return (
        not single
        and any(True for _ in module.parameters())
        and all(map(may_be_position_wise, layers))
    )
