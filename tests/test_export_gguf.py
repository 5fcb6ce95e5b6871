"""GGUF files that `spec_lab.export` writes, read back with the reader of the package `gguf` and by llama.cpp itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader

from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.gguf import gguf_tensors
from spec_lab.checkpoints.gguf_file import read_head
from spec_lab.checkpoints.packaged import PACKAGED, ZOO
from spec_lab.export.gguf_files import write_eagle3, write_target
from tests.tiny_checkpoints import make_tiny_eagle3, make_tiny_target, refused
from tests.tiny_gguf import WHOLE_BLOCKS, permuted, write_gguf

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


def test_a_part_that_llama_cpp_lacks_is_refused_by_its_name(target: Path, tmp_path: Path) -> None:
    make_tiny_eagle3(tmp_path, read_model_config(target), fc_norm=True)
    with refused("norm for each tap (fc_norm)"):
        write_eagle3(tmp_path / "head.gguf", tmp_path, target)
    with refused(tmp_path, "is no GGUF file"):
        write_eagle3(tmp_path / "head.gguf", tmp_path, tmp_path)


def test_a_target_has_the_values_that_it_had_in_fewer_bits(target: Path, tmp_path: Path) -> None:
    write_target(tmp_path / "wide.gguf", target)
    before, after = gguf_tensors(target), gguf_tensors(tmp_path / "wide.gguf")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].read(), after[name].read()) for name in before)
    assert {tensor.place.code for tensor in after.values()} == {GGMLQuantizationType.F32}
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
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.verbosity = str(tmp_path / "target.gguf"), 512, 1, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3]
    params.speculative.draft.mparams.path, params.speculative.draft.n_max = str(tmp_path / "head.gguf"), 3
    question = "<|im_start|>user\nName the planets of the solar system.<|im_end|>\n<|im_start|>assistant\n"
    asked = {"prompt": question, "max_tokens": 64, "temperature": 0, "cache_prompt": False}
    said = xllamacpp.Server(params).handle_completions(asked)
    timings = (json.loads(said) if isinstance(said, str) else said)["timings"]
    assert timings["draft_n_accepted"] > 0.3 * timings["draft_n"] > 0
