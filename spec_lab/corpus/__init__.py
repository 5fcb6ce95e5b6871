"""The text on which the pocket model is trained and evaluated, generated or taken from Python's standard library."""
