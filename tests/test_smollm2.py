"""SmolLM2-135M-Instruct, a public model, against transformers and against rules written out plainly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.checkpoints.checkpoint import open_tensors
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.gguf_file import read_head
from spec_lab.checkpoints.packaged import PACKAGED
from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes
from spec_lab.record.reading import read_requests, read_run
from spec_lab.workloads.prompt_files import shipped_prompts
from spec_lab.workloads.tokenizer import TargetTokenizer
from tests.test_gguf_tokenizer import Rules, plainly
from tests.tiny_gguf import in_transformers

PACKAGE = PACKAGED["smollm2_135m"]
KEPT_BYTES = 4 * (134_515_008 + 49_152 * 576)
"""Float32 weights, and those of the embedding once more, which the head has in panels."""

pytestmark = pytest.mark.skipif(PACKAGE.find() is None, reason=PACKAGE.command)


@pytest.fixture(scope="module")
def path() -> Path:
    found = PACKAGE.find()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def reference(path: Path) -> Any:
    """What transformers' own reader makes of the file."""
    return in_transformers(path)


def run(folder: Path) -> tuple[Path, str]:
    """Return the folder of a short run by the README's command, in a process of its own, and what it said."""
    command = [sys.executable, "-m", "spec_lab", "target=smollm2_135m", "drafter=eagle3", "prune=catchup", "device=cpu"]
    small = ["workload.limit=2", "max_new_tokens=16", "repeats=1", "profile_rounds=0", "warmup_requests=0"]
    done = subprocess.run([*command, *small], cwd=folder, capture_output=True, text=True, check=True)
    (file,) = folder.glob("outputs/*/summary.json")
    return file.parent, done.stderr


@torch.inference_mode()
def test_the_command_of_the_readme_writes_the_text_of_transformers_with_weights_kept_once(
    reference: Any, tmp_path: Path
) -> None:
    """Each token is the likeliest one of transformers' model of the same file behind the same text, which is to say
    that its greedy decoding is the same."""
    folder, said = run(tmp_path)
    rows = list(read_requests(folder))
    assert sum(sum(row.accepted_per_round) for row in rows) > len(rows) == 2
    for row in rows:
        tokens = torch.tensor([[*row.prompt_ids, *row.output_ids]])
        likeliest = reference(tokens[:, :-1]).logits[0, len(row.prompt_ids) - 1 :].argmax(dim=-1)
        assert likeliest.tolist() == row.output_ids

    summary = read_run(folder)
    assert summary["equal_to_plain"] == 1.0 and summary["divergence.diverged"] == 0
    assert summary.target.weights == "float32, widened from Q4_1, Q8_0, F32" and summary.target.dtype == "float32"
    assert f"kernels={summary.config['kernels']}" in said
    memory = summary.under("memory")
    # The cache of these two requests is less than the slack that imports on the way have here. Those of transformers'
    # config classes take 155 MB (5.23).
    assert memory["peak_rss_bytes"] - memory["start_rss_bytes"] < 1.75 * KEPT_BYTES


def test_weights_are_those_of_transformers_reader(path: Path, reference: Any) -> None:
    config, weights = read_model_config(path), reference.state_dict()
    tensors = open_tensors(path, decoder_tensor_shapes(config), torch.float32, "cpu")
    assert set(tensors) == set(weights) - {"lm_head.weight"}
    assert all(torch.equal(tensors[name], weights[name]) for name in tensors)


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> TargetTokenizer:
    return TargetTokenizer(path)


def test_ids_follow_from_the_files_own_merges(path: Path, tokenizer: TargetTokenizer) -> None:
    head = read_head(path)
    rules = Rules(head.metadata["tokenizer.ggml.tokens"], tuple(head.metadata["tokenizer.ggml.merges"]))
    texts = [prompt.text for prompt in shipped_prompts()[::48]]
    for text in [*texts, *(text.replace(" ", "  ") for text in texts), "  7 ½ 世界 e\u0301\n\n 1234"]:
        ids = tokenizer.encode(text)
        assert [rules.tokens[token_id] for token_id in ids] == plainly(text, "smollm", rules)
        assert tokenizer.decode(ids) == text


def test_a_chat_has_the_files_template(path: Path, tokenizer: TargetTokenizer) -> None:
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    turns = "user\nHi", "assistant\nHo", "user\nSo  5?"
    text = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns)
    ids = tokenizer.encode_conversation(["Hi", "Ho", "So  5?"])
    assert tokenizer.decode(ids) == f"{system}{text}<|im_start|>assistant\n"
    assert read_model_config(path).eos_token_ids == (tokenizer.special_id("<|im_end|>"),)
