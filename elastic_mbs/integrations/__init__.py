"""The runtime in trainers: `transformers`, `lightning`, `accelerate` and `fabric`.

Each has a module. It needs its package (extras `hf`, `lightning`, `accelerate`), which is imported
when the module is, and not before.
"""
