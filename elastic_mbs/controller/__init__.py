"""The controller: it chooses the micro-batch size, by pure rules and models of time and memory."""
