"""Decides from its key alone whether a problem or a file is in the train or the eval split."""

from __future__ import annotations

import zlib
from typing import Literal

Split = Literal["train", "eval"]

PROBLEMS_PER_EVAL_PROBLEM = 50
FILES_PER_EVAL_FILE = 20  # there are only some hundred files, and 96 prompts of a category should not come from ten


def split_of(key: str, one_in: int = PROBLEMS_PER_EVAL_PROBLEM) -> Split:
    """Return the split of `key`, the same everywhere and in every Python. About one in `one_in` keys is in eval."""
    return "eval" if zlib.crc32(key.encode("utf-8")) % one_in == 0 else "train"
