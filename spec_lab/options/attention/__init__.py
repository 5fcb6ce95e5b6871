"""The attention backends, one file each, with the functions that make one and its registry entry (row)."""
