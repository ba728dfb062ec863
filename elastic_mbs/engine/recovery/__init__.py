"""Recovery from a failed attempt: its facts, the replay, the rollback, the floor, the unwinding."""
