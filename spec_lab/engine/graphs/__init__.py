"""Graph modes decide which stretches of a round are captured and replayed."""
