"""GGUF files: weights and logits against transformers' own reader of them, and every kind of file that is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter

from spec_lab.checkpoints.checkpoint import open_tensors
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.gguf import dequantised, gguf_tensors
from spec_lab.checkpoints.gguf_file import is_gguf, read_head
from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes
from spec_lab.core.errors import UserError
from spec_lab.doctor.checkpoints import check_tokenizer
from spec_lab.doctor.findings import Verdict
from spec_lab.doctor.subject import load_subject
from spec_lab.models.partition import Partition
from tests.lab import Reference, generate, make_config, random_requests
from tests.tiny_checkpoints import Family, make_tiny_eagle3, make_tiny_target
from tests.tiny_gguf import WHOLE_BLOCKS, finish, in_transformers, tokenizer_keys, write_gguf, write_head
from tests.tiny_runs import make_run_config, write_prompts

IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3")
SMALL = {"num_hidden_layers": 2, **WHOLE_BLOCKS}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A random transformers model of each family; those of qwen are tied."""
    folder = tmp_path_factory.mktemp("models")
    return {
        family: make_tiny_target(folder / family, family, tie_word_embeddings=family != "llama", **SMALL)
        for family in FAMILIES
    }


def read(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return dict(open_tensors(path, decoder_tensor_shapes(read_model_config(path)), dtype, "cpu"))


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_text_are_those_of_transformers_reader(
    models: dict[str, Any], family: Family, kind: Kind, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "model.gguf", models[family], kind)
    expected = in_transformers(path, **({"head_dim": 16} if family == "qwen3" else {}))
    tensors, weights = read(path), expected.state_dict()
    assert set(tensors) == set(weights) - ({"lm_head.weight"} if family != "llama" else set())
    assert all(torch.equal(tensors[name], weights[name]) for name in tensors)
    if kind == Kind.F32:
        assert all(torch.equal(tensors[name], models[family].state_dict()[name]) for name in tensors)
    reference = Reference.__new__(Reference)
    reference.model = expected
    reference.model.generation_config.eos_token_id = 2
    requests = random_requests(3, max_new_tokens=12)
    outputs = generate(make_config((path, path), "none", batch_size=3), requests)
    reference.assert_lossless(requests, outputs, {r.request_id: reference.greedy(r) for r in requests})


def test_sizes_are_those_of_the_folder(models: dict[str, Any], tmp_path: Path) -> None:
    for family, model in models.items():
        model.save_pretrained(tmp_path / family)
        path = write_gguf(tmp_path / f"{family}.gguf", model)
        of_file, of_folder = read_model_config(path), read_model_config(tmp_path / family)
        assert of_file.layers == of_folder.layers
        for name in ("family", "vocab_size", "hidden_size", "max_position_embeddings", "tie_word_embeddings"):
            assert getattr(of_file, name) == getattr(of_folder, name)
        assert of_file.rms_norm_eps == pytest.approx(of_folder.rms_norm_eps, rel=1e-6)


def test_biases_are_read_and_put_in_order(tmp_path: Path) -> None:
    model = make_tiny_target(tmp_path / "folder", "llama", attention_bias=True, mlp_bias=True, **SMALL)
    tensors = read(write_gguf(tmp_path / "model.gguf", model))
    assert "model.layers.1.self_attn.k_proj.bias" in tensors
    assert all(torch.equal(tensors[name], value) for name, value in model.state_dict().items())


def test_rounding_to_bfloat16_is_asked_for(models: dict[str, Any], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", models["qwen3"], Kind.Q4_1)
    wide, narrow = read(path), read(path, torch.bfloat16)
    assert all(torch.equal(wide[name].to(torch.bfloat16), narrow[name]) for name in wide)
    assert not all(torch.equal(wide[name], narrow[name].float()) for name in wide)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"tokenizer.ggml.eos_token_id": 5}, (5,)),
        ({"tokenizer.ggml.eos_token_id": [5, 9]}, (5, 9)),
        ({"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 7}, (5, 7)),
        ({"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 5}, (5,)),
        ({"tokenizer.ggml.eos_token_id": None}, ()),
    ],
)
def test_end_tokens_are_one_or_several(
    models: dict[str, Any], keys: dict[str, Any], expected: tuple[int, ...], tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "model.gguf", models["llama"], keys=keys)
    assert read_model_config(path).eos_token_ids == expected


def llama3_divisors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """What the converter writes for Llama 3.1, from transformers' own frequencies."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, rope_parameters=scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return (plain / scaled).numpy().astype(np.float32)


def test_the_divisors_of_llama_3_are_its_scaling(models: dict[str, Any], tmp_path: Path) -> None:
    divisors = llama3_divisors(16, 10000.0, 32.0)
    assert 1.0 in divisors and divisors.max() == pytest.approx(32.0)
    path = write_gguf(tmp_path / "model.gguf", models["llama"], tensors={"rope_freqs.weight": divisors})
    rope = read_model_config(path).layers[0].rope
    assert (rope.scaling, rope.factor, rope.original_max_position_embeddings) == ("llama3", 32.0, 8192)
    assert set(read(path)) == set(models["llama"].state_dict())
    others = write_gguf(tmp_path / "others.gguf", models["llama"], tensors={"rope_freqs.weight": divisors**0.5})
    with pytest.raises(UserError, match="rope_freqs"):
        read_model_config(others)


def test_a_linear_scaling_is_read(models: dict[str, Any], tmp_path: Path) -> None:
    linear = {"qwen2.rope.scaling.type": "linear", "qwen2.rope.scaling.factor": 2.0}
    rope = read_model_config(write_gguf(tmp_path / "a.gguf", models["qwen2"], keys=linear)).layers[0].rope
    assert (rope.scaling, rope.factor) == ("linear", 2.0)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no layer tensor": ({"tensors": {"blk.1.ffn_up.weight": None}}, "1 missing: model.layers.1.mlp.up_proj.weight"),
    "another tensor": ({"tensors": {"blk.0.ffn_gate_inp.weight": np.ones((2, 32), np.float32)}}, "1 not expected"),
    "another shape": ({"tensors": {"blk.0.attn_norm.weight": np.ones(16, np.float32)}}, "[16], its config says [32]"),
    "more layers": ({"keys": {"llama.block_count": 3}}, "9 missing"),
    "some channels": ({"keys": {"llama.rope.dimension_count": 8}}, "rope.dimension_count 8 is not supported"),
    "an unknown key": ({"keys": {"llama.logit_scale": 0.5}}, "llama.logit_scale 0.5"),
    "an amplitude": ({"keys": {"llama.rope.scaling.attn_factor": 1.5}}, "attn_factor 1.5"),
    "experts": ({"keys": {"llama.expert_count": 8}}, "llama.expert_count 8"),
    "NaN": ({"tensors": {"output_norm.weight": np.full(32, np.nan, np.float32)}}, "output_norm.weight has values"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_are_refused_in_a_line(models: dict[str, Any], case: str, tmp_path: Path) -> None:
    changes, reason = REFUSED[case]
    path = write_gguf(tmp_path / "model.gguf", models["llama"], **changes)
    with pytest.raises(UserError) as refusal:
        read(path)
    message = str(refusal.value)
    assert str(path) in message and reason in message and "\n" not in message


def test_a_count_of_zero_and_a_factor_of_one_say_nothing(models: dict[str, Any], tmp_path: Path) -> None:
    keys = {"llama.expert_count": 0, "llama.rope.scaling.attn_factor": 1.0}
    read_model_config(write_gguf(tmp_path / "model.gguf", models["llama"], keys=keys))


def test_a_suffix_in_capitals_is_one(tmp_path: Path) -> None:
    assert is_gguf(write_head(tmp_path / "MODEL.GGUF", {}, "llama"))


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    path = write_head(tmp_path / "model.gguf", {}, "gemma3")
    with pytest.raises(UserError, match="architecture 'gemma3' is not supported"):
        read_model_config(path)


def test_a_tensor_is_read_alone(models: dict[str, Any], tmp_path: Path) -> None:
    """Nothing of the file is mapped once it is read: it may be written anew while a run goes on."""
    path = write_gguf(tmp_path / "model.gguf", models["llama"])
    tensors = read(path)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)


def test_a_part_is_cut_from_rows_in_order(models: dict[str, Any], tmp_path: Path) -> None:
    class FirstRows(Partition):
        def part(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...] | None:
            return (slice(0, 16),) if name.endswith("q_proj.weight") else None

    path = write_gguf(tmp_path / "model.gguf", models["llama"])
    wanted = decoder_tensor_shapes(read_model_config(path))
    name = "model.layers.0.self_attn.q_proj.weight"
    part = dict(open_tensors(path, wanted, torch.float32, "cpu", slices=FirstRows()))[name]
    assert torch.equal(part, models["llama"].state_dict()[name][:16])
    assert gguf_tensors(path)[name].shape == wanted[name]


def test_the_head_is_read_anew_once_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_head(path, tokenizer_keys(300, "smollm"))
    assert read_head(path) is read_head(path)
    assert read_head(path).metadata["tokenizer.ggml.pre"] == "smollm"
    write_head(path, tokenizer_keys(300, "llama-bpe"))
    assert read_head(path).metadata["tokenizer.ggml.pre"] == "llama-bpe"


def test_a_file_is_a_target_of_a_trained_head_and_the_doctor_reads_its_vocabulary(tmp_path: Path) -> None:
    model = make_tiny_target(tmp_path / "folder", "llama", vocab_size=300, **SMALL | {"num_hidden_layers": 8})
    path = write_gguf(tmp_path / "model.gguf", model, pre="smollm")
    make_tiny_eagle3(tmp_path / "head", read_model_config(path))
    prompts = write_prompts(tmp_path / "prompts.jsonl", [{"prompt": "the once  7"}, {"prompt": "12"}])
    subject = load_subject(make_run_config((path, tmp_path / "head"), prompts, max_new_tokens=4))
    assert [len(record.output_ids) > 0 for record in subject.plain] == [True, True]
    finding = check_tokenizer(subject)
    assert finding.verdict is Verdict.OK and finding.measured.startswith("300 tokens for an embedding of 300 rows")


def test_iq4_nl_is_a_table_times_a_scale(tmp_path: Path) -> None:
    """32 numbers in a block: a scale in float16, and bytes with one of the first 16 numbers and one of the last."""
    generator = np.random.default_rng(0)
    scales = generator.normal(size=(4, 3, 1)).astype(np.float16)
    codes = generator.integers(0, 256, (4, 3, 16), dtype=np.uint8)
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    blocks = np.concatenate((scales.view(np.uint8), codes), axis=-1)
    writer.add_tensor("blk.0.ffn_up.weight", blocks.reshape(4, -1), raw_dtype=Kind.IQ4_NL)
    file = read_head(finish(writer, tmp_path / "model.gguf"))
    read = dequantised(file, file.places["blk.0.ffn_up.weight"])
    values = np.array(IQ4_NL)[np.concatenate((codes & 15, codes >> 4), axis=-1)] * scales.astype(np.float32)
    np.testing.assert_array_equal(read.numpy(), values.reshape(4, 96).astype(np.float32))
