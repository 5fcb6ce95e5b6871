"""Prompt sets, their rendering, and the checker of their answers."""
