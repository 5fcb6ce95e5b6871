"""The text on which pocket targets are trained and evaluated, generated or taken from Python's standard library."""
