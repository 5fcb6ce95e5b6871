"""The graph modes, a file each: keys, maker and row."""
