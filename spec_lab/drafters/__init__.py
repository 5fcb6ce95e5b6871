"""Each drafter proposes the next tokens of a round."""
