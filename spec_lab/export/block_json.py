"""The config.json of block drafters in z-lab's layout, and in those of speculators and DeepSpec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spec_lab.checkpoints.block_config import BlockConfig, Causality, ConvSizes, HeadKind, HeadSizes, Slots
from spec_lab.checkpoints.block_layouts import DEEPSPEC, OF_DEEPSPEC, SCALE_KEYS, ZLAB, BlockLayout
from spec_lab.checkpoints.taps import numbers_of
from spec_lab.core.errors import UserError
from spec_lab.export.eagle3_json import decoder_keys

KINDS: Mapping[HeadKind, tuple[str, str]] = {
    HeadKind.none: ("dflash", "DFlashSpeculator"),
    HeadKind.markov: ("dspark", "DSparkSpeculator"),
    HeadKind.selector: ("dflash2", "DFlash2DraftModel"),
}
"""For speculators' layout: `speculators_model_type` and the architecture, by head."""
HEADS_OF = {"speculators": tuple(KINDS), "deepspec": (HeadKind.none, HeadKind.markov)}
"""The heads that the readers of a layout know, but for z-lab's, which know all."""
DEEPSPEC_KEYS: Mapping[str, Any] = {
    "architectures": [OF_DEEPSPEC],
    "num_anchors": 512,
    "markov_rank": 0,
    "enable_confidence_head": False,
}
"""Keys that DeepSpec's model always requires; `num_anchors` is only used in training."""
TABLES = frozenset({"embed_tokens.weight", "lm_head.weight"})
"""The target's tensors in DeepSpec's files."""


def block_json(
    config: BlockConfig, num_target_layers: int, layout: BlockLayout, target: str = "target"
) -> dict[str, Any]:
    """Return the keys of a config.json, of which `load_block` makes the same drafter.

    DeepSpec's files also hold the target's embedding and head (`TABLES`). `target` is the target's name in speculators'
    config, from which `vllm serve` loads it.

    Raises:
        UserError: a part that the layout has no place for.
    """
    _refuse_parts(config, layout)
    scales = {key: getattr(config, name) for name, key in SCALE_KEYS.items()}
    block: dict[str, Any] = {
        layout.taps_key: numbers_of(config.taps, layout.offset),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.slots.name == Slots.anchor_first and config.head.kind != HeadKind.gru,
        **_causal_keys(config),
        **{key: scale for key, scale in scales.items() if scale not in (None, 1.0)},
        "draft_vocab_size": config.draft_vocab_size,
        **({"enable_confidence_head": True, "confidence_head_with_markov": False} if config.confidence_reads else {}),
        **_head_keys(config),
    }
    if config.conv is not None:
        block |= _sizes(config.conv)
    if layout is ZLAB:
        top = {"architectures": [config.head.architecture], "num_target_layers": num_target_layers}
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
    """Refuse a part that the layout's own readers would pass over."""
    windows, is_deepspec = {layer.window for layer in config.body.layers}, layout is DEEPSPEC
    sees_all = config.causality != Causality.all and windows == {None}
    lacking = {
        "head": config.head.kind not in HEADS_OF.get(layout.name, HeadKind),
        "slots": is_deepspec and config.slots.name != Slots.anchor_first,
        "conv": is_deepspec and config.conv is not None,
        "draft_vocab_size": is_deepspec and config.draft_vocab_size != config.body.vocab_size,
        "window": not sees_all if is_deepspec else layout is not ZLAB and config.window_moves,
        "windows of several sizes": len(windows - {None}) > 1,
    }
    for part in (part for part, is_there in lacking.items() if is_there):
        raise UserError(f"the layout {layout.name} cannot hold this drafter's {part}")


def _decoder(config: BlockConfig) -> dict[str, Any]:
    """Return the keys of the body."""
    windows = [layer.window for layer in config.body.layers]
    sizes = {window for window in windows if window is not None}
    types = ["full_attention" if window is None else "sliding_attention" for window in windows]
    window_keys = {"sliding_window": sizes.pop(), "use_sliding_window": True} if sizes else {}
    return {**decoder_keys(config.body, "qwen3"), "layer_types": types, **window_keys}


def _sizes(part: HeadSizes | ConvSizes) -> dict[str, Any]:
    return {key: getattr(part, name) for name, key in part.keys.items()}


def _head_keys(config: BlockConfig) -> dict[str, Any]:
    keys = _sizes(config.head)
    if config.head.kind == HeadKind.markov:
        reads_head = config.confidence_reads > config.body.hidden_size
        keys |= {"projector_type": "dspark", "confidence_head_with_markov": reads_head}
    if config.head.kind == HeadKind.gru:
        shifts = config.slots.name == Slots.anchor_first
        keys |= {"projector_type": "domino", "shift_label": shifts, "pure_draft_prefix_len": 1}
    return keys
