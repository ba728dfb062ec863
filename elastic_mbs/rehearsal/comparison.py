"""The losses and gradients of a few samples, taken whole and in pieces."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.loss_terms import Terms, check_graph, lost_in, read_losses
from elastic_mbs.batch.pieces import partition, smallest_size
from elastic_mbs.batch.transfer import to_device
from elastic_mbs.batch.view import BatchView, map_tensors
from elastic_mbs.engine.shared.resources import Resources
from elastic_mbs.engine.snapshot import Snapshot
from elastic_mbs.errors import UsageError
from elastic_mbs.rehearsal.kept import Kept
from elastic_mbs.rollback.sample_draws import SampleDraws

# relative difference of two losses that is rounding, by the coarsest type in the graph
TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4}
_HALF, _ON_DEVICE = 2e-2, 5e-3  # of half precision; of a device, which may multiply in TF32

_LEAST = 1e-30  # of a scale
_LOOKED_AT = 64  # elements of each leaf's gradient

Losses = dict[str | None, float]  # by name


@dataclass(frozen=True)
class Ran:
    """A range of samples that ran, and its losses."""

    start: int
    stop: int
    losses: Losses


Ranges = Sequence[tuple[int, int]]


class Comparison:
    """The losses of a few samples, taken whole and in pieces.

    The pieces run one after the other, as in a call: each sees the buffers that the one before has
    left. Random streams are put back for each, and modules are in evaluation, but where state is
    compared.

    Attributes:
        whole: the losses of all samples.
        ones: the smallest pieces.
        halves: two pieces.
    """

    def __init__(
        self,
        resources: Resources,
        view: BatchView,
        counts: Counts,
        loss_fn: Callable[[Any], Any],
        snapshot: Snapshot,
        kept: Kept,
    ) -> None:
        self.resources = resources
        self.view = view
        self.counts = counts
        self.loss_fn = loss_fn
        self.snapshot = snapshot
        self.kept = kept
        self.reduction = resources.settings.reduction
        self._draws: Callable[[int, int], SampleDraws] | None = None  # of a range of samples
        self._trains = False
        self._tolerance = 0.0
        limits, n = resources.settings.limits, view.length
        self._cuts: list[Ranges] = [
            partition(0, n, size, minimum=limits.minimum, align=limits.align)
            for size in (limits.floor, smallest_size(n, 2, align=limits.align))
        ]
        self.run_all()

    def run_all(self) -> None:
        """Run the samples whole and in pieces."""
        self.whole = self.run([(0, self.view.length)])[0].losses
        ones, halves = self._cuts
        self.ones = self.run(ones)
        self.halves = self.ones if halves == ones else self.run(halves)

    @property
    def cuts(self) -> bool:
        """True if the samples are ever cut: they are more than the smallest piece."""
        return len(self._cuts[0]) > 1

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of the model, and others that have run."""
        return [*self.resources.model.every, *self.kept.modules]

    # ------------------------------------------------------------------ runs

    def run(self, ranges: Ranges, *, each_anew: bool = False) -> list[Ran]:
        """Run ranges of samples one after the other.

        Args:
            ranges: the first sample of each, and one past its last.
            each_anew: put buffers back before each.
        """
        ran: list[Ran] = []
        for start, stop in ranges:
            terms = self._terms(start, stop, anew=each_anew or not ran)
            losses = {name: float(term.detach()) for name, term in terms.items()}
            for name in self.counts.void if len(self.counts.void) < len(losses) else ():
                if math.isnan(losses[name]):
                    losses[name] = 0.0  # over nothing: it has no part in the batch
            ran.append(Ran(start, stop, losses))
            del terms  # or the graph would live beside the next one
        return ran

    def _terms(self, start: int, stop: int, *, anew: bool) -> Terms:
        resources, streams = self.resources, self.snapshot.start
        if anew:
            self.kept.rewind()
        elif streams is not None:
            resources.streams.restore(streams)
        self._set_modes()
        with self._around(start, stop):
            cut = map_tensors(self.view.piece(start, stop), torch.clone)
            piece = to_device(cut, resources.piece_device)
            with self._noting():
                terms = read_losses(self.loss_fn(piece), self.counts.names)[0]
            if stop - start == self.view.length:  # one that counts nothing needs no graph
                check_graph(terms)
        if not self._tolerance:
            self._tolerance = _tolerance(terms.values())
        return terms

    @contextmanager
    def _around(self, start: int, stop: int) -> Iterator[None]:
        """Keep what the library puts around a step, and run compiled code as it was written.

        Each length of a piece would be compiled.
        """
        guard = self.resources.guard
        with ExitStack() as stack:
            if guard is not None:
                guard.renew()
                stack.callback(guard.lift)
            # What a step warns of it says in training, too; here it would say it of every piece.
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(torch.inference_mode(False))
            # A loss without a graph is an error that should be found here as well.
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self.kept)
            if self._draws is not None:
                stack.enter_context(self._draws(start, stop))
            yield

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Note on an error of the user's step that modules were in evaluation."""
        try:
            yield
        except Exception as error:
            if not self._trains and any(self.snapshot.training):
                error.add_note(
                    "elastic_mbs: loss_fn is compared with the modules in evaluation. A model that "
                    "returns no loss there (a detector of torchvision's) cannot be compared, and "
                    "trains without it"
                )
            raise

    def _set_modes(self) -> None:
        """Put modules in evaluation, or back in the modes of training where state is compared.

        BatchNorm takes its statistics from the piece, and spectral norm goes on to the same value:
        neither reads what the pieces before it have left as others do.
        """
        if not self._trains:
            self.resources.model.evaluate()
            return
        self.snapshot.unwind_modes()
        self.kept.put_modes_back()
        for module in self.modules:
            if isinstance(module, nn.modules.batchnorm._BatchNorm) or _is_spectral(module):
                module.training = False

    @contextmanager
    def in_training(self) -> Iterator[None]:
        """Run with the modules in the modes of training, and with the draws of each piece."""
        self._trains, self._draws, draws = True, None, self._draws
        try:
            yield
        finally:
            self._trains, self._draws = False, draws

    def draw_equally(self) -> bool:
        """Run everything again, with the same draws for a sample in its piece as in the whole.

        Returns:
            False where that is impossible: a draw is no row for each sample, or is not torch's.
        """
        return self._draws is not None or self._drawing(SampleDraws)

    def adds_up_alike(self, name: str | None) -> bool:
        """Return whether the pieces make up the whole where all samples draw the same numbers.

        Then a draw may have gone to another sample. Else the loss compares samples, or the like.
        """
        before = self._draws, self.whole, self.ones, self.halves
        try:
            return self._drawing(partial(SampleDraws, alike=True)) and (
                self.adds_up(name, self.reduction) or self.gradients_add_up(name)
            )
        finally:
            self._draws, self.whole, self.ones, self.halves = before

    def _drawing(self, draws: Callable[[int, int], SampleDraws]) -> bool:
        """Run everything again with other draws; return False, and leave all, where it fails."""
        before = self._draws, self.whole, self.ones, self.halves
        self._draws = draws
        try:
            self.run_all()
        except (UsageError, IndexError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            self._draws, self.whole, self.ones, self.halves = before
            return False
        return True

    # ------------------------------------------------------------------ sums

    def weights(self, ran: Ran, reduction: str) -> Mapping[str | None, float]:
        """Return the weight of each loss of a piece."""
        return self.counts.weights(ran.start, ran.stop, reduction)

    def joined(self, pieces: Sequence[Ran], name: str | None, reduction: str) -> float:
        """Return the loss that the pieces make up. One of weight 0 may be NaN."""
        return sum(
            ran.losses[name] * weight
            for ran in pieces
            if (weight := self.weights(ran, reduction)[name])
        )

    def near(self, a: float, b: float) -> bool:
        """Return whether two losses are the same but for rounding.

        The scale is that of all losses: those of pieces can cancel out in the whole.
        """
        sizes = [
            abs(value)
            for losses in (self.whole, *(ran.losses for ran in self.ones))
            for value in losses.values()
        ]
        scale = max([_LEAST, *filter(math.isfinite, sizes)])
        return abs(a - b) <= self._tolerance * scale

    def adds_up(self, name: str | None, reduction: str) -> bool:
        """Return whether the pieces make up the whole."""
        return all(
            self.near(self.whole[name], self.joined(pieces, name, reduction))
            for pieces in (self.ones, self.halves)
        )

    def is_mean_over(self, name: str | None, counted: Sequence[float]) -> bool:
        """Return whether the loss is a mean over so many terms of each sample."""
        total = sum(counted)
        if not total:
            return False
        for pieces in (self.ones, self.halves):
            each = [(ran.losses[name], sum(counted[ran.start : ran.stop])) for ran in pieces]
            if not self.near(
                self.whole[name], sum(loss * count for loss, count in each if count) / total
            ):
                return False
        return True

    def lost(self, name: str | None) -> str | None:
        """Return why the loss of a sample without a loss term would be lost, where it would be."""
        for ran in self.ones:
            if not self.weights(ran, self.reduction)[name]:
                text = lost_in(name, ran.losses[name], f"sample {ran.start}")
                if text is not None:
                    return text
        return None

    # ------------------------------------------------------------------ gradients

    def gradients_add_up(self, name: str | None) -> bool:
        """Return whether the gradients of the pieces make up that of the whole.

        A look at a few elements of each leaf. False where a graph has no gradient of its own.
        """
        n = self.view.length
        whole = self._gradient(0, n, name, 1.0, anew=True)
        if whole is None:
            return False
        scale, total = whole.abs().max(), torch.zeros_like(whole)
        for ran in self.ones:
            weight = self.weights(ran, self.reduction)[name]
            if not weight:
                continue
            part = self._gradient(ran.start, ran.stop, name, weight, anew=ran is self.ones[0])
            if part is None:
                return False
            scale = torch.maximum(scale, part.abs().max())
            total += part
        return bool((total - whole).abs().max() <= self._tolerance * scale) and bool(scale > 0)

    def _gradient(
        self, start: int, stop: int, name: str | None, weight: float, *, anew: bool
    ) -> Tensor | None:
        leaves = self.resources.model.leaves
        term = self._terms(start, stop, anew=anew)[name]
        try:
            found = torch.autograd.grad(term, leaves, allow_unused=True)
        except RuntimeError as error:
            # Checkpointing that is reentrant, and a trainer's own hooks, refuse it.
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return None
        if all(gradient is None for gradient in found):
            return None
        pairs = zip(found, leaves, strict=True)
        return torch.cat([_some(gradient, leaf) * weight for gradient, leaf in pairs])


def _is_spectral(module: nn.Module) -> bool:
    """Return whether a module is torch's spectral norm, or has it as a hook."""
    hooks = module._forward_pre_hooks.values()
    return any("SpectralNorm" in type(each).__name__ for each in (module, *hooks))


def _some(gradient: Tensor | None, leaf: Tensor) -> Tensor:
    """Return a few elements of a leaf's gradient on the host, in double precision."""
    dense = torch.zeros((), dtype=leaf.dtype).expand(leaf.shape) if gradient is None else gradient
    dense = dense.detach() if dense.layout is torch.strided else dense.detach().to_dense()
    flat = (torch.view_as_real(dense) if dense.is_complex() else dense).reshape(-1)
    return flat[:: max(1, flat.numel() // _LOOKED_AT)].cpu().double()


def _tolerance(terms: Any) -> float:
    """Return the relative difference that is rounding: of the coarsest type in the graph."""
    stack = [term.grad_fn for term in terms if term.grad_fn is not None]
    seen, coarsest = set(stack), 0.0
    types = {term.dtype for term in terms}
    on_device = any(term.device.type != "cpu" for term in terms)
    while stack:
        node = stack.pop()
        types.update(each.dtype for each in getattr(node, "_input_metadata", ()))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    for dtype in types:
        if dtype.is_floating_point or dtype.is_complex:
            fine = TOLERANCE.get(dtype, TOLERANCE[torch.float32] if dtype.is_complex else _HALF)
            coarsest = max(coarsest, _ON_DEVICE if on_device and fine == 1e-4 else fine)
    return coarsest
