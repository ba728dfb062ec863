"""Stress tool: find out whether training survives running out of memory, on a CPU and on a GPU.

`python -m stress` in a checkout, `elastic-mbs stress` where the package is installed (there it is
`elastic_mbs.stress`, so imports in here are relative). `stress/command.py` has the commands.
"""
