"""The outcome of a call: its result, its outputs, its time."""
