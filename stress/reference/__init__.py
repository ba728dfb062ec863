"""References of training: one accumulation loop by hand, and states that are compared."""
