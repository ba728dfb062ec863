"""The gradients of one call: census, isolation, backward, commit, rollback and unwinding.

A piece's life here:

    prepare    census: which leaves does the graph reach, where that is not known
    run        isolation where it is needed, then backward of the weighted loss
    observe    all gradients as backward has left them
    commit     the contribution counts; the ledger notes the gradients
    restart    all contributions of the call are dropped; the batch runs from its start

Leaves whose `.grad` was not empty when the call began need isolation: afterwards their old part
could not be separated from the call's contribution.

Source: docs/internals/autograd.md#partial-commits and #isolation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from elastic_mbs.engine.attempt import Attempt
from elastic_mbs.engine.shared.knowledge import LossProfile
from elastic_mbs.engine.shared.resources import Resources
from elastic_mbs.errors import MisuseError, OptimizerInBackwardError, ReplayUnsafeError
from elastic_mbs.noise_scale import NoiseScale, Smoothed, estimate, squared_norm
from elastic_mbs.rollback.gradients import Observation, separate
from elastic_mbs.rollback.graph import (
    Census,
    drain,
    drop_unrun,
    has_hook,
    inner_backwards,
    walk,
)
from elastic_mbs.rollback.isolation import Isolation
from elastic_mbs.rollback.scaler import reset_half_made


class Left(NamedTuple):
    """The contributions that a failed attempt has left in gradients.

    Attributes:
        commits: how many commits it had made.
        unknown: the shape of a leaf with a gradient that the ledger does not know.
        unwatched: its graph had functions written in Python, and no look was taken at backwards
            inside its backward.
    """

    commits: int = 0
    unknown: str | None = None
    unwatched: bool = False


class CallGradients:
    """The gradients of one call.

    Made for every call, so it is cheap: an instance holds only the fields that differ from the
    defaults.

    Attributes:
        full: ids of the leaves whose `.grad` was not empty when the call began.
        isolation: gradients that are set aside while a piece runs; None where that is not needed.
        settled: a backward needs neither a census nor isolation.
    """

    isolation: Isolation | None = None
    _census_taken = False  # in this call
    _seen: Observation | None = None  # all gradients after the running attempt's backward
    _modified = False  # the call has written to `.grad` directly
    _failed = False  # an attempt of this call has failed
    _emptying = False  # gradients are being set aside, and that is not noted yet
    _ran = False  # a backward has begun
    _restarted = False  # ... and the batch has started over since
    _aside: Isolation | None = None  # gradients that are put aside for the whole call
    _extra: Sequence[torch.Tensor] = ()  # leaves outside the model, once the call has ended

    def __init__(self, resources: Resources, profile: LossProfile, *, training: bool) -> None:
        """Note all gradients as they are.

        Args:
            resources: the model and its ledger.
            profile: the facts about the loss function.
            training: False for an evaluation, which has no gradients.
        """
        self._resources = resources
        self._ledger = resources.ledger
        self._profile = profile
        self._training = training
        self._norms: list[tuple[int, Sequence[torch.Tensor]]] = []
        if training:
            self._ledger.note()
        self.full = self._ledger.with_gradient() if training else set[int]()
        self.settled = self._is_settled()

    def leaves(self) -> list[torch.Tensor]:
        """Return every leaf that this call can have changed."""
        return [*self._ledger.leaves(), *self._extra] if self._training else []

    def _is_settled(self) -> bool:
        plain = self._resources.settings.plain and not self._failed
        return plain and self._profile.settled and not self.full

    # ------------------------------------------------------------------ edits by other code

    def unchanged(self, *, at_end: bool = False) -> bool:
        """Return whether no other code has changed a gradient since the last piece.

        Args:
            at_end: the call ends, so each gradient is looked at. Between two pieces versions tell.
        """
        return self._ledger.unchanged(kept=self.settled and self._ran and not at_end)

    def check(self, *, first: bool) -> None:
        """Refuse gradients that other code has changed since the last piece.

        Args:
            first: no piece of this call has run yet. Gradients that the caller clears now are no
                error: the call begins without them.

        Raises:
            BackwardInsideError: the step function ran backward.
            GradientsChangedError: a gradient was cleared, replaced or edited.
        """
        ledger = self._ledger
        if first and all(leaf.grad is None for leaf in ledger.changed()):
            ledger.note()
            self.full &= ledger.with_gradient()
        try:
            ledger.check_unchanged()
        except MisuseError:
            self._modified = True  # by the step, which `unwind` tells of as of the call's own
            raise

    # ------------------------------------------------------------------ before backward

    def prepare(self, attempt: Attempt) -> None:
        """Take the census of an attempt's graph, where its leaves are not known.

        Once for a loss function; once a call where its graph reaches leaves outside the model;
        always after a failure.
        """
        profile = self._profile
        known = profile.census_taken and (self._census_taken or not profile.extra_leaves)
        if known and not self._failed:
            return
        census = _census(attempt)
        profile.learn_custom(census.custom)
        self._add_leaves(census.leaves)
        model = self._resources.model
        profile.learn_census(normalises_batch=census.normalises_batch or model.normalises_batch())
        self._census_taken = True

    def unsettle(self) -> None:
        """Take the census of every attempt from here on: one has failed."""
        self.settled = False
        self._failed = True

    def _add_leaves(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Add leaves outside the model to the ledger, before one of them has a commit.

        Returns:
            The leaves that were new.
        """
        extra = self._ledger.add_extra(leaves)
        full = [leaf for leaf in extra if leaf.grad is not None]
        self.full.update(map(id, full))
        if self._restarted and full:  # their gradients can be from the dropped attempts
            raise ReplayUnsafeError(
                f"a leaf of shape {tuple(full[0].shape)} outside the model appeared in the middle "
                "of the batch, so its gradient can hold samples that are now being replayed: call "
                "zero_grad() on it and run the batch again, or give its module in model=[...]"
            )
        if extra:
            self._profile.learn_extra_leaves()
        return extra

    def _add_inner_leaves(self, leaves: Sequence[torch.Tensor]) -> None:
        """Add leaves of a backward inside a backward, which the census cannot reach."""
        extra = self._add_leaves(leaves)
        if self.isolation is not None:
            self.isolation.set_aside(extra)

    def _set_aside(self) -> None:
        """Set gradients aside where the contribution of a failed piece could not be dropped."""
        settings = self._resources.settings
        if self.isolation is None and (self.full or settings.isolates):
            self.isolation = Isolation(settings.gradients.accumulate_dtype)
        if self.isolation is not None:
            self._emptying = True
            self.isolation.set_aside(self._ledger.leaves())
            self._ledger.note()
            self._emptying = False

    # ------------------------------------------------------------------ backward

    def run(self, attempt: Attempt) -> None:
        """Run backward from the attempt's loss times its weight."""
        loss = attempt.graph
        assert loss is not None
        self._ran = True
        if self.settled:
            self._modified = True
            torch.autograd.backward(loss, attempt.weight)
            return
        self._set_aside()
        self._modified = self._modified or self.isolation is None
        if not self._profile.custom:
            self._run(loss, attempt.weight)
            return
        root = attempt.root
        assert root is not None
        with inner_backwards(root, self._add_inner_leaves):
            self._run(loss, attempt.weight)

    def _run(self, loss: torch.Tensor, weight: torch.Tensor | None) -> None:
        settings = self._resources.settings
        own = settings.gradients.backward
        if own is None and settings.scaler is None:
            torch.autograd.backward(loss, weight)
            return
        loss = loss if weight is None else loss * weight
        if settings.scaler is not None:
            loss = settings.scaler.scale(loss)
        if own is None:
            torch.autograd.backward(loss)
        else:
            own(loss)

    def observe(self) -> None:
        """Look at all gradients as backward has left them: later changes are not the engine's."""
        self._seen = self._ledger.observe(kept=self.settled)

    # ------------------------------------------------------------------ commit

    def commit(self, attempt: Attempt) -> bool:
        """Count the contribution of an attempt whose backward has ended.

        Returns:
            Whether its number of commits is new.

        Raises:
            OptimizerInBackwardError: a leaf has lost its gradient.
            GradientsChangedError: other code has changed a gradient since backward.
        """
        assert self._seen is not None
        seen = self._seen
        self._seen = None
        # This fast path looks at no leaf. The next check sees changes made since backward.
        if self.isolation is None and self._ledger.advance(seen, self._profile.commits):
            return False
        return self._commit_by_leaf(attempt, seen)

    def _commit_by_leaf(self, attempt: Attempt, seen: Observation) -> bool:
        """Commit with a look at each leaf, and learn from a number of commits that is new."""
        resources, ledger = self._resources, self._ledger
        ledger.check_kept(seen)
        changed = ledger.changed()
        self._check_cleared(attempt, changed)
        committed = [leaf for leaf in changed if leaf.grad is not None]
        new = len(committed) not in self._profile.commits and attempt.root is not None
        if new:
            self._learn(attempt, committed)
        self._separate()
        if resources.settings.gradients.noise_scale is not None:
            norms = resources.retry(
                "take the norm of a piece's gradient",
                lambda: squared_norm(resources.model.leaves if attempt.differentiable else ()),
            )
            self._norms.append((len(attempt.piece), norms))
        isolation = self.isolation
        if isolation is not None:
            self._modified = True
            resources.retry("add a piece's gradient to the batch's", isolation.fold)
        ledger.note()
        return new

    def _check_cleared(self, attempt: Attempt, changed: list[torch.Tensor]) -> None:
        """Refuse a backward in which a leaf that committed has lost its gradient.

        A custom function can return None for an input. Such a leaf never has a gradient.
        """
        cleared = [leaf for leaf in self._ledger.leaves() if leaf.grad is None and has_hook(leaf)]
        if cleared and attempt.root is not None:
            reached = set(map(id, walk(attempt.root).leaves))
            cleared = [leaf for leaf in cleared if id(leaf) in reached]
        for leaf in (*changed, *cleared):
            if leaf.grad is None:
                raise OptimizerInBackwardError(
                    f"{self._resources.model.name_of(leaf)} lost its gradient during backward: an "
                    "optimizer steps inside backward (a post-accumulate hook that steps and clears "
                    ".grad). Each piece would then be a step of its own; take the hook off and "
                    "step once after the batch"
                )

    def _learn(self, attempt: Attempt, committed: list[torch.Tensor]) -> None:
        """Learn from a clean backward with a number of commits that is new."""
        resources = self._resources
        self._profile.learn_commits(len(committed))
        self._profile.learn_custom(_census(attempt).custom)
        for leaf in committed:
            if has_hook(leaf):
                resources.warn(
                    "tensor-hook",
                    f"{resources.model.name_of(leaf)} has a hook on its gradient, which runs once "
                    "per micro-batch: it must be linear (no clamp, no norm) for the gradient to "
                    "be the whole batch's",
                )
        self.settled = self.settled and self._is_settled()

    def _separate(self) -> None:
        """Give each gradient that this call has made memory of its own.

        Gradients that were there when it began are the user's, and so is their place.
        """
        made = [leaf for leaf in self._ledger.leaves() if id(leaf) not in self.full]
        self._resources.retry("give each gradient memory of its own", lambda: separate(made))

    # ------------------------------------------------------------------ after a failure

    def left_by(
        self, attempt: Attempt, *, after_forward: bool, first: bool, training: bool
    ) -> Left:
        """Return the contributions that a failed attempt has left.

        Args:
            attempt: the attempt, with its graph.
            after_forward: its backward had begun.
            first: no piece of this call has run before it.
            training: its pass runs backward.
        """
        if not training:
            return Left()
        if self._emptying and self.isolation is not None:  # its backward has not begun
            self.isolation.discard()
            self._note()
            self._emptying = False
            return Left()
        if not after_forward:
            self.check(first=first)
            return Left()
        self._ledger.check_kept(self._seen)
        drain(self._ledger.leaves())
        commits = len(self._ledger.changed())
        if attempt.root is None:
            return Left(commits)
        census = _census(attempt)
        unknown = [
            str(tuple(leaf.shape))
            for leaf in census.leaves
            if leaf.grad is not None and leaf not in self._ledger
        ]
        unwatched = bool(census.custom) and not self._profile.custom
        self._profile.learn_custom(census.custom)
        return Left(commits, unknown[0] if unknown else None, unwatched)

    def drop_piece(self) -> None:
        """Drop the contribution of a failed piece, which is isolated or has none."""
        if self.isolation is not None:
            self.isolation.discard()
        self._note()

    def restart(self) -> None:
        """Drop all contributions of the call: the batch runs from its start."""
        self.isolation = None
        for leaf in self.leaves():
            leaf.grad = None
        self._norms.clear()
        self._restarted = self._ran
        self._note()

    def _note(self) -> None:
        self._seen = None
        self._ledger.note()

    def clear_backward(self) -> None:
        """Drop everything that a failed backward has left outside of gradients."""
        drop_unrun()
        reset_half_made(self._resources.settings.scaler)

    # ------------------------------------------------------------------ gradients put aside

    def put_aside(self, leaves: Iterable[torch.Tensor]) -> None:
        """Put the gradients of `leaves` that are there aside until the call ends.

        The call then begins with empty gradients, so it can start over. Leaves outside the model
        are known from here on.
        """
        leaves = list(leaves)
        self._add_leaves(leaves)
        found = [leaf for leaf in leaves if leaf.grad is not None]
        if found:
            self._aside = self._aside or Isolation()
            self._aside.set_aside(found)
            self._ledger.note()
            self.full -= set(map(id, found))
        self.settled = self._is_settled()

    def take_back(self) -> None:
        """Add the gradients of the call to the ones that were put aside."""
        aside = self._aside
        if aside is None:
            return
        self.full |= aside.leaf_ids()
        self._modified = True
        retry = self._resources.retry
        retry("add the gradients to those that were there", aside.fold)
        retry("put the gradients back in their places", aside.finish)
        self._aside = None

    # ------------------------------------------------------------------ the end of a call

    def finish(self) -> None:
        """Write gradients that were kept apart to their leaves."""
        if self.isolation is not None:
            self._resources.retry("write the gradient in its own type", self.isolation.finish)

    def noise_scale(self, noise: Smoothed, *, adds_up: bool) -> NoiseScale | None:
        """Return the noise scale with the contributions of this call's pieces.

        A single piece says nothing of how samples differ, nor do gradients that were there before.

        Args:
            noise: the estimate of earlier calls.
            adds_up: the losses of the pieces add up to the loss of the batch.
        """
        if not adds_up:
            return noise.latest
        resources = self._resources
        scaler = resources.settings.scaler
        scale = 1.0 if scaler is None else scaler.get_scale()

        def read(norms: Sequence[torch.Tensor]) -> float:
            return sum(map(float, norms)) / scale**2

        pieces = [(samples, read(norms)) for samples, norms in self._norms]
        if len(pieces) > 1 and not self.full:
            noise.add(*estimate(pieces, read(squared_norm(resources.model.leaves))))
        return noise.latest

    def unwind(self) -> bool:
        """Empty the gradients that were empty when a call began that ends by an error.

        Can be repeated, after an error in the middle too.

        Returns:
            Whether a gradient that was not empty may hold a part of the call.
        """
        leaves = self.leaves()
        if self._training:
            with suppress(RuntimeError):  # the device can be lost
                drain(leaves)
            self.clear_backward()
        isolation = self.isolation
        intact = {id(leaf) for leaf in leaves if isolation is not None and isolation.intact(leaf)}
        dirty = self._modified and not self.full <= intact
        if isolation is not None:
            isolation.rewind()
        self.isolation = None
        self._modified = dirty  # as it is now, should this be repeated
        for leaf in leaves:
            if id(leaf) not in self.full:
                leaf.grad = None
        return dirty

    def close(self) -> None:
        """Put gradients back that are still aside, and let go of all others."""
        if self._aside is not None:
            self._aside.rewind()
            self._aside = None
        self._seen = None
        self._extra = self._ledger.extra_leaves()  # a call can be refused after its end
        # Last: where an interrupt strikes before it, everything can still be put back.
        self._ledger.forget()


def _census(attempt: Attempt) -> Census:
    root = attempt.root
    assert root is not None
    return walk(root)
