"""Runs and sweeps from the command line: it runs their jobs, and collects how these ended."""
