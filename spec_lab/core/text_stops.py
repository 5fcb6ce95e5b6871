"""Texts that end an output, such as `Question:` after an answer. They are looked for on the host, in decoded tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

MOST_BYTES, MORE_TOKENS = 4, 8
"""A stop of n characters is within the newest `MOST_BYTES` * n tokens, if each has text. Some more are decoded, since
tokenizers treat the first token of a text differently."""


@dataclass(frozen=True, slots=True)
class TextStops:
    """Ends an output with the token that completes one of `texts`, as vLLM's `stop`. The text ends before the stop."""

    texts: tuple[str, ...]
    decode: Callable[[Sequence[int]], str]
    num_decoded: int = field(init=False)

    def __post_init__(self) -> None:
        longest = max(map(len, self.texts))
        object.__setattr__(self, "num_decoded", MOST_BYTES * longest + MORE_TOKENS)

    def completed_by_last(self, output_ids: Sequence[int]) -> bool:
        """Return whether the last token of an output completes a stop. Its last `num_decoded` tokens are enough."""
        newest = output_ids[-self.num_decoded :]
        text, before = self.decode(newest), self.decode(newest[:-1])
        return any(stop in text and stop not in before for stop in self.texts)

    def cut(self, text: str) -> str:
        """Return a text up to its first stop."""
        return text[: min((found for stop in self.texts if (found := text.find(stop)) >= 0), default=len(text))]
