"""GGUF files that `spec_lab.export` writes, read back with the reader of the package `gguf` and by llama.cpp itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from spec_lab.checkpoints.checkpoint import read_tensors
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.gguf import gguf_tensors, quantizations
from spec_lab.checkpoints.gguf_file import read_head
from spec_lab.checkpoints.packaged import PACKAGED, ZOO
from spec_lab.export.__main__ import main
from spec_lab.export.gguf_files import write_eagle3, write_target
from tests.lab import make_config, make_engine, random_requests
from tests.llamacpp import answer, parameters
from tests.tiny_checkpoints import make_tiny_eagle3, make_tiny_target, rewrite_tensors
from tests.tiny_gguf import WHOLE_BLOCKS, permuted, write_gguf
from tests.tiny_gguf_families import QWEN35, write_family
from tests.tiny_hybrid import make_tiny_nextn

SIZES = {"vocab_size": 300, **WHOLE_BLOCKS}
INNER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {"fc": "fc", "norm": "output_norm", "lm_head": "output", "input_norm": "enc.output_norm"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    model = make_tiny_target(folder / "llama", "llama", **SIZES)
    return write_gguf(folder / "tiny.gguf", model, GGMLQuantizationType.Q8_0, pre="smollm")


def read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The file's keys and tensors, rows first."""
    reader = GGUFReader(path)
    tensors = {it.name: it.data.reshape([int(size) for size in reversed(it.shape)]) for it in reader.tensors}
    return {name: field.contents() for name, field in reader.fields.items()}, tensors


@pytest.mark.parametrize("options", [{}, {"norm_before_residual": True}, {"norm_before_fc": True}])
def test_a_head_holds_its_weights_in_llama_cpps_order(target: Path, options: dict[str, Any], tmp_path: Path) -> None:
    weights = make_tiny_eagle3(tmp_path, read_model_config(target), **options)
    write_eagle3(tmp_path / "head.gguf", tmp_path, target)
    keys, tensors = read(tmp_path / "head.gguf")
    expected = {"d2t": (torch.arange(225) + weights["d2t"]).numpy()}
    for name, weight in weights.items():
        inner, value = name.removesuffix(".weight").removeprefix("midlayer."), weight.numpy()
        heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(inner)
        theirs = OUTER.get(inner) or f"blk.0.{INNER[inner]}" if name.endswith("weight") else None
        if theirs:
            expected[f"{theirs}.weight"] = permuted(value, heads) if heads else value
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(tensors[name], value, err_msg=name)
    ours = {key.removeprefix("eagle3."): value for key, value in keys.items() if key.startswith("eagle3.")}
    assert ours["target_layers"] == [2, 4, 5] and ours["attention.head_count_kv"] == 2
    assert {key: ours[key] for key in ("norm_before_residual", "norm_before_fc")} == {
        "norm_before_residual": False,
        "norm_before_fc": False,
    } | options
    of_target = GGUFReader(target).fields["tokenizer.ggml.tokens"].contents()
    assert keys["tokenizer.ggml.tokens"] == of_target


def test_the_rope_of_llama_3_becomes_its_divisors(target: Path, tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    make_tiny_eagle3(tmp_path, read_model_config(target), rope_scaling=rope | {"original_max_position_embeddings": 32})
    write_eagle3(tmp_path / "head.gguf", tmp_path, target)
    divisors = read(tmp_path / "head.gguf")[1]["rope_freqs.weight"]
    # Of 32 positions, the fastest pair turns 5 times, more than 4; the slowest of 8 less than once.
    assert divisors.shape == (8,) and divisors[0] == 1.0 and divisors[-1] == 8.0


def test_a_target_has_the_values_that_it_had_in_fewer_bits(target: Path, tmp_path: Path) -> None:
    write_target(tmp_path / "wide.gguf", target)
    before, after = gguf_tensors(target), gguf_tensors(tmp_path / "wide.gguf")
    assert before.keys() == after.keys()
    both = (read_tensors(tensors, torch.float32, "cpu") for tensors in (before, after))
    assert all(torch.equal(*pair) for pair in zip(*(tensors.values() for tensors in both), strict=True))
    assert quantizations(tmp_path / "wide.gguf") == ["F32"]
    narrow, wide = ({**read_head(path).metadata} for path in (target, tmp_path / "wide.gguf"))
    assert wide == narrow | {"general.file_type": 0}


def test_llama_cpp_drafts_with_the_shipped_head(tmp_path: Path) -> None:
    """Its drafts are accepted as often as the lab's: 3 of each round's tokens are drafts, and most first ones hold."""
    xllamacpp = pytest.importorskip("xllamacpp")
    source = PACKAGED["smollm2_135m"].find()
    if source is None:
        pytest.skip(PACKAGED["smollm2_135m"].command)
    write_target(tmp_path / "target.gguf", source)
    write_eagle3(tmp_path / "head.gguf", ZOO / "smollm2_135m-eagle3", source)
    params = parameters(xllamacpp, tmp_path / "target.gguf", "DRAFT_EAGLE3")
    params.speculative.draft.mparams.path = str(tmp_path / "head.gguf")
    question = "<|im_start|>user\nName the planets of the solar system.<|im_end|>\n<|im_start|>assistant\n"
    timings = answer(xllamacpp.Server(params), prompt=question, max_tokens=64)["timings"]
    assert timings["draft_n_accepted"] > 0.3 * timings["draft_n"] > 0


def with_few_tokens(folder: Path) -> None:
    """Let a target write four tokens alone, so that a random module drafts some of them: of each of two rows and its
    opposite one has a logit above the zeros of all others."""
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    few = torch.zeros_like(head)
    few[40:44] = 4 * torch.stack((head[40], -head[40], head[42], -head[42]))
    rewrite_tensors(folder, {"lm_head.weight": few})


def test_an_mtp_module_drafts_within_its_targets_file_as_in_the_lab(tmp_path: Path) -> None:
    """llama.cpp writes the lab's tokens, and accepts about as many of the module's drafts up to the limit."""
    xllamacpp = pytest.importorskip("xllamacpp")
    make_tiny_nextn(tmp_path, "qwen3_5", seed=6, **QWEN35)
    with_few_tokens(tmp_path)
    there: Any = AutoModelForCausalLM
    write_family(
        tmp_path / "target.gguf", there.from_pretrained(tmp_path, dtype=torch.float32, trust_remote_code=False)
    )
    assert main([str(tmp_path), "to=gguf", str(tmp_path / "out"), f"target={tmp_path / 'target.gguf'}"]) == 0
    requests = random_requests(12, 12, vocab_size=300, lengths=(4, 20))
    records = make_engine(make_config((tmp_path, tmp_path), "mtp_eagle", 3), requests).generate(requests).requests
    params = parameters(xllamacpp, tmp_path / "out" / "model.gguf", "DRAFT_MTP")
    server, apart, accepted = xllamacpp.Server(params), 0, 0
    for record in records:
        said = answer(server, prompt=list(record.prompt_ids), max_tokens=12, ignore_eos=True)
        assert said["choices"][0]["text"] == "".join("FGHI"[token - 40] for token in record.output_ids)
        # Each other token ends a round or the prompt.
        ours = len(record.output_ids) - 1 - len(record.accepted_per_round)
        accepted, apart = accepted + ours, apart + abs(said["timings"]["draft_n_accepted"] - ours)
    assert accepted > 30 and apart <= 0.1 * accepted
