"""A run as data: what an option is, the run that options make up, and its checks. It imports no torch."""
