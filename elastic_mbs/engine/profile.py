"""What has been learned about one loss function over one set of trainable leaves."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic_mbs.batch.containers import Path


@dataclass
class Traits:
    """Facts that decide how a failure can be replayed; each is found once, on the path without failures.

    Attributes:
        walked: the census was taken.
        guests: the census found leaves outside the model, so that each call has to look again.
        counted: whether the versions of the gradients have told the same commits as the hooks; None where they were not compared.
        commits: the numbers of commits that clean backwards had; several where the graph depends on the data (routing), none before the first.
        hidden: leaves commit that the census does not reach, or commit more than once in a backward: isolate.
        custom: functions written in Python that have been through a clean backward; they may run another backward inside.
        draws: the step draws random numbers.
        changes_buffers: the step changes buffers.
        normalises_batch: the step normalises with statistics of the batch.
        edits_batch: `loss_fn` edits its batch in place, so pieces get copies.
        apart: what of its outputs comes once per piece and not once per sample, by path.
    """

    walked: bool = False
    guests: bool = False
    counted: bool | None = None
    commits: set[int] = field(default_factory=set)
    hidden: bool = False
    custom: set[str] = field(default_factory=set)
    draws: bool = False
    changes_buffers: bool = False
    normalises_batch: bool = False
    edits_batch: bool = False
    apart: set[Path] = field(default_factory=set)

    @property
    def clean(self) -> bool:
        """Whether a clean backward has been seen."""
        return bool(self.commits)

    @property
    def mixes(self) -> bool:
        """Whether a partly committed piece cannot be replayed in halves: they would draw other masks or see other statistics."""
        return self.draws or self.changes_buffers or self.normalises_batch

    @property
    def steady(self) -> bool:
        """Whether nothing is left to find out before a backward, and nothing has to be set aside for it."""
        return bool(self.walked and self.commits and not (self.guests or self.hidden or self.custom))
