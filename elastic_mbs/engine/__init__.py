"""A call: split, run, commit; recover and replay."""
