"""Shards of one model on many ranks (FSDP2), in lock-step mode. Experimental.

`fully_shard` itself gathers each unit when it runs, and sums gradients into the shards in each
backward. Before each of these collectives all ranks meet, so none of them begins one that another
rank does not come to:

    ask      a rank is about to make a collective. All ranks ask for the same one, or it is an error
    serve    a rank that has nothing to run makes the collective that the others ask for
    fail     a rank has run out of memory. No collective begins, and all ranks start the batch over

Ranks begin their pieces together. One that has no more serves the others until all are done, and
only then does its last piece count. Source: docs/distributed.md#lock-step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from elastic_mbs.distributed import torch_private
from elastic_mbs.distributed.control import Place, Retry, Row
from elastic_mbs.distributed.ranks import Agreed, Ranks
from elastic_mbs.distributed.units import (
    WRAPPER,
    as_module,
    check_again,
    check_parameter,
    only_given,
)
from elastic_mbs.engine.outcome.result import StepResult
from elastic_mbs.engine.shared.peers import Gradients
from elastic_mbs.engine.shared.trained_model import TrainedModel
from elastic_mbs.errors import ElasticMBSError, MisuseError, UnsupportedError
from elastic_mbs.options import Settings

_GIVE = "give it, too, frozen if it is not trained, ElasticMBS([model, other])"


class Word(IntEnum):
    """The words that ranks meet with."""

    GATHER = 1  # asks for the parameters of a unit
    SCATTER = 2  # asks for the sums of a unit's gradients
    BEGIN = 3  # begins a piece
    DONE = 4  # has no piece any more
    READY = 5  # can make the collective that another rank has asked for
    FAILED = 6  # has run out of memory


_ASKS = (Word.GATHER, Word.SCATTER)


class _Ask(NamedTuple):
    """A collective that a rank is about to make, or another word without one."""

    word: Word
    unit: int = 0
    numel: int = 0


class PeerOutOfMemory(torch.OutOfMemoryError):
    """Another rank has run out of memory, so this one starts its batch over, too."""


class _Collective:
    """A collective of a unit of `fully_shard`, in place of the one that it makes by itself."""

    def __init__(self, ranks: LockStep, word: Word, unit: int) -> None:
        self._ranks, self._word, self._unit = ranks, word, unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the collective."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | None = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Meet the other ranks, and make the collective."""
        self._ranks.come(_Ask(self._word, self._unit, input_tensor.numel()))

        def begin() -> dist.Work:
            if op is None:
                return torch_private.begin_gather(output_tensor, input_tensor, group)
            return torch_private.begin_scatter(output_tensor, input_tensor, group, op)

        work = self._ranks.make(begin, wait=not async_op)
        if op is not None:
            self._ranks.undo_mean(output_tensor, group)
        return work


class _Sharded:
    """A block after which the units' parameters are sharded. `__exit__` can be repeated."""

    def __init__(self, units: Sequence[FSDPModule]) -> None:
        self._units = units

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        for unit in self._units:
            unit.reshard()


