"""Random training on several ranks with errors on any of them: `python -m stress ranks`.

`run_ranks` runs a job under a watchdog. `Replicas` (DDP) and `Shards` (FSDP2, HSDP) are a model in
training on one rank, with a reference in float64 beside it.
"""
