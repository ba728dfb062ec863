"""Measurements: each module has `rows`, which measures, and `text`, which makes a table."""
