"""Hidden states of a target for whoever trains a drafter elsewhere."""
