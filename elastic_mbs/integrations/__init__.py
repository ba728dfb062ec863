"""The runtime in the trainers that people already use: `transformers`, `lightning`, `accelerate` and `fabric`, one module each.

Each needs its package (extras `hf`, `lightning`, `accelerate`), which is imported when the module
is, and not before.
"""
