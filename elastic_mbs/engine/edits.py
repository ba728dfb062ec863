"""Edits of a batch by the step function itself, which a replay would see."""

from __future__ import annotations

from elastic_mbs.batch.view import BatchView
from elastic_mbs.engine.progress import Progress
from elastic_mbs.engine.shared.knowledge import LossProfile
from elastic_mbs.errors import BatchError


class BatchEdits:
    """The versions of a batch's tensors, by which a step that edits its samples is noticed.

    Attributes:
        earlier: a piece that has committed in this call had edited its samples.
    """

    earlier = False

    def __init__(self, view: BatchView, profile: LossProfile) -> None:
        self._view = view
        self._profile = profile
        self._versions = view.versions()  # at the call's start

    def found(self) -> bool:
        """Return whether a tensor of the batch was edited since the call began."""
        return self._view.versions() != self._versions

    def by_a_failed_piece(self) -> bool:
        """Return whether the piece that has just failed had edited its samples, and learn it."""
        edited = self.found() and not self.earlier
        if edited and not self._view.whole_edited(self._versions):
            self._profile.learn_edits()
        return edited

    def notice(self, progress: Progress) -> None:
        """Learn from a committed piece that the step edits its samples: later pieces are copies.

        Args:
            progress: the other pieces of the batch.

        Raises:
            BatchError: the step has edited a tensor that every piece gets whole.
        """
        if self._profile.edits_batch or not self.found():
            return
        if not self._view.whole_edited(self._versions):
            self._profile.learn_edits()
            self.earlier = True
        elif progress.has_others:
            raise BatchError(
                "a tensor that every piece gets whole was changed in place by loss_fn, so later "
                "pieces would see it changed: work on a copy (w = w.clone()) inside loss_fn, and "
                "keep what lasts from step to step in a buffer of the model"
            )
