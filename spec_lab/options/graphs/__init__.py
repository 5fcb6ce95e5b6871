"""The graph modes, one file each, with their keys, the function that makes them and their registry entry (row)."""
