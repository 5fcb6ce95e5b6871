"""Inference code of targets and draft heads, and the layers that they are built from."""
