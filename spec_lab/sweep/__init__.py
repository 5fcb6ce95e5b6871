"""W&B sweep files run on W&B's own search code, without its server."""
