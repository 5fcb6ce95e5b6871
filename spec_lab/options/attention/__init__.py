"""The attention backends, a file each: makers and row."""
