"""Drafters: they propose the next tokens of each request."""
