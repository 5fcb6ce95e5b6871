"""Graph modes: what of a round is captured and replayed."""
