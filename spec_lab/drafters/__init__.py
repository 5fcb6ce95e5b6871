"""Drafters: each proposes the next tokens of a round."""
