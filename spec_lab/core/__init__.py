"""Types, protocols and helpers that the other parts share. Of libraries it imports only torch."""
