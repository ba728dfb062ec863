"""Benchmarks of elastic_mbs against loops written by hand and against its peers: `python -m benchmarks.bench`."""
