"""Scripted ways of running out of memory, and what must hold in each."""
