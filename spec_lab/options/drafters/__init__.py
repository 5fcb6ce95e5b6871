"""The drafters, with their keys, refusals, loaders and registry entries (rows).

All block drafters are in `blocks`. What the two drafters with MTP modules have in common is in `mtp`.
"""
