"""Which rows go on past the KV write."""
