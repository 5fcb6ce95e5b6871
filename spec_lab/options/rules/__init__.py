"""The acceptance rules, one file each, with their keys, refusals, functions that make them and registry entry (row)."""
