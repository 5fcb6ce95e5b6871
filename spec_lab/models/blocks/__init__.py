"""Drafters of a whole block: bodies, and the heads that join their slots."""
