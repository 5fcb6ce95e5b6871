"""A research lab for speculative decoding: drafter, acceptance, pruning and graph mode as independent factors."""

__version__ = "0.1.0"
