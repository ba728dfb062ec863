"""Training for a long time or through many failures, each step checked: `python -m stress hammer` and `soak`."""
