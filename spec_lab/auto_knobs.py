"""The knobs that may stand at auto."""

RUNS_ANYWHERE = {"attention": "torch", "kernels": "torch", "graph": "eager"}
"""By name, with the option of each that fits every run."""
