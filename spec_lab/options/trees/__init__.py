"""The shapes of a round's drafts, one file each: keys, refusals, the function that makes it and registry entry
(row)."""