class LockStep(Ranks):
    """The other ranks of a sharded model whose parameters are never whole at once."""

    in_step = True
    _wrapper = WRAPPER
    _adds_up = True

    def __init__(
        self, units: Sequence[FSDPModule], model: TrainedModel, settings: Settings, retry: Retry
    ) -> None:
        """Refuse what would not be trained right, and meet the other ranks, as `Shards` does."""
        _check_options(settings)
        _check_collectives(units)
        self._units = units
        self._outer = _outermost(units)
        self.hooks = (only_given(model, _GIVE), _Sharded(units))
        # The engine has one leaf without a gradient: `fully_shard` adds gradients up by itself.
        self._leaf = torch.zeros(0, requires_grad=True)
        self._parameters: list[DTensor] = []  # those that are trained
        self._modules: list[nn.Module] = []  # of the model, for which these are
        group = self._follow(model).get_group()
        super().__init__(group, model, settings, retry)
        self._make_common_room(self._parameters)
        self._active = False  # collectives are made in a call of ours
        self._told = False  # the failure that this rank recovers from is known to all
        self._served: _Ask | None = None  # the collective that this rank makes for others
        self._over = True  # no rank has a piece any more
        self._beside = False  # in an evaluation
        self._summed_unused: list[bool] = []  # of each unit, before the call
        self._wanted: list[bool] = []  # which trained parameters get a gradient in this call
        # gradients of shards that were there when this call began
        self._aside: list[tuple[DTensor, Tensor | None]] | None = None

    def _follow(self, model: TrainedModel) -> DeviceMesh:
        """Follow the model's parameters: which there are, and which are trained."""
        self._modules = []  # until all is well
        found: dict[int, DTensor] = {}
        for name, parameter in chain.from_iterable(r.named_parameters() for r in model.roots):
            shard = check_parameter(name, parameter)
            if shard is not None:
                found[id(shard)] = shard
        if not found:
            raise UnsupportedError("fully_shard was applied to a model without parameters")
        meshes = {each.device_mesh for each in found.values()}
        mesh = meshes.pop()
        if meshes or mesh.ndim != 1:
            raise UnsupportedError(
                "mode='lockstep' is for one mesh of one dimension: the sums over replicas (HSDP) "
                "are made where nothing of ours can meet before them. Use mode='local'"
            )
        self._parameters = [each for each in found.values() if each.requires_grad]
        model.replace(dict.fromkeys(found, self._leaf))
        model.refresh()
        self._modules = model.modules
        return mesh

    # ------------------------------------------------------------------ meetings

    def _say(self, mine: _Ask) -> list[_Ask]:
        """Meet with a word, and return the words of all ranks.

        Raises:
            PeerOutOfMemory: a rank has run out of memory.
            PeerError: a rank's call has ended.
        """
        try:
            rows = self._control.meet(Place.PIECE, tuple(map(float, mine)))
        except ElasticMBSError:
            self._met = True
            raise
        if any(row.failed for row in rows):
            self._met = True
            self._raise(None)
        words = [_ask_of(row) for row in rows]
        failed = [rank for rank, each in enumerate(words) if each.word is Word.FAILED]
        if failed and mine.word is not Word.FAILED:
            self._told = True
            raise PeerOutOfMemory(
                f"rank {', '.join(map(str, failed))} is out of memory, so all ranks start over"
            )
        return words

    def come(self, ask: _Ask) -> None:
        """Return when all ranks are about to make this collective.

        In a call of ours; outside of one this is what `fully_shard` does by itself.
        """
        if not self._active:
            return
        served = self._served
        if served is not None:
            if served != ask:
                raise _different([served, ask])
            self._served = None
            self._say(_Ask(Word.READY))
            return
        words = self._say(ask)
        asked = _asked(words)
        if len(asked) > 1:
            raise _different(asked)
        if any(each.word not in _ASKS for each in words):
            self._say(_Ask(Word.READY))

    def make(self, begin: Callable[[], dist.Work], *, wait: bool) -> dist.Work | None:
        """Make a collective that all ranks have come to."""
        with torch_private.unseen():
            try:
                work = self._retry("begin a collective", begin)
            except BaseException as error:  # the others cannot be told: they are in it
                self._control.lose(f"{type(error).__name__} kept a rank from a collective: {error}")
                raise
            if not wait:
                return work
            self._wait(work, Place.PIECE)
        return None

    def undo_mean(self, sums: Tensor, group: dist.ProcessGroup) -> None:
        """Make a mean over the ranks the sum: pieces are weighed among all ranks' samples."""
        if self._active:
            with torch_private.unseen():
                sums.mul_(dist.get_world_size(group))

    def _serve(self, mine: Word) -> list[_Ask]:
        """Meet with a word, and make the collectives that others ask for.

        Returns:
            The words of a meeting in which no rank has asked for one.
        """
        while True:
            words = self._say(_Ask(mine))
            asked = _asked(words)
            if not asked:
                return words
            if len(asked) > 1:
                raise _different(asked)
            self._serve_one(asked[0])

    def _serve_one(self, ask: _Ask) -> None:
        unit = self._units[ask.unit]
        self._served = ask
        if ask.word is Word.GATHER:
            unit.reshard()
            unit.unshard()
            unit.reshard()
        else:
            self._put_aside()
            torch_private.add_no_gradient(unit)
        if self._served is not None:  # it did not come to the collective
            raise _different([ask])

    def _finish_pieces(self) -> None:
        """Serve the other ranks until none of them has a piece."""
        while not self._over:
            words = self._serve(Word.DONE)
            self._over = all(each.word is Word.DONE for each in words)

    def _attend(self) -> None:
        """Serve the other ranks with no piece to start over with."""
        while not self._over:
            try:
                self._finish_pieces()
            except PeerOutOfMemory:
                self.undo()
            except ElasticMBSError:
                raise
            except BaseException:
                self.undo()
                raise

    # ------------------------------------------------------------------ one call

    def begin(self) -> None:
        """Begin a training call; see `Peers`."""
        super().begin()
        check_again(self._units, in_step=True)
        self._start()

    def _start(self) -> None:
        for unit in self._units:
            unit.reshard()  # a forward outside of a call can have left it whole
        model = self._model
        if model.refresh() or model.modules is not self._modules:
            self._follow(model)
            self._make_common_room(self._parameters)
        self._over, self._told, self._served, self._aside = False, False, None, None
        self._summed_unused = list(map(torch_private.sums_unused, self._units))
        for index, unit in enumerate(self._units):
            # Sums then have one length, whichever parameters a piece has used.
            unit.set_reduce_scatter_unused_params(True, recurse=False)
            gather: Any = _Collective(self, Word.GATHER, index)
            scatter: Any = _Collective(self, Word.SCATTER, index)
            unit.set_custom_all_gather(gather)
            unit.set_custom_reduce_scatter(scatter)
        for unit in self._outer:
            torch_private.make_ready(unit)
        self._active = True

    def before_piece(self) -> None:
        """Begin a piece together with the ranks that have one; see `Peers`."""
        self._serve(Word.BEGIN)

    def before_backward(self, gradients: Gradients, *, last: bool) -> None:
        """Put the gradients of shards aside; see `Peers`."""
        self._put_aside()

    def after_backward(self, *, last: bool) -> None:
        """Serve the others after the last piece, which is a part of it; see `Peers`."""
        if last:
            self._finish_pieces()

    def _put_aside(self) -> None:
        if self._aside is None:  # a loop may clear old ones in its first piece
            self._aside = [(each, each.grad) for each in self._parameters]
            self._clear()

    def _clear(self) -> None:
        """Drop the gradients of this call."""
        for parameter, _ in self._aside or ():
            parameter.grad = None

    def undo(self) -> bool:
        """Drop what a failed attempt has left; see `Peers`."""
        own = not self._told
        if own:
            self._tell_of_failure()
        self._told = False
        self._reset()
        self._clear()
        return own

    def _tell_of_failure(self) -> None:
        self._say(_Ask(Word.FAILED))

    def _reset(self) -> None:
        self._served = None
        with torch_private.unseen():
            for unit in self._outer:
                unit.reset_iter_state()
            for unit in self._units:
                torch_private.drop_whole_gradients(unit)

    def meet(self, gradients: Gradients, result: StepResult) -> StepResult:
        """Wait for the ranks that have pieces, and add up the losses; see `Ranks`."""
        if not self._over:
            self._retry("serve the other ranks", self._attend)
        self._active = False
        return result if self._beside else super().meet(gradients, result)

    def _prepare_sums(self, gradients: Gradients) -> None:
        """Note which parameters the graphs of this call have reached."""
        self._check_gradients(gradients)
        reached = set(map(id, gradients.leaves()))
        pairs = chain.from_iterable(map(torch_private.shards_and_wholes, self._units))
        used = {id(shard) for shard, whole in pairs if id(whole) in reached}
        self._wanted = [id(each) in used for each in self._parameters]

    def _used(self) -> bytes:
        return bytes(self._wanted)

    def _use_all(self, used: bytes) -> None:
        """Follow the other ranks, of which some have used other parameters."""
        self._wanted = self._gather_maps(used)

    def _sum_gradients(self, agreed: Agreed) -> None:
        """Do nothing: every backward has summed."""

    def _keep_sums(self, gradients: Gradients) -> None:
        """Add the gradients to those that were there; none where no rank has used a parameter."""
        with torch.no_grad(), torch_private.unseen():
            for (parameter, there), wanted in zip(self._aside or (), self._wanted, strict=False):
                made = parameter.grad if wanted else None
                parameter.grad = made
                if there is None:
                    continue
                assert isinstance(there, DTensor)
                if made is not None:
                    assert isinstance(made, DTensor)
                    there.to_local().add_(made.to_local())
                parameter.grad = there
        self._aside = None

    def failed(self, error: BaseException) -> None:
        """Put gradients back, and tell the others; see `Ranks`."""
        self._active = False
        if not self._over or self._aside is not None:
            self._reset()
        for parameter, there in self._aside or ():
            parameter.grad = there
        self._over, self._aside = True, None
        super().failed(error)

    def end(self) -> None:
        """End a call; see `Peers`."""
        self._active = False
        for unit, before in zip(self._units, self._summed_unused, strict=False):
            unit.reshard()
            unit.set_reduce_scatter_unused_params(before, recurse=False)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Return a block of an evaluation; see `Peers`."""
        self._come_back()
        self._met = False
        self._start()
        self._beside = True
        try:
            yield
        except BaseException as error:
            self.failed(error)
            raise
        finally:
            self._met, self._beside = True, False
            self.end()


def _outermost(units: Sequence[FSDPModule]) -> list[FSDPModule]:
    inner: set[nn.Module] = set()
    found = []
    for unit in units:  # the outer ones come first
        module = as_module(unit)
        if module not in inner:
            found.append(unit)
        inner.update(module.modules())
    return found


def _ask_of(row: Row) -> _Ask:
    word, unit, numel = map(int, row.values[:3])
    return _Ask(Word(word), unit, numel)


def _asked(words: Sequence[_Ask]) -> list[_Ask]:
    """Return the collectives that ranks ask for, each once."""
    return list(dict.fromkeys(each for each in words if each.word in _ASKS))


def _different(asked: Sequence[_Ask]) -> MisuseError:
    words = {Word.GATHER: "the parameters", Word.SCATTER: "the gradients"}
    found = ", and ".join(f"{words[e.word]} of unit {e.unit} ({e.numel} elements)" for e in asked)
    return MisuseError(
        f"the ranks do not make the same collectives in a piece: {found}. In lock-step mode every "
        "piece of every rank runs the same units and trains the same parameters: use mode='local'"
    )


def _check_collectives(units: Sequence[FSDPModule]) -> None:
    """Refuse units whose collectives are not the usual ones: lock-step puts its own in place."""
    for unit in units:
        method = next(iter(torch_private.forward_methods(unit)), None)
        if method is not None:
            raise UnsupportedError(
                f"{method} of {type(unit).__name__} is registered by "
                "register_fsdp_forward_method, and mode='lockstep' meets in forward alone: leave "
                "that out, or use mode='local'"
            )
        for kind in torch_private.collectives_of(unit):
            if not (issubclass(kind, _Collective) or kind.__name__.startswith("Default")):
                raise UnsupportedError(
                    f"{type(unit).__name__} has collectives of its own ({kind.__name__}), and "
                    "mode='lockstep' puts others in their place: leave them out, or use "
                    "mode='local'"
                )


def _check_options(settings: Settings) -> None:
    if not hasattr(FSDPModule, "reset_iter_state"):
        raise UnsupportedError(
            f"mode='lockstep' needs torch 2.13, which can take back a backward of fully_shard that "
            f"has failed, and this is torch {torch.__version__}: use mode='local'"
        )
    gradients = settings.gradients
    refused = {
        "scaler=": settings.scaler is not None,
        "GradientOptions(accumulate_dtype=)": gradients.accumulate_dtype is not None,
    }
    for name, given in refused.items():
        if given:
            raise UnsupportedError(f"{name} is not supported with mode='lockstep': leave it out")
