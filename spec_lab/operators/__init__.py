"""The door: which kernel stands in for which torch form."""
