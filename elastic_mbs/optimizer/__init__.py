"""Optimizer steps that are made whole or not at all."""
