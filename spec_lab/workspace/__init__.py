"""The page of a W&B project, laid out in code: acceptance, speed and kernel time."""
