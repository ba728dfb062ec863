"""Helpers of more than one test file."""
