"""The size of the micro-batch: a pure state machine over sizes, its growth rules and its models of time and memory."""
