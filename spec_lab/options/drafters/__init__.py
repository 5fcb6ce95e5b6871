"""The drafters, a file each: keys, refusals, loaders and row."""
