"""Edits of a batch by the step function itself, which a replay would see."""

from __future__ import annotations

from typing import Any

import torch

from elastic_mbs.batch.containers import tensors_in
from elastic_mbs.batch.view import BatchView
from elastic_mbs.engine.progress import Progress
from elastic_mbs.engine.shared.knowledge import LossProfile
from elastic_mbs.errors import BatchError

SMALL = 2**16
"""Bytes of a batch that is copied because its step may edit it: a plan does not count them."""


class BatchEdits:
    """The versions of a batch's tensors, by which a step that edits its samples is noticed.

    In the first call of a function every piece of a small batch is a copy, because it can be such a
    step. Not where pieces share a tensor, which would look unedited to the ones after. A large
    batch on the host is copied anyway, on its way to a device.

    Attributes:
        copies: pieces are copies.
        earlier: a piece that has committed in this call had edited its samples.
    """

    earlier = False
    copies = False

    def __init__(self, view: BatchView, profile: LossProfile) -> None:
        self._view = view
        self._profile = profile
        self._versions = view.versions()  # at the call's start
        first = not (profile.seen or view.has_whole)
        self.copies = profile.edits_batch or (first and view.nbytes < SMALL)

    def found(self) -> bool:
        """Return whether a tensor of the batch was edited since the call began."""
        return self._view.versions() != self._versions

    def learn_from(self, data: Any) -> None:
        """Learn from a piece that is a copy whether the step edits it."""
        if self.copies and any(map(_edited, tensors_in(data))):
            self._profile.learn_edits()

    def by_a_failed_piece(self, data: Any) -> bool:
        """Return whether the piece that has just failed had edited its samples, and learn it.

        Args:
            data: the piece; None where it failed while it was loaded.
        """
        if data is None:
            # There may be no room for a copy, which is needed only where the step edits it.
            self.copies = self._profile.edits_batch
        elif self.copies:
            self.learn_from(data)
            return False
        edited = self.found() and not self.earlier
        if edited and not self._view.whole_edited(self._versions):
            self._learn()
        return edited

    def _learn(self) -> None:
        self._profile.learn_edits()
        self.copies = True

    def notice(self, progress: Progress) -> None:
        """Learn from a committed piece that the step edits its samples: later pieces are copies.

        Args:
            progress: the other pieces of the batch.

        Raises:
            BatchError: the step has edited a tensor that every piece gets whole.
        """
        if self.copies or self._view.versions() == self._versions:
            return
        if not self._view.whole_edited(self._versions):
            self._learn()
            self.earlier = True
        elif progress.has_others:
            raise BatchError(
                "a tensor that every piece gets whole was changed in place by loss_fn, so later "
                "pieces would see it changed: work on a copy (w = w.clone()) inside loss_fn, and "
                "keep what lasts from step to step in a buffer of the model"
            )


def _edited(copy: torch.Tensor) -> bool:
    return not copy.is_inference() and copy._version > 0
