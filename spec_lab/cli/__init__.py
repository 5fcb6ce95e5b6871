"""Runs and sweeps from the command line: their jobs, the order of these, and their outcomes."""
