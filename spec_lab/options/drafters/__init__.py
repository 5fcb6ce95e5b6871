"""The drafters, one file each, with their keys, refusals, loaders and registry entry (row)."""
