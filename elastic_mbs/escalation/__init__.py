"""Ways to make a sample take less memory: saved tensors on the host, or computed again."""
