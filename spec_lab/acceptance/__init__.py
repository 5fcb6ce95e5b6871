"""Acceptance rules: they turn the target's logits and the drafts into the emitted tokens."""
