"""The attention backends, one file each, with functions that make them and their registry entry (row)."""
