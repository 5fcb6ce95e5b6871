"""Writing block drafters in z-lab's layout, and in those of speculators and DeepSpec."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from spec_lab.checkpoints.block_config import BlockConfig, Causality, HeadKind, Slots
from spec_lab.checkpoints.block_layouts import CONV_KEYS, DEEPSPEC, HEAD_KEYS, SCALE_KEYS, ZLAB, BlockLayout
from spec_lab.core.errors import UserError

ARCHITECTURES: Mapping[HeadKind, str] = {
    HeadKind.none: "DFlashDraftModel",
    HeadKind.markov: "DSparkDraftModel",
    HeadKind.gru: "DFlashDraftModel",
    HeadKind.selector: "DFlash2DraftModel",
    HeadKind.lattice: "LiLiCorrDraftModel",
}
KINDS: Mapping[HeadKind, tuple[str, str]] = {
    HeadKind.none: ("dflash", "DFlashSpeculator"),
    HeadKind.markov: ("dspark", "DSparkSpeculator"),
    HeadKind.selector: ("dflash2", "DFlash2DraftModel"),
}
"""For speculators' layout: `speculators_model_type` and the architecture, by head."""
DEEPSPEC_KEYS: Mapping[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "num_anchors": 512,
    "markov_rank": 0,
    "enable_confidence_head": False,
}
"""Keys that DeepSpec's model always requires; `num_anchors` is only used in training."""
TABLES = frozenset({"embed_tokens.weight", "lm_head.weight"})
"""The target's tensors in DeepSpec's files."""


def write_block(
    folder: Path,
    config: BlockConfig,
    tensors: Mapping[str, torch.Tensor],
    num_target_layers: int,
    layout: BlockLayout,
    target: str = "target",
) -> None:
    """Write config.json and model.safetensors, from which `load_block` makes the same drafter.

    DeepSpec's files also hold the target's embedding and head, which must then be among the tensors. `target` is the
    target's name in speculators' config, from which `vllm serve` loads it.

    Raises:
        UserError: a part that the layout cannot store.
    """
    text = json.dumps(block_json(config, num_target_layers, layout, target), indent=2)
    assert layout is not DEEPSPEC or tensors.keys() >= TABLES
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(text + "\n")


def block_json(config: BlockConfig, num_target_layers: int, layout: BlockLayout, target: str) -> dict[str, Any]:
    """Return the keys of a config.json."""
    _refuse_parts(config, layout)
    scales = {key: getattr(config, name) for name, key in SCALE_KEYS.items()}
    block: dict[str, Any] = {
        layout.taps_key: layout.spelling.write(config.taps),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.slots.name == Slots.anchor_first and config.head.kind != HeadKind.gru,
        **_causal_keys(config),
        **{key: scale for key, scale in scales.items() if scale not in (None, 1.0)},
        "draft_vocab_size": config.draft_vocab_size,
        **({"enable_confidence_head": True, "confidence_head_with_markov": False} if config.confidence_reads else {}),
        **_head_keys(config),
    }
    if config.conv is not None:
        block |= {key: getattr(config.conv, name) for name, key in CONV_KEYS.items()}
    if layout is ZLAB:
        top = {"architectures": [ARCHITECTURES[config.head.kind]], "num_target_layers": num_target_layers}
        return {**_decoder(config), **top, "block_size": config.block_size, "dflash_config": block}
    if layout is DEEPSPEC:
        sizes = {"num_target_layers": num_target_layers, "block_size": config.block_size}
        return {**_decoder(config), **DEEPSPEC_KEYS, **sizes, **block}
    kind, architecture = KINDS[config.head.kind]
    most = config.slots.most_drafts
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": most}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "transformer_layer_config": _decoder(config),
        "block_size": config.block_size,
        **({"conv_kernel_size": 0} if kind == "dflash2" and config.conv is None else {}),
        **block,
    }


def _causal_keys(config: BlockConfig) -> dict[str, bool]:
    if config.window_moves:
        return {"is_causal": False}
    if config.causality == Causality.none:
        return {"sliding_window_non_causal": True, "causal": False}
    return {"sliding_window_non_causal": False, **({"causal": True} if config.causality == Causality.all else {})}


def _refuse_parts(config: BlockConfig, layout: BlockLayout) -> None:
    """Refuse a part that would be lost, or read back as a different one."""
    windows, is_deepspec = {layer.window for layer in config.body.layers}, layout is DEEPSPEC
    sees_all = config.causality != Causality.all and windows == {None}
    lacking = {
        "head": config.head.kind not in layout.heads,
        "slots": is_deepspec and config.slots.name != Slots.anchor_first,
        "conv": is_deepspec and config.conv is not None,
        "draft_vocab_size": is_deepspec and config.draft_vocab_size != config.body.vocab_size,
        "window": not sees_all if is_deepspec else layout is not ZLAB and config.window_moves,
        "body with windows of several sizes": len(windows - {None}) > 1,
        "body with a scaled rope": config.body.layers[0].rope.scaling != "none",
    }
    for part in (part for part, is_there in lacking.items() if is_there):
        raise UserError(f"the layout {layout.name} cannot hold this drafter's {part}")


def _decoder(config: BlockConfig) -> dict[str, Any]:
    """Return the keys of the body."""
    body, plan = config.body, config.body.layers[0]
    windows = [layer.window for layer in body.layers]
    sizes = {window for window in windows if window is not None}
    types = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return {
        "model_type": "qwen3",
        "hidden_size": body.hidden_size,
        "intermediate_size": plan.intermediate_size,
        "num_hidden_layers": body.num_layers,
        "num_attention_heads": plan.num_heads,
        "num_key_value_heads": plan.num_kv_heads,
        "head_dim": plan.head_dim,
        "vocab_size": body.vocab_size,
        "rms_norm_eps": body.rms_norm_eps,
        "rope_theta": plan.rope.theta,
        "max_position_embeddings": body.max_position_embeddings,
        "attention_bias": plan.qkv_bias,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "layer_types": types,
        **({"sliding_window": sizes.pop(), "use_sliding_window": True} if sizes else {}),
    }


def _head_keys(config: BlockConfig) -> dict[str, Any]:
    head = config.head
    keys = {key: getattr(head, name) for name, key in HEAD_KEYS.get(type(head), {}).items()}
    if head.kind == HeadKind.markov:
        reads_head = config.confidence_reads > config.body.hidden_size
        keys |= {"projector_type": "dspark", "confidence_head_with_markov": reads_head}
    if head.kind == HeadKind.gru:
        shifts = config.slots.name == Slots.anchor_first
        keys |= {"projector_type": "domino", "shift_label": shifts, "pure_draft_prefix_len": 1}
    return keys
