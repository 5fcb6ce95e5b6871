"""A run as data: what an option is, the run that options make up, and the checks of a command line. Imports no torch."""
