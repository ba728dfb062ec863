"""What is seen from outside, on the public API alone: the command and its demo, doctor, plan, report and watch."""

from elastic_mbs.cli.command import main

__all__ = ["main"]
