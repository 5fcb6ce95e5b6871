"""The shapes of a round's drafts, a file each: keys, refusals, maker and row."""
