"""A run or a sweep from the command line: its jobs, their order, and their outcomes."""
