"""What makes a sample take less memory: its saved tensors wait on the host, or are computed again in backward."""
