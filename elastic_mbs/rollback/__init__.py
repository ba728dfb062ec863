"""State that an attempt changes, and its rollback: gradients, graphs, buffers, random streams."""
