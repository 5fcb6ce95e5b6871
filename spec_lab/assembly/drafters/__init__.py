"""The drafters: for each a module with its row, its keys and what it refuses, beside the one that loads it."""
