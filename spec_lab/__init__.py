"""A research lab for speculative decoding: target, drafter, acceptance, pruning and graph mode as independent factors."""

__version__ = "0.1.0"
