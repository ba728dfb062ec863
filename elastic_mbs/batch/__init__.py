"""A batch as N samples: its layout, its counts, its split into pieces, and joining the outputs."""
