"""The state that all calls of a runtime share."""
