"""What training must come to: one accumulation loop by hand, and states that are compared."""
