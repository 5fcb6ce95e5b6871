"""Trains block drafters: runs the engine's own models over packed rows of texts."""
