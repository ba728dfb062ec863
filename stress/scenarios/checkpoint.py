"""Saves a training run and goes on with it: model, optimizer, what the runtime has learned, the step, and the random streams."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from elastic_mbs.memory.budget import on_host

from ..record import Mark, Step
from .notes import Notes
from .reference import generators_of
from .train import Session, Trained

EVERY = 4
"""Steps from one checkpoint to the next."""


class Checkpoint:
    """The file in a folder. It is whole at any moment, also while it is written.

    Args:
        folder: where it lies.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "checkpoint.pt"

    def save(self, session: Session, trained: Trained, *, notes: Notes, before: Trained) -> None:
        """Saves, after every fourth step."""
        if session.step % EVERY:
            return
        all_of_it = before.followed_by(trained)
        state: dict[str, Any] = {
            "step": session.step,
            "model": session.subject.model.state_dict(),
            "optimizer": session.optimizer.state_dict(),
            "elastic_mbs": session.mbs.state_dict(),
            "streams": generators_of(session.subject).read(hosts=True),
            "steps": [step.to_json() for step in all_of_it.steps],
            "marks": [mark.to_json() for mark in notes.marks],
            "norms": all_of_it.curve.norms,
            "losses": all_of_it.curve.losses,
        }
        fresh = self._path.with_suffix(".new")
        torch.save(state, fresh)
        os.replace(fresh, self._path)
        notes.mark("checkpoint", f"saved after {session.step} steps")

    def load(self, session: Session, notes: Notes) -> Trained:
        """Puts a session to where the file has it, if there is one; returns what was done until then."""
        trained = Trained()
        if not self._path.exists():
            return trained
        with on_host():
            state = torch.load(self._path, weights_only=False)  # written by us; the states of numpy's streams hold arrays
            session.subject.model.load_state_dict(state["model"])
        session.optimizer.load_state_dict(state["optimizer"])
        session.mbs.load_state_dict(state["elastic_mbs"])
        session.step = state["step"]
        generators_of(session.subject).restore(state["streams"])
        trained.steps = [Step.from_json(step) for step in state["steps"]]
        trained.curve.losses, trained.curve.norms = state["losses"], state["norms"]
        last = trained.steps[-1]
        passed = last.at + last.seconds
        notes.began -= passed  # the curve goes on where it stood
        notes.marks.extend(mark for mark in map(Mark.from_json, state["marks"]))
        notes.begin(session.step)
        notes.mark("resumed", f"resumed at step {session.step} from a checkpoint")
        return trained
