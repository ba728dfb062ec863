"""The commands: `python -m stress [scenarios by default | montecarlo | exhaustive | soak]`."""

from __future__ import annotations

import argparse

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The tool's options and its other commands; each sets `run`, a function of the parsed options that returns the exit code.

    Args:
        parser: of `python -m stress`, or of `elastic-mbs stress`.
    """
    parser.add_subparsers(metavar="COMMAND", dest="command")
