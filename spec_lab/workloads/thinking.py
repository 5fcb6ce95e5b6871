"""The tokens between which models think, and those that end a turn, by how families spell them."""

from __future__ import annotations

from spec_lab.corpus.example import END_OF_TURN, THINK_END, THINK_START

THINKING_MARKERS = ((THINK_START, THINK_END), ("<|channel>", "<channel|>"))
"""Pairs of a begin and an end marker: that of the pocket target, of Qwen and DeepSeek, and that of Gemma 4."""

TURN_ENDS = (END_OF_TURN, "<turn|>")
"""Tokens that end a turn: the pocket target's, and Gemma 4's."""
