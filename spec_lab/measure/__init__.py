"""Measures a run, from its configuration to its record: timed passes, audit, profile."""
