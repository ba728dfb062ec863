"""Rehearsals of a step beside the training loop: `verify` and `plan`."""
