"""The texts that drafters learn on: prompts, the target's answers to them, and the folder that holds both."""
