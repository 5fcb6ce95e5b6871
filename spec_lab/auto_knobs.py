"""The knobs that may stand at auto."""

RUNS_ANYWHERE = {"attention": "torch", "kernels": "torch", "graph": "eager"}
"""They stand here by name, with the option of each that fits every run."""
