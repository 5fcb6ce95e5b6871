"""The drafters, with their keys, refusals, loaders and registry entries (rows).

The block drafters are in `blocks`, except `p_eagle`. What the two drafters with MTP modules have in common is in `mtp`.
"""
