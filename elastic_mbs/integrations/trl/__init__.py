"""trl's trainers: their rows, losses and metrics, as `elastic_trainer` needs them."""
