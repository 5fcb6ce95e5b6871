"""The acceptance rules, a file each: keys, refusals, makers and row."""
