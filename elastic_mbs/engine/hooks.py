"""Hooks around an attempt: they are in place while the user's step runs, and at no other time.

In the order in which they begin; they end in the reverse order:

    peers     the wrapper of a model that other ranks train, too, kept quiet
    table     the saved tensors of a loop that the user writes out, or of an escalation to the host
    blocks    the blocks that are checkpointed by an escalation
    logits    a head and its cross-entropy in chunks, by an escalation
    tiles     position-wise modules a few positions at a time, by an escalation
    draws     random numbers by sample (`GradientOptions.draws`)
    injector  the errors of a test (`elastic_mbs.testing`)
    guard     the limit on host memory
    largest   a look at the largest tensors, once a piece at the floor has failed
    versions  edits in place raise versions under a dispatch mode of the user's, where there is one

Mostly there is none of them: then an attempt begins and ends without a line for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import Any

import torch

from elastic_mbs.batch.containers import tensors_in
from elastic_mbs.dispatch import VersionsRaised, hides_edits
from elastic_mbs.engine.attempt import Attempt
from elastic_mbs.engine.progress import Progress
from elastic_mbs.engine.shared.resources import Resources
from elastic_mbs.errors import UsageError
from elastic_mbs.escalation.checkpoint import CheckpointedBlocks, is_compiled
from elastic_mbs.escalation.head import OtherLayers
from elastic_mbs.escalation.inputs import Inputs
from elastic_mbs.escalation.ladder import Step
from elastic_mbs.escalation.largest import (
    LargestTensors,
    LargeTensor,
    Names,
    Origin,
    names_of,
    origin_of_error,
)
from elastic_mbs.escalation.logits import ChunkedLogits
from elastic_mbs.escalation.offload import OffloadedTensors
from elastic_mbs.escalation.position_wise import PositionWise
from elastic_mbs.escalation.tile import TiledModules
from elastic_mbs.rollback.random_streams import StreamState
from elastic_mbs.rollback.sample_draws import SampleDraws
from elastic_mbs.rollback.saved_tensors import SavedTensorTable, close_checkpoints

fault_injector: Any = None
"""The `elastic_mbs.testing.faults.RandomFaults` of a test, which makes some attempts fail.

