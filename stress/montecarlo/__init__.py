"""Random cases against a reference: `python -m stress montecarlo`.

A case is a `Plan`; `run_trial` runs one and checks all of its results.
"""
