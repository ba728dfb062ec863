"""A loss over the embeddings of a whole batch, as two passes of one call."""
