"""The lean forward code of targets and draft heads, and the layers that they are built of."""
