"""The drafters, with their keys, refusals, loaders and registry entries (rows); block drafters and the two kinds of
MTP share files."""
