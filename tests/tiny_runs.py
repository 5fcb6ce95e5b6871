"""Helpers that make what a whole run needs beside a tiny pair: a tokenizer of single characters, prompts, and a cheap
configuration.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from spec_lab.config.run import Run
from spec_lab.workloads.pocket_form import SPECIAL_TOKENS
from tests.lab import make_config, make_pair, part

CHEAP: Mapping[str, Any] = {
    "repeats": 1,
    "warmup_requests": 0,
    "profile_rounds": 0,
    "max_new_tokens": 12,
    "num_threads": 1,
}


def write_tokenizer(folder: Path, special: Iterable[str] = SPECIAL_TOKENS) -> None:
    """Write a tokenizer for which a character is a token: 160 ids, the `special` ones at the end."""
    special = list(special)
    letters = [chr(33 + index) for index in range(160 - len(special))]
    tokenizer = Tokenizer(models.WordLevel({text: index for index, text in enumerate(letters)}, unk_token=letters[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))


def make_runnable_pair(folder: Path, **overrides: Any) -> tuple[Path, Path]:
    """Write a tiny target with a tokenizer, for `target=hf`, and a random head for it; return both folders."""
    pair = make_pair(folder, **overrides)
    write_tokenizer(pair[0])
    return pair


def write_prompts(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def make_run_config(pair: tuple[Path, Path], prompts: Path, drafter: str = "eagle3", **changes: Any) -> Run:
    """The configuration of a cheap run over a file of `prompts`; `changes` are as for `make_config`."""
    config = make_config(pair, drafter, **(dict(CHEAP) | changes))
    config.workload = part("workload", "jsonl", path=str(prompts))
    return config
