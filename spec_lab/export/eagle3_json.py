"""The config.json of EAGLE-3 and P-EAGLE heads: `LlamaForCausalLMEagle3`, which SpecForge, SGLang and vLLM read, and
speculators' layout, version 0.9."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.eagle3_checkpoint import LAYER_IDS, Eagle3Config, default_tap_layer_inputs
from spec_lab.checkpoints.plan import RopeConfig
from spec_lab.checkpoints.taps import OFFSETS, numbers_of, taps_of_inputs
from spec_lab.core.errors import UserError
from spec_lab.export.folders import save_folder

EAGLE3_LAYOUTS = ("hf", "speculators")


def write_eagle3_folder(
    folder: Path,
    head: Eagle3Config,
    tensors: Mapping[str, Tensor],
    layout: str,
    num_target_layers: int,
    num_drafts: int,
    target: str,
) -> None:
    """Write a head whose tensors have SafeAILab's names, as those of `load_eagle3`.

    Args:
        layout: one of `EAGLE3_LAYOUTS`; a P-EAGLE head has only that of speculators.
        num_drafts: the drafts of a round that speculators' config proposes.
        target: the target's name in speculators' config, from which `vllm serve` loads it.

    Raises:
        UserError: the head has a part that the layout cannot hold.
    """
    if layout == "hf":
        save_folder(tensors, eagle3_json(head, num_target_layers), folder)
        return
    config = _speculators_json(head, num_drafts, target)
    renamed = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in tensors.items()}
    save_folder(renamed, config, folder)


def eagle3_json(head: Eagle3Config, num_target_layers: int) -> dict[str, Any]:
    """Return config.json of `LlamaForCausalLMEagle3`.

    It has no tap ids if they are the default, on which vLLM and SGLang agree. They number others differently: vLLM
    reads the inputs of layers at the top level, SGLang the outputs in `eagle_config`.
    """
    assert head.mask_token_id is None, "a P-EAGLE head has no such layout"
    taps, ids = head.tap_layer_inputs, {}
    if taps != default_tap_layer_inputs(num_target_layers):
        ids = {LAYER_IDS: list(taps), "eagle_config": {LAYER_IDS: [tap - 1 for tap in taps]}}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_keys(head),
        **_head_keys(head),
        **ids,
        "torch_dtype": "bfloat16",
    }


def _speculators_json(head: Eagle3Config, num_drafts: int, target: str) -> dict[str, Any]:
    kind, architecture = (
        ("eagle3", "Eagle3Speculator") if head.mask_token_id is None else ("peagle", "PEagleSpeculator")
    )
    taps = taps_of_inputs(head.tap_layer_inputs)
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_drafts,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "transformer_layer_config": _layer_keys(head),
        "target_hidden_size": None,
        LAYER_IDS: numbers_of(taps, OFFSETS["hidden_states"]),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **_head_keys(head),
    }


def _layer_keys(head: Eagle3Config) -> dict[str, Any]:
    plan = head.layer.only_layer
    if plan.window is not None:
        raise UserError("a layer of LlamaForCausalLMEagle3 cannot hold this head's window")
    layers = replace(head.layer, layers=(plan, *head.more_layers))
    return decoder_keys(layers, "qwen3" if plan.qk_norm else "llama") | {"mlp_bias": plan.mlp_bias}


def decoder_keys(config: ModelConfig, model_type: str) -> dict[str, Any]:
    """Return the keys of config.json for a decoder of layers like its first one.

    Raises:
        UserError: it has a part that would be lost.
    """
    plan = config.layers[0]
    lacking = {
        "latent attention": plan.latent is not None,
        f"rope scaling {plan.rope.scaling}": plan.rope.scaling not in ("none", "linear", "llama3"),
        "partial rotation": plan.rope.partial_rotary_factor != 1.0,
    }
    for part in (part for part, is_there in lacking.items() if is_there):
        raise UserError(f"a layer of {model_type} cannot hold this head's {part}")
    return {
        "model_type": model_type,
        "hidden_size": config.hidden_size,
        "intermediate_size": plan.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": plan.num_heads,
        "num_key_value_heads": plan.num_kv_heads,
        "head_dim": plan.head_dim,
        "vocab_size": config.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        **rope_keys(plan.rope),
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": plan.qkv_bias,
        "tie_word_embeddings": False,
    }


def _head_keys(head: Eagle3Config) -> dict[str, Any]:
    given = {
        "norm_before_fc": head.norm_before_fc or None,
        "fc_norm": head.fc_norm or None,
        "norm_output": head.norm_output or None,
        "mask_token_id": head.mask_token_id,
        "target_hidden_size": None if head.target_hidden_size == head.layer.hidden_size else head.target_hidden_size,
    }
    return {
        "draft_vocab_size": head.draft_vocab_size,
        "norm_before_residual": head.norm_before_residual,
        **{key: value for key, value in given.items() if value is not None},
    }


def rope_keys(rope: RopeConfig) -> dict[str, object]:
    """Return the keys of config.json for the RoPE of a head's layer."""
    if rope.scaling == "none":
        return {"rope_theta": rope.theta}
    scaling: dict[str, object] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
        }
    return {"rope_theta": rope.theta, "rope_scaling": scaling}
