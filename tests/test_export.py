"""`python -m spec_lab.export`: folders that transformers loads, and heads that come back from other layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Quantization
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from spec_lab.checkpoints.eagle3_checkpoint import default_tap_layer_inputs, load_eagle3
from spec_lab.checkpoints.families import read_model_config
from spec_lab.export.__main__ import main
from spec_lab.workloads.tokenizer import TargetTokenizer
from tests.tiny_blocks import TinyBlock, write_block
from tests.tiny_checkpoints import make_tiny_eagle3, make_tiny_target
from tests.tiny_gguf import WHOLE_BLOCKS, in_transformers, write_gguf

SIZES = {"vocab_size": 300, **WHOLE_BLOCKS}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "llama"
    make_tiny_target(folder, "llama", **SIZES)
    return folder


@pytest.mark.parametrize(
    ("family", "kind", "dtype"),
    [
        ("llama", Quantization.Q4_1, torch.float32),
        ("qwen2", Quantization.F16, torch.float16),
        ("qwen3", Quantization.Q8_0, torch.float32),
    ],
)
@torch.inference_mode()
def test_a_gguf_target_decodes_in_transformers_as_its_file_does(
    family: Any, kind: Quantization, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = make_tiny_target(tmp_path / family, family, **SIZES)
    if dtype == torch.float16:  # norms too, as in a file that was made of 16 bits
        model = model.half().float()
    path = write_gguf(tmp_path / "tiny.gguf", model, kind, pre="qwen2")
    assert main([str(path), "to=hf", str(tmp_path / "out")]) == 0
    there: Any = AutoModelForCausalLM
    made = there.from_pretrained(tmp_path / "out", dtype="auto", trust_remote_code=False)
    assert made.dtype == dtype
    options = {"head_dim": 16} if family == "qwen3" else {}
    prompt, greedy = torch.tensor([[5, 9, 200, 31]]), {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    reference = in_transformers(path, **options).generate(prompt, **greedy)
    assert torch.equal(made.float().generate(prompt, **greedy), reference)
    text, lab = "the once 77's\n\n<think>é", TargetTokenizer(path)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=False)
    assert tokenizer.encode(text, add_special_tokens=False) == lab.encode(text)
    turn = [{"role": "user", "content": "once"}]
    assert tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True).startswith(
        "<|im_start|>user"
    )
    assert made.generation_config.eos_token_id in (2, [2])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"family": "qwen3", "norm_before_residual": True},
        {"norm_before_fc": True},
        {"fc_norm": True, "norm_output": True},
        {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]},
        {"draft_vocab_size": 300, "embed_tokens": True},
    ],
)
def test_an_eagle3_head_goes_to_the_other_layout_and_back(llama: Path, options: dict[str, Any], tmp_path: Path) -> None:
    model = read_model_config(llama)
    make_tiny_eagle3(tmp_path / "head", model, **options)
    for form, source in (("speculators", "head"), ("hf", "speculators")):
        words = [str(tmp_path / source), f"to={form}", str(tmp_path / form), f"target={llama}"]
        assert main(words) == 0
    (first, ours), (last, theirs) = (load_eagle3(tmp_path / it, model, torch.float32, "cpu") for it in ("head", "hf"))
    taps = first.tap_layer_inputs
    assert last.tap_layer_inputs == taps
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    flags = "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"
    assert [getattr(first, flag) for flag in flags] == [getattr(last, flag) for flag in flags]
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert ("eagle_config" in config) == (taps != default_tap_layer_inputs(model.num_layers))


def test_a_block_drafter_takes_the_rows_of_the_targets_head_along(llama: Path, tmp_path: Path) -> None:
    block = TinyBlock("speculators", "markov", draft_vocab_size=90, shares_head=True)
    write_block(tmp_path / "head", block, read_model_config(llama))
    for form in ("hf", "speculators"):
        assert main([str(tmp_path / "head"), f"to={form}", str(tmp_path / form), f"target={llama}"]) == 0
    assert "lm_head.weight" not in load_file(tmp_path / "hf" / "model.safetensors")
    tensors, target = load_file(tmp_path / "speculators" / "model.safetensors"), load_file(llama / "model.safetensors")
    rows = torch.arange(90) + tensors["d2t"]
    assert torch.equal(tensors["lm_head.weight"].float(), target["lm_head.weight"][rows])
