"""This package holds what a run records: metric definitions, provenance and sinks. None of it loads torch."""
