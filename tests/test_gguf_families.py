"""GGUF files of Qwen3.5, with experts and an MTP module, and of gpt-oss beside the folder of the same model, and as
llama.cpp reads them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.checkpoints.checkpoint import open_tensors
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.mtp_checkpoint import load_mtp
from spec_lab.checkpoints.target_tensors import target_tensors
from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes
from tests.lab import Reference, generate, make_config, random_requests
from tests.llamacpp import answer, parameters
from tests.tiny_gguf_families import GPT_OSS, QWEN35, QWEN35_MOE, write_family
from tests.tiny_gpt_oss import make_tiny_gpt_oss, pack_experts
from tests.tiny_hybrid import make_tiny_nextn

KINDS = ("qwen35", "qwen35moe", "gpt-oss", "gpt-oss in MXFP4")


class Pairs(dict[str, tuple[Path, Path]]):
    """The folder and the file of each kind, made when a test first asks for them."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        super().__init__()
        self._folders = folders

    def __missing__(self, kind: str) -> tuple[Path, Path]:
        folder = self._folders.mktemp("folder")
        self[kind] = folder, write_family(folder / "model.gguf", make(folder, kind), folder)
        return self[kind]


def make(folder: Path, kind: str) -> Any:
    if kind.startswith("qwen35"):
        name, sizes = ("qwen3_5", QWEN35) if kind == "qwen35" else ("qwen3_5_moe", QWEN35_MOE)
        make_tiny_nextn(folder, name, **sizes)
        return Reference(folder).model
    model = make_tiny_gpt_oss(folder, **GPT_OSS)
    if kind.endswith("MXFP4"):
        pack_experts(folder, model)
    return model


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return Pairs(tmp_path_factory)


def read(path: Path, dtype: torch.dtype = torch.float32) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    config = replace(read_model_config(path), rms_norm_eps=1e-5)  # the file's has 32 bits
    wanted = decoder_tensor_shapes(config)
    return config, dict(open_tensors(path, wanted, dtype, "cpu", own=lambda stored: target_tensors(stored, config)))


def assert_same(theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> None:
    """The logarithm of a decay is read back from the decay."""
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        atol = 2e-7 if name.endswith("A_log") else 0.0
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_and_weights_are_those_of_the_folder(pairs: Pairs, kind: str, dtype: torch.dtype) -> None:
    folder, file = pairs[kind]
    (theirs, expected), (ours, tensors) = read(folder, dtype), read(file, dtype)
    assert ours == theirs
    assert_same(expected, tensors)
    if kind.startswith("qwen35"):
        (config, (module,)), (its, (same,)) = (load_mtp(path, theirs, 1, dtype, "cpu") for path in (folder, file))
        assert replace(its, layer=replace(its.layer, rms_norm_eps=1e-5)) == config
        assert_same(module, same)


def test_experts_in_one_tensor_are_those_in_two(pairs: Pairs, tmp_path: Path) -> None:
    folder, file = pairs["qwen35moe"]
    fused = write_family(tmp_path / "fused.gguf", Reference(folder).model, folder, fused=True)
    assert_same(read(file)[1], read(fused)[1])


@pytest.mark.parametrize(
    ("kind", "drafter", "prune"),
    [("qwen35", "mtp_eagle", "prefill"), ("qwen35moe", "mtp_eagle", "prefill"), ("gpt-oss in MXFP4", "ngram", "none")],
)
def test_a_file_runs_as_its_folder(pairs: Pairs, kind: str, drafter: str, prune: str) -> None:
    folder, file = pairs[kind]
    requests = random_requests(3, max_new_tokens=16, vocab_size=300)
    records = [
        generate(make_config((path, path), drafter, prune=prune, batch_size=2), requests) for path in (folder, file)
    ]
    assert records[0] == records[1]


@pytest.mark.parametrize("kind", KINDS[:3])  # beside MXFP4 llama.cpp rounds activations
def test_llama_cpp_gives_tokens_the_chances_of_transformers(pairs: Pairs, kind: str) -> None:
    xllamacpp = pytest.importorskip("xllamacpp")
    folder, file = pairs[kind]
    model, server = Reference(folder).model, xllamacpp.Server(parameters(xllamacpp, file, "NONE"))
    compared = 0
    for request in random_requests(12, vocab_size=256, lengths=(5, 60)):
        with torch.inference_mode():
            expected = model(torch.tensor([request.prompt_ids])).logits[0, -1].log_softmax(-1)
        if not 3 <= expected.argmax() < 97:  # others are parts of characters, whose chances it does not say
            continue
        said = answer(server, prompt=list(request.prompt_ids), max_tokens=1, ignore_eos=True, n_probs=8)
        (step,) = said["choices"][0]["logprobs"]["content"]
        top = {each["id"]: each["logprob"] for each in step["top_logprobs"]}
        torch.testing.assert_close(torch.tensor(list(top.values())), expected[list(top)], rtol=0, atol=2e-4)
        compared += 1
    assert compared > 2
