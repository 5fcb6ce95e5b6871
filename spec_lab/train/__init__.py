"""Training of pocket targets, and of drafters for these and for other targets."""
