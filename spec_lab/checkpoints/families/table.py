"""The families of decoders: for each architecture that a config.json may name, its reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from spec_lab.checkpoints.checks import refuse_values
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families.deepseek import read_deepseek_v3, read_glm4_moe_lite
from spec_lab.checkpoints.families.experts import read_glm4_moe, read_qwen3_moe
from spec_lab.checkpoints.families.gemma4 import read_gemma4
from spec_lab.checkpoints.families.hybrid import read_qwen3_5, read_qwen3_5_moe, read_qwen3_next
from spec_lab.checkpoints.families.plain import read_llama, read_qwen2, read_qwen3
from spec_lab.checkpoints.gguf_config import gguf_config
from spec_lab.checkpoints.gguf_file import is_gguf
from spec_lab.checkpoints.json_input import ConfigFields, read_json

Reader = Callable[[dict[str, Any], str], ModelConfig]
"""Reads the keys of a config.json; the string names the file in errors. Raises UserError for unsupported options."""

READERS: Mapping[str, Reader] = {
    "LlamaForCausalLM": read_llama,
    "Qwen2ForCausalLM": read_qwen2,
    "Qwen3ForCausalLM": read_qwen3,
    "MiMoForCausalLM": read_qwen2,
    "Gemma4ForCausalLM": read_gemma4,
    "Gemma4ForConditionalGeneration": read_gemma4,
    "Qwen3MoeForCausalLM": read_qwen3_moe,
    "Glm4MoeForCausalLM": read_glm4_moe,
    "DeepseekV3ForCausalLM": read_deepseek_v3,
    "DeepseekV32ForCausalLM": read_deepseek_v3,
    "Glm4MoeLiteForCausalLM": read_glm4_moe_lite,
    "Qwen3_5ForCausalLM": read_qwen3_5,
    "Qwen3_5ForConditionalGeneration": read_qwen3_5,
    "Qwen3_5MoeForCausalLM": read_qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": read_qwen3_5_moe,
    "Qwen3NextForCausalLM": read_qwen3_next,
}


def read_decoder(config: dict[str, Any], source: str) -> ModelConfig:
    """Read the keys of a config.json; `source` names the file in errors.

    Raises:
        UserError: an unsupported architecture or option, or a missing value.
    """
    architectures = ConfigFields(config, source).texts("architectures")
    name = next((name for name in architectures if name in READERS), ", ".join(architectures))
    refuse_values(source, {"architecture": name}, {"architecture": READERS})
    return READERS[name](config, source)


def read_model_config(folder: Path) -> ModelConfig:
    """Read the config of a folder or a GGUF file.

    A folder's end tokens are those that `generate` of transformers would use. If there is a generation_config.json, its
    end tokens are the only ones, even if it names none. Without that file, they are those of config.json; a family's
    default is not used.

    Raises:
        UserError: the errors of `read_decoder`.
    """
    if is_gguf(folder):
        return read_decoder(gguf_config(folder), str(folder))
    config = read_decoder(read_json(folder / "config.json"), str(folder / "config.json"))
    generation = folder / "generation_config.json"
    if not generation.exists():
        return config
    fields = ConfigFields(read_json(generation), str(generation))
    return replace(config, eos_token_ids=fields.token_ids("eos_token_id"))
