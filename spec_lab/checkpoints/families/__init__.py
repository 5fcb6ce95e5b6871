"""Families of decoders: how their config.json is read."""
