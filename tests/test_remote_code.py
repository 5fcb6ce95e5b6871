"""No code of a checkpoint is ever run, whatever its files say and whatever stands on stdin."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from spec_lab.build.workloads import open_workload
from spec_lab.core.types import Request
from tests.lab import make_config
from tests.tiny_checkpoints import TINY_SIZES
from tests.tiny_runs import write_prompts, write_tokenizer

AUTO_MAP = {
    "AutoConfig": "evil.EvilConfig",
    "AutoModelForCausalLM": "evil.EvilModel",
    "AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"],
}
LLAMA = TINY_SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
EVIL = TINY_SIZES | {"architectures": ["EvilForCausalLM"], "model_type": "evil"}


def open_checkpoint(folder: Path, config: dict[str, Any], tokenizer: dict[str, Any]) -> list[Request] | None:
    """The requests of a chat prompt for a checkpoint whose code, if it is ever run, leaves a file `canary`."""
    write_tokenizer(folder, special=())
    code = f"open({str(folder / 'canary')!r}, 'w')\nclass EvilConfig: pass\nclass EvilTokenizer: pass\n"
    (folder / "evil.py").write_text(code)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    run = make_config((folder, folder), "none")
    run.workload.name, run.workload.path = "jsonl", str(write_prompts(folder / "mine.jsonl", [{"prompt": "abc"}]))
    try:
        return open_workload(run)[1]
    except ValueError:
        return None


@pytest.mark.parametrize(
    ("config", "tokenizer", "runs"),
    [
        (EVIL | {"auto_map": AUTO_MAP}, {"auto_map": AUTO_MAP, "tokenizer_class": "EvilTokenizer"}, False),
        (EVIL | {"auto_map": AUTO_MAP, "architectures": ["LlamaForCausalLM"]}, {}, None),
        (EVIL | {"architectures": ["LlamaForCausalLM"]}, {"auto_map": AUTO_MAP, "tokenizer_class": "Evil"}, False),
        (LLAMA, {"auto_map": AUTO_MAP, "tokenizer_class": "EvilTokenizer"}, None),
        (LLAMA | {"auto_map": AUTO_MAP}, {"tokenizer_class": "PreTrainedTokenizerFast"}, True),
        (LLAMA | {"auto_map": AUTO_MAP}, {"auto_map": AUTO_MAP, "tokenizer_class": "PreTrainedTokenizerFast"}, True),
    ],
)
def test_code_of_a_checkpoint_is_not_run_and_nobody_is_asked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    config: dict[str, Any],
    tokenizer: dict[str, Any],
    runs: bool | None,
) -> None:
    """`runs`: whether transformers needs none of that code; None is left to it."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    requests = open_checkpoint(tmp_path, config, tokenizer)
    assert not (tmp_path / "canary").exists()
    assert "[y/N]" not in "".join(capfd.readouterr())
    assert runs is None or (requests is not None) == runs
