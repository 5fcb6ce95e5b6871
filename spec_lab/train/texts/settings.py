"""The schema of the texts that a target writes, with types, defaults, explanations and bounds; without torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from spec_lab.config.option import knob

MOST_TEXTS = 10**8
LONGEST = 2**17
FEWEST_PROMPT_TOKENS = 8
PROMPTS = (
    "JSON Lines files with `messages`, `conversations` or `prompt`, and reasoning_gym:TASK:COUNT; [] lets the target "
    "write its own prompts"
)


@dataclass
class WritingConfig:
    """The settings by which a target answers prompts, and writes prompts itself if none are given."""

    test_prompts: bool = knob(
        False, "allow question files of Spec-Bench and MT-bench as prompts, though they are for testing"
    )
    num_texts: int = knob(
        100_000, "total number of texts; there are fewer if the files have fewer prompts", least=1, most=MOST_TEXTS
    )
    second_turns: float = knob(
        0.2, "share of the texts that answer the second turn of a conversation", least=0, most=0.8
    )
    max_prompt_tokens: int = knob(
        512, "longest prompt, in tokens, including its template", least=FEWEST_PROMPT_TOKENS, most=LONGEST
    )
    max_new_tokens: int = knob(256, "longest answer, in tokens; a longer one is cut", least=1, most=LONGEST)
    temperatures: list[float] = knob(
        [0.0, 0.0, 0.7, 1.0],
        "temperatures of the answers, each for an equal share of the texts; 0 is greedy; repeats add shares",
        least=0,
    )
    top_p: float | None = knob(
        None, "sample from the smallest set of tokens with this probability; null is all", above=0, most=1
    )
    prompt_temperatures: list[float] = knob(
        [1.0], "temperatures at which the target writes prompts; files take them in turn", above=0
    )
    batch_size: int = knob(256, "texts written together", least=1, most=2**14)
    rounds_per_replay: int = knob(16, "tokens of a text between two reads by the host, on a GPU", least=1, most=64)
    texts_per_file: int = knob(8192, "texts in a file; a kill loses at most one file", least=1, most=2**17)
    thinking: bool | None = knob(None, "the chat template's enable_thinking; null leaves it to the template")
    seed: int = knob(0, "seed of prompts and answers", least=0)

    @property
    def longest(self) -> int:
        """The length of the longest text, in tokens."""
        return self.max_prompt_tokens + self.max_new_tokens


@dataclass
class TextsConfig(WritingConfig):
    """Prompts, and how the target answers them."""

    prompts: list[str] = knob([], PROMPTS)


NOT_OF_THE_TEXTS = ("prompts", "test_prompts", "batch_size", "rounds_per_replay")
"""Settings that may change when the writing is resumed. For prompts, the digests of the files are compared instead."""


def settings_of_texts(config: WritingConfig) -> dict[str, Any]:
    """Return the settings on which texts depend, except their prompts."""
    return {name: value for name, value in asdict(config).items() if name not in NOT_OF_THE_TEXTS}


def sampling_problem(config: WritingConfig, prefix: str, has_prompts: bool) -> str | None:
    """Return the problem with the sampling settings, such as no temperature, or values that a run refuses; None if
    there is none.

    `prefix` is put before the names of keys. With `has_prompts` prompts are given, and the target writes none.
    """
    for name, example in (("temperatures", 0), ("prompt_temperatures", 1)):
        given = getattr(config, name)
        if not given:
            return f"{prefix}{name}=[]: texts are written at one or more temperatures; use {prefix}{name}=[{example}]"
    if has_prompts:
        if config.prompt_temperatures != WritingConfig().prompt_temperatures:
            return f"{prefix}prompt_temperatures is not read with prompts; leave it out"
        if config.top_p is not None and not any(config.temperatures):
            return f"{prefix}top_p={config.top_p} changes nothing at {prefix}temperatures=[0]; leave it out"
    return None
