"""Models for training under stress, large and small, and the user's own."""
