"""What an attempt changes, and putting it back: gradients, graphs, buffers and random streams."""
