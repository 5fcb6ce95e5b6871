"""The command line and the notebook's way in: composing a run with Hydra, running it, and naming its folder."""
