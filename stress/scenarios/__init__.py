"""Scripted ways of running out of memory, and the conditions that must hold in each."""
