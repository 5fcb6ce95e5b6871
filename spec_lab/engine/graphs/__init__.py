"""Graph modes: which parts of a round are captured and replayed."""
