"""The text the pocket model is trained and evaluated on, generated here or taken from the standard library."""
