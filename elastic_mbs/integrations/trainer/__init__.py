"""The parts of the runtime in `transformers.Trainer`."""
