"""Benchmarks against loops by hand and against peers: `python -m benchmarks.bench`."""
