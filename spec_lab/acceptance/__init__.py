"""Acceptance rules: from the target's logits and the drafts to the emitted tokens."""
