"""The parts of one call.

Each part has fields of its own, and its module alone assigns them:

    gradients   census, isolation, commits            snapshot  streams, buffers, modes
    progress    pieces, size, counts of failures      edits     edits of the batch by the step
    hooks       the hooks around an attempt           report    time, peak, events
    loader      pieces on their way to the device     profile   the facts about the loss function
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from elastic_mbs.batch.counts import Counts
from elastic_mbs.batch.pieces import TokenBudget
from elastic_mbs.batch.schedule import Schedule
from elastic_mbs.batch.transfer import Loader
from elastic_mbs.batch.view import BatchView
from elastic_mbs.controller.messages import Decision, Extent, Key, shape_class
from elastic_mbs.engine.edits import BatchEdits
from elastic_mbs.engine.gradients import CallGradients
from elastic_mbs.engine.hooks import AttemptHooks
from elastic_mbs.engine.progress import Progress
from elastic_mbs.engine.report import CallReport, count_batch, held_beside
from elastic_mbs.engine.shared.companions import NEAR, can_keep_state, reached
from elastic_mbs.engine.shared.knowledge import Knowledge, LossProfile
from elastic_mbs.engine.shared.peers import Alone, Peers
from elastic_mbs.engine.shared.resources import Resources
from elastic_mbs.engine.shared.tuning import Turn, begin_turn, end_turn
from elastic_mbs.engine.snapshot import Snapshot
from elastic_mbs.escalation.ladder import Step
from elastic_mbs.events import Deescalated
from elastic_mbs.rollback.places import keeps_statistics


@dataclass(frozen=True)
class Batch:
    """The batch of a call, and its name.

    Attributes:
        view: the samples.
        counts: the loss terms of each sample.
        name: the display name of the loss function.
        identity: the key by which the facts about the loss function are kept.
        training: the call makes gradients.
        own_graph: the user's frame holds the graph of an attempt while it is replayed.
        sources: returns what the step is made of: its function and arguments.
    """

    view: BatchView
    counts: Counts
    name: str
    identity: object
    training: bool = True
    own_graph: bool = False
    sources: Callable[[], Iterable[Any]] = tuple

    @property
    def key(self) -> Key:
        """The kind of call, by which sizes and limits are kept."""
        mode = "train" if self.training else "eval"
        return Key(self.name, mode, shape_class(self.view.elements))


_ALONE = Alone()


@dataclass(slots=True, eq=False)  # not frozen, whose fields take longer to set: one for each call
class CallParts:
    """The parts of one call. None of these fields is assigned again."""

    resources: Resources
    peers: Peers  # an evaluation has none
    knowledge: Knowledge
    profile: LossProfile
    batch: Batch
    key: Key
    decision: Decision
    progress: Progress
    gradients: CallGradients
    snapshot: Snapshot
    edits: BatchEdits
    hooks: AttemptHooks
    loader: Loader
    report: CallReport
    turn: Turn | None  # in a way that is tried

    def end_turn(self, *, failed: bool) -> None:
        """End the turn that the call is, if it is one, with its time, or by leaving its way out."""
        if self.turn is not None:
            end_turn(
                self.resources,
                self.knowledge,
                self.profile,
                self.turn,
                self.batch.view,
                self.report.watch,
                failed=failed,
            )

    def learn_end(self) -> None:
        """Count the call, and keep the companions with state in a first one."""
        first = not self.profile.seen
        self.profile.learn_end()
        self.end_turn(failed=bool(self.progress.failures))
        if first:
            model, changes = self.resources.model, self.resources.buffers.changes
            # State that has not changed can do so in a later call: a flag that a piece raises and
            # lowers, a metric that comes into use. Frozen statistics stay as they are.
            model.accompany(
                each
                for each in model.companions
                if changes(each) or (can_keep_state(each) and not keeps_statistics(each))
            )


def look_around(resources: Resources, sources: Iterable[Any], *, first: bool) -> None:
    """Take over the modules and generators that a step can reach.

    Args:
        resources: the model and its devices.
        sources: what the step is made of: its function and arguments.
        first: no call of its loss function has ended.
    """
    model = resources.model
    if first:
        found = reached(sources)
        model.accompany([*model.companions, *found.modules])
    else:
        found = reached(sources, known=model.met, most=NEAR)
        if found.modules or model.nearby:
            model.accompany(model.companions, filter(can_keep_state, found.modules))
    resources.take_over(found.generators, for_good=first)


def _climb_down(
    resources: Resources, knowledge: Knowledge, batch: Batch, profile: LossProfile
) -> None:
    """Leave the last step of `escalate` where there is more memory now than when it was taken."""
    ladder, policy = profile.ladder, resources.settings.policy
    if not batch.training or not ladder.steps:
        return
    seen = resources.capacity()
    capacity = None if seen is None else seen.bytes
    if ladder.may_climb_down(capacity, patience=policy.patience, changed=policy.changed):
        left = ladder.climb_down()
        knowledge.controller.needs_other(batch.key)
        resources.log.emit(
            Deescalated(resources.settings.name, left.rung, str(batch.key), left.part, capacity)
        )


def parts_of(resources: Resources, knowledge: Knowledge, batch: Batch) -> CallParts:
    """Make the parts of one call over `batch`.

    Args:
        resources: the model and its devices.
        knowledge: the sizes and the facts of earlier calls.
        batch: the samples.
    """
    settings, view, key = resources.settings, batch.view, batch.key
    snapshot = Snapshot(resources, (key, batch.identity))
    resources.refresh_model()
    profile = knowledge.profile_of((key.name, batch.identity), resources.model.generation)
    if batch.training:
        resources.model.refuse_private()
    look_around(resources, batch.sources(), first=not profile.seen)
    gradients = CallGradients(resources, profile, training=batch.training)
    tuning = knowledge.tuning_of(key) if batch.training else None
    turn = None if tuning is None else begin_turn(knowledge, tuning)
    if turn is None:
        _climb_down(resources, knowledge, batch, profile)
    decision, progress = _begun(resources, knowledge, batch, key, gradients)
    loader = Loader(
        view, resources.piece_device, settings.memory.prefetch, longer_than=profile.too_full
    )
    edits = BatchEdits(view, profile)
    steps = profile.ladder.steps if turn is None else turn.steps
    hooks = _hooks(resources, progress, snapshot, batch, profile, steps if batch.training else ())
    full, peers = _full(resources, gradients), resources.peers
    report = CallReport(resources, knowledge, profile, view, key, decision, full)
    return CallParts(
        resources=resources,
        peers=peers if batch.training or peers.in_step else _ALONE,
        knowledge=knowledge,
        profile=profile,
        batch=batch,
        key=key,
        decision=decision,
        progress=progress,
        gradients=gradients,
        snapshot=snapshot,
        edits=edits,
        hooks=hooks,
        loader=loader,
        report=report,
        turn=turn,
    )


def _full(resources: Resources, gradients: CallGradients) -> Iterable[Tensor]:
    """Return the leaves whose `.grad` was not empty when the call began."""
    return (leaf for leaf in resources.model.leaves if id(leaf) in gradients.full)


def _begun(
    resources: Resources, knowledge: Knowledge, batch: Batch, key: Key, gradients: CallGradients
) -> tuple[Decision, Progress]:
    """Return the size to begin with, and the batch cut into pieces of it.

    The first call after a release begins in what the other phase has left.
    """
    view, controller = batch.view, knowledge.controller
    schedule = _schedule(resources, batch)
    extent = Extent(view.worth, view.elements, schedule.largest)
    if controller.is_back(key):
        capacity = resources.capacity() if resources.monitor.renew() else None
        count_batch(resources, view)
        held = held_beside(resources, _full(resources, gradients))
        controller.resume(key, extent, capacity, held)
    decision = controller.begin(key, extent, resources.capacity)
    return decision, Progress(schedule, decision.size)


def _hooks(
    resources: Resources,
    progress: Progress,
    snapshot: Snapshot,
    batch: Batch,
    profile: LossProfile,
    steps: tuple[Step, ...],
) -> AttemptHooks:
    return AttemptHooks(
        resources,
        progress,
        start=lambda: snapshot.start,
        own_graph=batch.own_graph,
        steps=steps,
        other_layers=profile.other_layers,
        position_wise=profile.position_wise,
    )


def _schedule(resources: Resources, batch: Batch) -> Schedule:
    settings, view = resources.settings, batch.view
    most = settings.policy.max_tokens
    budget = None if most is None else TokenBudget(view.tokens(), most)
    if budget is not None and budget.too_long:
        resources.warn(
            "max_tokens",
            f"a sample has {budget.tokens.longest} tokens, more than max_tokens={most}: it is a "
            "micro-batch by itself",
        )
    return Schedule(
        batch.counts,
        reduction=settings.reduction,
        minimum=settings.limits.minimum,
        align=settings.limits.align,
        costs=view.costs if budget is None else view.even_costs,
        budget=budget,
    )
