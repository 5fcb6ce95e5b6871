"""Training of the pocket target and its draft heads."""
