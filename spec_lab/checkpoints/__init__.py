"""Checkpoints: from files to plans of layers and named tensors. Forward code is in `models`."""
