"""Writes the target of a GGUF file as a Hugging Face folder: safetensors, config, and a fast tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Kind

from spec_lab.checkpoints.checkpoint import read_tensors
from spec_lab.checkpoints.checkpoint_files import LazyTensors, StoredTensor
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.gguf import gguf_tensors
from spec_lab.checkpoints.gguf_config import gguf_config
from spec_lab.checkpoints.gguf_file import read_head
from spec_lab.checkpoints.gguf_tokenizer import chat_template, gguf_tokenizer, has_tokenizer, special_tokens
from spec_lab.checkpoints.json_input import refuse_values
from spec_lab.export.folders import save_folder

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""The classes of the families of GGUF files, by which vLLM and SGLang know them."""
MOST_FILE_BYTES = 4 * 10**9
"""The most bytes of a target's tensors in a file."""


def write_hf(path: Path, folder: Path) -> None:
    """Write the target of a GGUF file.

    Matrices that the file has in 16 bits keep them. Quantised ones become float32, which holds their values exactly.

    Raises:
        UserError: the errors of `read_model_config`, or a tokenizer that is not read.
    """
    read_model_config(path)  # refuses what is not understood
    tensors = gguf_tensors(path)
    config = {key: value for key, value in gguf_config(path).items() if value is not None}
    refuse_values(str(path), config, {"model_type": ARCHITECTURES})
    dtype = _dtype(path, tensors)
    config |= {"architectures": [ARCHITECTURES[config["model_type"]]], "torch_dtype": str(dtype).split(".")[-1]}

    def read(name: str) -> torch.Tensor:
        value = read_tensors({name: tensors[name]}, torch.float32, "cpu")[name]
        narrow = value.to(dtype)
        assert torch.equal(narrow.float(), value), f"{name} has values that {dtype} cannot hold"
        return narrow

    like = {name: torch.empty(tensor.shape, dtype=dtype, device="meta") for name, tensor in tensors.items()}
    save_folder(LazyTensors(tensors, read), config, folder, like, MOST_FILE_BYTES)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n", encoding="utf-8")
    if has_tokenizer(path):
        _write_tokenizer(path, folder, config["max_position_embeddings"])


def _dtype(path: Path, tensors: dict[str, StoredTensor]) -> torch.dtype:
    """Return the 16-bit type of all matrices, if they share one and norms fit it; else float32."""
    kinds = {place.code for place in read_head(path).places.values() if len(place.shape) > 1}
    dtype = {Kind.BF16: torch.bfloat16, Kind.F16: torch.float16}.get(Kind(min(kinds))) if len(kinds) == 1 else None
    if dtype is None:
        return torch.float32
    others = read_tensors({name: it for name, it in tensors.items() if len(it.shape) == 1}, torch.float32, "cpu")
    return dtype if all(torch.equal(value.to(dtype).float(), value) for value in others.values()) else torch.float32


def _write_tokenizer(path: Path, folder: Path, longest: int) -> None:
    """Write what transformers' `AutoTokenizer` reads, with the file's chat template."""
    gguf_tokenizer(path).save(str(folder / "tokenizer.json"))
    keys: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
        **special_tokens(path),
    }
    template = chat_template(path)
    if template is not None:
        keys["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")
