"""Training of new small targets, and of drafters for these and for existing targets."""
