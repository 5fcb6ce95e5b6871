"""This package decides which rows go on past the KV write."""
