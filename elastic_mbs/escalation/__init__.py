"""Ways to make a sample take less memory, and the largest tensors of one that does not fit."""
