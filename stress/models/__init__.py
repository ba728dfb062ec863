"""What is trained under stress: models large and small, and the user's own."""
