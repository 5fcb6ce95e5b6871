"""The acceptance rules."""
