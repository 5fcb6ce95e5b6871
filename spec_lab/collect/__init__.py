"""Writes the hidden states of a target, for training a drafter with other software."""
