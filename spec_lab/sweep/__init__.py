"""Runs W&B sweep files with W&B's own search code, without its server."""
