"""The lab as a model of EleutherAI's lm-evaluation-harness, which gives a lossy rule's price in anyone's benchmark."""
