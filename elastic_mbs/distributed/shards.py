"""Shards of one model on many ranks (FSDP2 and HSDP, `fully_shard`), in local mode.

Parameters are gathered once a call. Each rank then runs its own samples alone, so it may fail and
replay as often as it likes, and at the end of the call gradients go to their shards:

    begin    every rank takes memory for the whole model, and says whether it has it
    gather   one collective after the other, in memory that is there
    pieces   whole parameters are in the modules while a step function runs, and the hooks of
             fully_shard only cast
    meet     the gradients of shards are made; then the ranks meet
    scatter  sums go to the gradients of the shards; with replicas (HSDP) summed over them, too
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, compress
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from elastic_mbs.batch.counts import Counts
from elastic_mbs.distributed import torch_private
from elastic_mbs.distributed.control import Place, Retry
from elastic_mbs.distributed.ranks import WHAT, Agreed, Ranks
from elastic_mbs.distributed.units import (
    WRAPPER,
    QuietUnits,
    check_again,
    check_parameter,
    only_given,
    owners,
)
from elastic_mbs.distributed.wholes import Whole, Wholes
from elastic_mbs.engine.shared.peers import Gradients
from elastic_mbs.engine.shared.trained_model import TrainedModel
from elastic_mbs.errors import (
    GradientsChangedError,
    MicroBatchFloorError,
    MisuseError,
    PeerError,
    UnsupportedError,
)
from elastic_mbs.events import format_bytes
from elastic_mbs.options import Settings

_WAYS_OUT = (
    "Ways out: free what others hold; MixedPrecisionPolicy(param_dtype=torch.bfloat16), which "
    "takes half of it; freeze parameters (LoRA), which then have no gradients; "
    "DistributedOptions(mode='lockstep'), experimental, which gathers each layer when it runs"
)
_GIVE = "give it, too, frozen if it is not trained, ElasticMBS([model, other])"


class _Site(NamedTuple):
    """A place in a module where a parameter is."""

    module: nn.Module
    name: str
    whole: Whole
    put: Callable[[Tensor], None]  # sets the parameter


class _InPlace:
    """A block in which modules have whole parameters. `__exit__` can be repeated."""

    def __init__(self) -> None:
        self.sites: list[_Site] = []

    def __enter__(self) -> None:
        for site in self.sites:
            site.put(site.whole.parameter)

    def __exit__(self, *error: object) -> None:
        for module, name, whole, put in self.sites:
            if module._parameters.get(name) is whole.parameter:
                put(whole.shard)


def _setter(module: nn.Module, name: str) -> Callable[[Tensor], None]:
    """Return the function that sets a parameter, as `fully_shard` does.

    Recurrent modules keep a list of their parameters, which their `__setattr__` follows.
    """
    if type(module).__setattr__ is nn.Module.__setattr__:
        return partial(module._parameters.__setitem__, name)
    return partial(setattr, module, name)


class Shards(Ranks):
    """The other ranks of a model that `fully_shard` was applied to."""

    _wrapper = WRAPPER

    def __init__(
        self, units: Sequence[FSDPModule], model: TrainedModel, settings: Settings, retry: Retry
    ) -> None:
        """Refuse what would not be trained right, and meet the other ranks.

        Args:
            units: the modules that `fully_shard` was applied to, without what `check` refuses.
            model: the modules that the user gave.
            settings: the options.
            retry: runs an operation of ours that can run out of memory.

        Raises:
            UnsupportedError: a placement or an option that would not be trained right.
        """
        _check_options(settings)
        self._units = units
        self._modules: list[nn.Module] = []  # of the model, for which `_wholes` are
        self._wholes = Wholes([])
        self._place = _InPlace()
        self.hooks = (only_given(model, _GIVE), self._place, QuietUnits(units))
        self._follow(model)  # refuses other parameters before anybody waits
        mesh = self._wholes.every[0].shard.device_mesh
        group = mesh.get_group() if mesh.ndim == 1 else torch.distributed.group.WORLD
        assert group is not None
        super().__init__(group, model, settings, retry)
        self._room: Wholes | None = None  # there is memory for what ranks exchange about these
        self._seen: Wholes | None = None  # their gradients were seen to have room
        # gradients of shards at the first backward of the call
        self._before: list[tuple[Tensor | None, int]] | None = None
        self._versions: list[int] = []  # of the whole parameters, as they were gathered
        self._wanted: list[bool] = []  # which trained parameters get a gradient in this call

    def _follow(self, model: TrainedModel) -> None:
        """Follow the model's parameters: which there are, and which are trained."""
        for unit in self._units:
            unit.reshard()  # a forward outside of a call can have left them whole
        if not model.refresh() and model.modules is self._modules:
            return
        self._modules = []  # until all is well
        known = {id(each.shard): each for each in self._wholes.every}
        unit_of = owners(self._units)
        wholes: dict[int, Whole] = {}
        for name, parameter in chain.from_iterable(r.named_parameters() for r in model.roots):
            shard = check_parameter(name, parameter)
            if shard is None or id(shard) in wholes:
                continue
            if id(shard) not in unit_of:
                raise UnsupportedError(
                    f"the parameter {name!r} is a DTensor outside of any unit of fully_shard: "
                    "tensor parallelism is not supported"
                )
            whole = known.get(id(shard)) or Whole(name, shard, unit_of[id(shard)])
            whole.parameter.requires_grad_(shard.requires_grad)
            wholes[id(shard)] = whole
        self._set(list(wholes.values()))
        self._place.sites = [
            _Site(module, name, wholes[id(parameter)], _setter(module, name))
            for module in model.modules
            for name, parameter in module._parameters.items()
            if id(parameter) in wholes
        ]
        self._modules = model.modules
        model.replace({key: whole.parameter for key, whole in wholes.items()})

    def _set(self, wholes: list[Whole]) -> None:
        if not wholes:
            raise UnsupportedError("fully_shard was applied to a model without parameters")
        first = wholes[0].shard.device_mesh
        for whole in wholes:
            if whole.shard.device_mesh != first:
                raise UnsupportedError(
                    f"{whole.name} and {wholes[0].name} are sharded over different meshes: give "
                    "fully_shard one mesh for the whole model"
                )
        self._wholes = Wholes(wholes)
        forms = [(each.name, tuple(each.shard.shape), str(each.dtype)) for each in wholes]
        self._forms = float(zlib.crc32(repr(forms).encode()))

    # ------------------------------------------------------------------ whole, and not

    def _make_whole(self, *, training: bool) -> None:
        """Gather all parameters: every rank takes memory first, and says whether it has it."""
        problem: Exception | None = None
        try:
            with torch.inference_mode(False):
                self._reserve(gradients=training and self._seen is not self._wholes)
        except Exception as error:
            problem = error
        try:
            rows = self._meet(Place.WHOLE, [self._forms], problem)
            if len({row.values[0] for row in rows}) > 1:
                raise MisuseError(
                    "the ranks have different parameters (by name, shape or type): make the same "
                    "model on every rank, with the same precision"
                )
            self._gather()
        except BaseException:
            self._release()
            raise

    def _reserve(self, *, gradients: bool) -> None:
        """Take memory for the whole model, and see that its gradients have room."""
        wholes = self._wholes
        sizes = list(map(format_bytes, wholes.sizes()))
        what = (
            f"hold the whole model, as local mode does for the length of a call: {sizes[0]} of "
            f"parameters, {sizes[1]} of gradients and {sizes[2]} for collectives, on each rank"
        )

        def take() -> None:
            wholes.allocate(gradients=gradients)
            if self._room is not wholes:
                self._make_common_room([each.parameter for each in wholes.trained])
                self._room = wholes

        try:
            self._retry(what, take)
        except MicroBatchFloorError as error:
            raise MicroBatchFloorError(f"{str(error).rstrip('.')}. {_WAYS_OUT}") from None
        if gradients:
            self._seen = wholes

    def _gather(self) -> None:
        try:
            with torch.inference_mode(False), torch.no_grad(), torch_private.unseen():
                self._wholes.gather(self._wait_for_whole, self._retry)
        except PeerError:
            raise
        except BaseException as error:  # the others cannot be told at a meeting: they gather
            self._control.lose(f"{type(error).__name__} ended the gathering: {error}")
            raise

    def _wait_for_whole(self, work: torch.distributed.Work) -> None:
        self._wait(work, Place.WHOLE)

    def _release(self) -> None:
        """Drop the whole parameters. Can be repeated."""
        with torch_private.unseen():
            self._wholes.release()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Return a block of an evaluation, in which parameters are whole; see `Peers`."""
        held = self._wholes.held  # by a training call, in one of its callbacks
        self._come_back()
        self._follow(self._model)
        self._make_whole(training=False)
        try:
            yield
        finally:
            if not held:
                self._release()

    # ------------------------------------------------------------------ one call

    def begin(self) -> None:
        """Begin a training call; see `Peers`."""
        super().begin()
        check_again(self._units)
        self._follow(self._model)
        for whole in self._wholes.every:
            whole.check()
        self._before = None

    def share(self, counts: Counts) -> Counts:
        """Gather the parameters, and return the counts; see `Ranks`."""
        self._make_whole(training=True)
        self._met = False  # the one at the end is still to come
        self._versions = self._wholes.versions()
        return super().share(counts)

    def before_backward(self, gradients: Gradients, *, last: bool) -> None:
        """Note the gradients of shards. Those of whole parameters are this call's alone."""
        self._note_gradients()

    def _note_gradients(self) -> list[tuple[Tensor | None, int]]:
        if self._before is None:  # a loop may clear old ones in its first piece
            self._before = list(map(_gradient_of, self._wholes.trained))
        return self._before

    def _prepare_sums(self, gradients: Gradients) -> None:
        """Make the gradients of the shards, without values."""
        self._check_gradients(gradients)
        self._check_edits()
        self._retry(WHAT, self._wholes.prepare_scatter)

    def _check_edits(self) -> None:
        """Refuse what a step did to shards, and to parameters that are dropped after the call."""
        trained, every = self._wholes.trained, self._wholes.every
        for before, whole in zip(self._note_gradients(), trained, strict=True):
            if not _same(before, _gradient_of(whole)):
                raise GradientsChangedError(
                    f"the gradient of {whole.name!r} was changed in the middle of a batch: call "
                    "zero_grad(), clip or edit gradients after the whole batch, next to "
                    "optimizer.step(), and compute with the parameters that modules have in "
                    "loss_fn, not with a list made before"
                )
        for old, new, whole in zip(self._versions, self._wholes.versions(), every, strict=True):
            if new != old:
                raise UnsupportedError(
                    f"the step edits the parameter {whole.name!r} in place, and the whole one is "
                    "dropped after the call, as by fully_shard itself: edit parameters next to "
                    "optimizer.step()"
                )

    def _used(self) -> bytes:
        """Return for each trained parameter whether it has a gradient."""
        self._wanted = [whole.parameter.grad is not None for whole in self._wholes.trained]
        return bytes(self._wanted)

    def _use_all(self, used: bytes) -> None:
        """Have gradients on all ranks where one rank has them."""
        self._wanted = self._gather_maps(used)

    def _sum_gradients(self, agreed: Agreed) -> None:
        """Sum the gradients in parts, and take those of this rank's shards."""
        self._wholes.scatter(agreed.share, self._wait, self._retry)

    def _keep_sums(self, gradients: Gradients) -> None:
        """Make the sums the gradients of the shards, or add them."""
        with torch.no_grad(), torch_private.unseen():
            for whole in compress(self._wholes.trained, self._wanted):
                whole.keep_gradient()

    def failed(self, error: BaseException) -> None:
        """Drop the whole parameters, and tell the others; see `Ranks`."""
        self._release()
        super().failed(error)

    def end(self) -> None:
        """Drop the whole parameters."""
        self._release()


def _gradient_of(whole: Whole) -> tuple[Tensor | None, int]:
    """Return the gradient of a shard, and how often it was changed."""
    grad = whole.shard.grad
    if grad is None:
        return None, 0
    with torch.no_grad():
        return grad, grad.to_local()._version  # type: ignore[attr-defined]


def _same(before: tuple[Tensor | None, int], now: tuple[Tensor | None, int]) -> bool:
    return before[0] is now[0] and before[1] == now[1]


def _check_options(settings: Settings) -> None:
    if settings.scaler is not None:
        raise UnsupportedError(
            "scaler= with fully_shard makes collectives inside optimizer_step, where a rank may "
            "fail alone: train in bfloat16, MixedPrecisionPolicy(param_dtype=torch.bfloat16), "
            "which needs no scaler"
        )
