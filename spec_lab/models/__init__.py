"""Checkpoints in the Hugging Face layout, and the lean forward code of the families they belong to."""
