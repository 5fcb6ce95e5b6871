"""The lab as a model for EleutherAI's lm-evaluation-harness, to measure how lossy rules change benchmark results."""