It is read through the module, because a test sets it.
"""

Hook = AbstractContextManager[object]  # `__exit__` can run twice, or without `__enter__`


class _Injector:
    """The hook of the fault injector that a test has set."""

    def __init__(self, injector: Any, progress: Progress, resources: Resources) -> None:
        self._injector = injector
        self._progress = progress
        self._resources = resources
        self._running = False

    def __enter__(self) -> None:
        # Before a failed piece has committed, an injected error could be one too many for it.
        ready = self._progress.recovered
        self._injector.begin(self._progress, self._resources.model.modules, ready=ready)
        self._running = True

    def __exit__(self, *error: object) -> None:
        if self._running:
            self._running = False
            self._injector.end()


class _Draws:
    """The hook of random numbers by sample: every piece begins with the call's streams."""

    def __init__(
        self, resources: Resources, running: list[Attempt], start: Callable[[], StreamState | None]
    ) -> None:
        self._streams = resources.streams
        self._running = running
        self._start = start
        self._mode: SampleDraws | None = None

    def check(self) -> StreamState:
        """Return the call's streams, after a check that nothing was drawn on the host since."""
        start = self._start()
        assert start is not None  # taken before the first attempt
        if self._streams.hosts_moved(start):
            raise UsageError(
                "loss_fn draws random numbers from Python's random or from numpy, which cannot be "
                'drawn for each sample: use torch\'s, or GradientOptions(draws="piece")'
            )
        return start

    def __enter__(self) -> None:
        self._streams.restore(self.check())
        piece = self._running[0].piece
        mode = SampleDraws(piece.start, piece.stop)
        mode.__enter__()  # type: ignore[no-untyped-call]
        self._mode = mode

    def __exit__(self, *error: object) -> None:
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class AttemptHooks:
    """The hooks of one call.

    Attributes:
        table: autograd's saved tensors, where the engine owns them.
    """

    table: SavedTensorTable | None = None
    _draws: _Draws | None = None
    _inputs: Inputs | None = None  # of modules that run again in backward
    _largest: LargestTensors | None = None
    _first_node = 0  # the number of the first autograd node of the running attempt
    _in_place: tuple[Hook, ...] = ()  # around the running attempt

    def __init__(
        self,
        resources: Resources,
        progress: Progress,
        *,
        start: Callable[[], StreamState | None],
        own_graph: bool,
        steps: Sequence[Step],
        other_layers: OtherLayers,
        position_wise: PositionWise,
    ) -> None:
        """Choose the hooks.

        Args:
            resources: the model, and the guard of host memory.
            progress: the failures of the call, by which a fault injector counts.
            start: returns the random streams as they were when the call began.
            own_graph: the user's frame holds the graph, so its saved tensors are kept in a table.
            steps: the steps of `RecoveryOptions.escalate` that are in use.
            other_layers: linear layers whose output is no logits, as far as is known.
            position_wise: which modules are position-wise, as far as is known.
        """
        self._resources = resources
        self._start = start
        self._own_graph = own_graph
        self._progress = progress
        self._other_layers = other_layers
        self._position_wise = position_wise
        self._running: list[Attempt] = []  # one at most; shared with the table
        self._seen = list[int | None]()  # bytes that were free in the running attempt
        self.escalate(steps)

    def escalate(self, steps: Sequence[Step]) -> None:
        """Use these steps of `RecoveryOptions.escalate` in the attempts from here on."""
        used = {step.rung: step for step in steps}  # the last one of each
        hooks: list[Hook] = list(self._resources.peers.hooks)
        if "offload" in used:
            resident = partial(_resident, self._resources, self._running)
            self.table = OffloadedTensors(resident, ahead=used["offload"].ahead)
        elif self._own_graph:
            self.table = SavedTensorTable()
        if self.table is not None:
            hooks.append(self.table)
        if used:
            hooks += self._of_modules(used)
        if self._resources.settings.gradients.draws == "sample":
            self._draws = _Draws(self._resources, self._running, self._start)
            hooks.append(self._draws)
        if fault_injector is not None:
            hooks.append(_Injector(fault_injector, self._progress, self._resources))
        if self._resources.guard is not None:
            hooks.append(self._resources.guard)
        if self._largest is not None:
            hooks.append(self._largest)
        self._hooks = tuple(hooks)

    def _of_modules(self, used: Mapping[str, Step]) -> Iterator[Hook]:
        """Yield the hooks of steps that change how modules run."""
        roots, streams = self._resources.model.roots, self._resources.streams
        inputs = self._inputs = Inputs()
        if "checkpoint" in used:
            yield CheckpointedBlocks(roots, streams, used["checkpoint"].blocks, inputs)
        if "logits" in used and not any(map(is_compiled, self._resources.model.modules)):
            yield ChunkedLogits(self._other_layers, self._free_now)
        if "tile" in used:
            yield TiledModules(roots, streams, self._position_wise, self._free, inputs)

    def look(self) -> None:
        """Look at the largest tensors in the attempts from here on.

        torch.compile would run without compiling, so nothing is looked at where a step has met a
        compiled module, given or not.
        """
        if self._largest is None and not any(map(is_compiled, self._resources.model.met)):
            self._largest = LargestTensors(self._module_names, self._resources.devices)
            self._hooks = (*self._hooks, self._largest)

    def look_away(self) -> None:
        """Look at no tensors in the attempts from here on."""
        self._hooks = tuple(hook for hook in self._hooks if hook is not self._largest)
        self._largest = None

    def origin_of(self, error: BaseException) -> Origin:
        """Return the module and the line where an attempt has failed."""
        return origin_of_error(error, self._module_names())

    def largest(self) -> list[LargeTensor]:
        """Return the tensors of the latest attempt, the largest first, where it was looked at."""
        return [] if self._largest is None else self._largest.alive()

    def _module_names(self) -> Names:
        return names_of(self._resources.model.roots)

    def _free(self) -> int | None:
        """Return the bytes that were free in the attempt, or None where that is not known.

        They are read once: what is sized by them runs again in backward, and has to be the same.
        """
        if not self._seen:
            self._seen.append(self._free_now())
        return self._seen[0]

    def _free_now(self) -> int | None:
        seen = self._resources.headroom()
        return None if seen is None else seen.free

    # ------------------------------------------------------------------ around an attempt

    def begin(self, attempt: Attempt) -> None:
        """Put the hooks in place."""
        hooks = (*self._hooks, VersionsRaised()) if hides_edits() else self._hooks
        if not hooks:
            return
        self._running[:] = [attempt]
        self._seen.clear()
        if self.table is not None:
            self._first_node = torch._C._autograd._get_sequence_nr()
        self._in_place = hooks
        for hook in hooks:
            hook.__enter__()

    def check_forward(self) -> None:
        """Refuse to run backward after a forward that could not be run again as it was.

        Raises:
            ReplayUnsafeError: an input of a module that runs again was edited in place.
            UsageError: numbers that are to be drawn for each sample were drawn on the host.
        """
        if self._inputs is not None:
            self._inputs.check(self.table)
        if self._draws is not None:
            self._draws.check()

    def end(self, error: BaseException | None = None) -> None:
        """Take the hooks away, of an attempt that ends by `error` if there is one.

        Can be repeated.
        """
        if error is not None:
            close_checkpoints(error)  # their hooks are above ours
        if not self._in_place:
            return
        self._running.clear()
        if self._inputs is not None:
            self._inputs.clear()
        for hook in reversed(self._in_place):
            hook.__exit__(None, None, None)
        self._in_place = ()

    def drop_graph(self, terms: tuple[torch.Tensor, ...]) -> None:
        """Release the saved tensors of a failed attempt that the user's frame still holds.

        Args:
            terms: the user's own losses of the attempt.
        """
        if self.table is None:
            return
        self.table.empty()
        for loss in terms:
            node = loss.grad_fn
            older = node is None or node._sequence_nr() < self._first_node  # the user's own graph
            if not older and not loss._is_view():
                # Through it the frame would keep the activations that checkpointing recomputed.
                loss.detach_()


def _resident(resources: Resources, running: list[Attempt]) -> Iterable[torch.Tensor]:
    """Return the tensors that are in memory for the whole attempt."""
    for root in resources.model.roots:
        yield from chain(root.parameters(), root.buffers())
    for attempt in running:
        yield from tensors_in(attempt.data)
