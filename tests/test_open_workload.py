"""A workload beside its target: ids it has rows for, and no more work than asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spec_lab.build.workloads import open_workload
from spec_lab.config.run import Run
from spec_lab.core.errors import UserError
from tests.lab import make_config, part
from tests.tiny_checkpoints import TINY_SIZES
from tests.tiny_runs import write_prompts, write_tokenizer


def make_target(folder: Path, **changes: Any) -> None:
    """Write the files of a target that are read before its weights; its ids go up to 159."""
    config = TINY_SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | changes
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)


def make_run(folder: Path, workload: str, **options: Any) -> Run:
    config = make_config((folder, folder), "none", max_new_tokens=8)
    config.workload = part("workload", workload, **options)
    return config


@pytest.mark.parametrize(("form", "largest"), [("continue", 154), ("chat", 157)])
def test_a_token_past_the_vocabulary_is_refused(tmp_path: Path, form: str, largest: int) -> None:
    """`largest` is that of the special tokens which the form puts around a prompt."""
    prompts = write_prompts(tmp_path / "mine.jsonl", [{"prompt": "abc", "form": form}])
    config = make_run(tmp_path, "jsonl", path=str(prompts))
    make_target(tmp_path, vocab_size=largest + 1)
    (request,) = open_workload(config)[1]
    assert max(request.prompt_ids) == largest
    make_target(tmp_path, vocab_size=largest)
    with pytest.raises(UserError, match=rf"token {largest} of prompt mine-0000"):
        open_workload(config)


@pytest.mark.parametrize("workload", ["fixed_length", "random_ids"])
def test_as_many_requests_are_made_as_the_limit_takes(tmp_path: Path, workload: str) -> None:
    """A billion would take minutes and more memory than there is."""
    make_target(tmp_path)
    config = make_run(tmp_path, workload, num_requests=10**9, prompt_tokens=16, limit=2)
    assert [len(request.prompt_ids) for request in open_workload(config)[1]] == [16, 16]
