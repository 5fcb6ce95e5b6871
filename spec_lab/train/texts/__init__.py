"""The texts on which drafters are trained: prompts, the target's answers, and the folder that holds both."""
