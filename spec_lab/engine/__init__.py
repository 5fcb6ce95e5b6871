"""The decode round, its scheduler, KV cache and timing."""
