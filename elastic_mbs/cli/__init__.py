"""The command `elastic-mbs`: demo, doctor, plan, report and watch, on the public API alone."""

from elastic_mbs.cli.command import main

__all__ = ["main"]
