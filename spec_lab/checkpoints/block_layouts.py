"""The config.json of block drafters in three layouts: z-lab's (SpecForge's too), DeepSpec's, and speculators'.

Each describes the same block with different keys. They count the target's layers in two ways. A key or the
architecture's name says which row predicts which token; some files do not say it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spec_lab.checkpoints.block_config import (
    HEADS,
    BlockConfig,
    Causality,
    ConvSizes,
    HeadKind,
    HeadSizes,
    MarkovForm,
    SlotReading,
    Slots,
)
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families import read_decoder
from spec_lab.checkpoints.json_input import present, read_json, refuse_other_target, refuse_values
from spec_lab.checkpoints.taps import OFFSETS, Tap, refuse_taps

MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
"""The names of the mask token, in vLLM's order."""
SCALE_KEYS: Mapping[str, str] = {
    "embedding_scale": "input_embedding_scale",
    "logit_scale": "output_multiplier",
    "logit_softcap": "final_logit_softcapping",
}
KNOWN_KEYS = frozenset(
    (
        *("target_layer_ids", "block_size", "num_target_layers", "draft_vocab_size", *MASK_KEYS),
        *("sample_from_anchor", "projector_type", "shift_label", "pure_draft_prefix_len"),
        *("is_causal", "causal", "sliding_window_non_causal", "use_swa", "swa_window_size"),
        *("enable_confidence_head", "confidence_head_with_markov", "confidence_head_alpha"),
        *(key for keys in (SCALE_KEYS, ConvSizes.keys, *(head.keys for head in HEADS)) for key in keys.values()),
    )
)
"""The keys of `dflash_config` that are read, or that only training reads."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The layout in which one project stores block drafters.

    Attributes:
        taps_key: the key that lists the tapped layers.
        offset: what that list adds to a tap.
        drops_tables: whether `embed_tokens`, and an `lm_head` over the whole vocabulary, are copies of the target's,
            and so are not read.
    """

    name: str
    taps_key: str
    offset: int
    drops_tables: bool


ZLAB = BlockLayout("zlab", "target_layer_ids", OFFSETS["layer_outputs"], drops_tables=False)
DEEPSPEC = BlockLayout("deepspec", "target_layer_ids", OFFSETS["layer_outputs"], drops_tables=True)
SPECULATORS = BlockLayout("speculators", "aux_hidden_state_layer_ids", OFFSETS["hidden_states"], drops_tables=True)
OF_DEEPSPEC = "Qwen3DSparkModel"
BY_ARCHITECTURE: Mapping[str, BlockLayout] = {**{head.architecture: ZLAB for head in HEADS}, OF_DEEPSPEC: DEEPSPEC}
SPECULATORS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "dflash": {},
    "dspark": {"markov_rank": 256},
    "dflash2": {"sliding_window_non_causal": True, "conv_kernel_size": 2, "selector_rank": 256},
}
"""Default values of missing keys, by `speculators_model_type`; those of other sizes are the fields' own."""


def read_block_config(folder: Path, target: ModelConfig) -> tuple[BlockConfig, BlockLayout]:
    """Read a block drafter's config.json, and check that it belongs to the target.

    Raises:
        UserError: another kind of drafter, an option that is not supported, or a drafter for another target.
    """
    source, (layout, keys) = str(folder / "config.json"), read_block_file(folder)
    body, causality, head = _body(keys, target, source), _causality(keys), _head(keys)
    taps = tuple(Tap(number - layout.offset) for number in keys[layout.taps_key])
    moves = layout is ZLAB and any(plan.window is not None for plan in body.layers)
    scales: Any = {name: float(keys[key]) for name, key in SCALE_KEYS.items() if keys.get(key)}  # a cap of 0 is none
    config = BlockConfig(
        body=body,
        block_size=keys["block_size"],
        slots=_slots(keys),
        taps=taps,
        target_hidden_size=target.hidden_size,
        mask_token_id=next(keys[key] for key in MASK_KEYS if key in keys),
        head=head,
        draft_vocab_size=keys.get("draft_vocab_size", body.vocab_size),
        causality=causality,
        # z-lab's rows have windows of their own. `sliding_window_non_causal` is speculators' window, which ends at the
        # block.
        window_moves=moves and not keys.get("sliding_window_non_causal") and causality == Causality.none,
        conv=ConvSizes(**_values(keys, ConvSizes.keys)) if keys.get("conv_kernel_size") else None,
        **{"embedding_scale": target.embedding_scale, **scales},
    )
    num_layers = keys.get("num_target_layers", target.num_layers)
    refuse_other_target(source, target, vocab_size=body.vocab_size, num_layers=num_layers)
    refuse_taps(source, layout.taps_key, taps, target.num_layers)
    return config, layout


def read_block_file(folder: Path) -> tuple[BlockLayout, dict[str, Any]]:
    """Read the keys of a config.json that are not null, and find its layout. Those of the body's layers are below
    `transformer_layer_config`."""
    source = str(folder / "config.json")
    config = present(read_json(folder / "config.json"))
    if kind := config.get("speculators_model_type"):
        refuse_values(source, config, {"speculators_model_type": SPECULATORS_DEFAULTS})
        named = {"sample_from_anchor": _samples_from_anchor(config, kind), **config}
        return SPECULATORS, {**SPECULATORS_DEFAULTS[kind], **named}
    names = config.get("architectures", ())
    name = next((name for name in names if name in BY_ARCHITECTURE), ", ".join(names))
    refuse_values(source, {"architecture": name}, {"architecture": BY_ARCHITECTURE})
    layout, nested = BY_ARCHITECTURE[name], present(config.get("dflash_config", {}))
    unknown = [key for key, value in nested.items() if value and key not in KNOWN_KEYS]
    refuse_values(f"{source} (dflash_config)", nested, dict.fromkeys(unknown, ()))
    is_dspark = "DSparkDraftModel" in names or nested.get("projector_type") == "dspark" or layout is DEEPSPEC
    implied = {"sample_from_anchor": True} if is_dspark else {}
    return layout, {**implied, **config, **nested, "transformer_layer_config": config}


def _samples_from_anchor(config: Mapping[str, Any], kind: str) -> bool:
    """Return whether row 0 holds draft 1, for a file of speculators without `sample_from_anchor`.

    Files from before speculators 0.7 lack this key, and row 0 of DSpark's may or may not hold draft 1. The number of
    drafts that they propose tells: if row 0 holds one, a block has as many drafts as rows. In a file without
    that number, the anchor row holds a draft if the drafter is DSpark.
    """
    methods = config.get("speculators_config", {}).get("proposal_methods") or [{}]
    num_drafts = methods[0].get("speculative_tokens")
    return bool(num_drafts == config["block_size"] if num_drafts else kind == "dspark")


def _body(keys: Mapping[str, Any], target: ModelConfig, source: str) -> ModelConfig:
    """Read the layers, which are Qwen3's in every layout."""
    decoder = present(keys["transformer_layer_config"])
    if decoder.get("model_type", "qwen3") != "qwen3":
        decoder.setdefault("head_dim", decoder["hidden_size"] // decoder["num_attention_heads"])
    decoder = {"vocab_size": target.vocab_size, **decoder, "model_type": "qwen3"}
    if "sliding_attention" in decoder.get("layer_types", ()):
        decoder["use_sliding_window"] = True
    body = read_decoder(decoder, source)
    positions = max(body.max_position_embeddings, target.max_position_embeddings)
    if keys.get("use_swa"):
        window = keys["swa_window_size"]
        body = replace(body, layers=tuple(replace(plan, window=window) for plan in body.layers))
    return replace(body, max_position_embeddings=positions)


def _slots(keys: Mapping[str, Any]) -> SlotReading:
    """Read which row holds draft 1.

    Domino's files say it with `shift_label`: if it is true, row 0 holds draft 1, and the last row is not used.
    """
    if keys.get("projector_type") == "domino" and keys.get("shift_label"):
        return SlotReading.of(Slots.anchor_first, keys["block_size"], HeadKind.gru)
    slots = Slots.anchor_first if keys.get("sample_from_anchor") else Slots.mask_first
    return SlotReading.of(slots, keys["block_size"])


def _causality(keys: Mapping[str, Any]) -> Causality:
    """Read which layers are causal. z-lab's `is_causal` and vLLM's `causal` decide for all layers if they are there."""
    for key in ("is_causal", "causal"):
        if key in keys:
            return Causality.all if keys[key] else Causality.none
    sees_whole_block = keys.get("sliding_window_non_causal") or keys.get("use_swa")
    return Causality.none if sees_whole_block else Causality.windows


def _head(keys: Mapping[str, Any]) -> HeadSizes:
    """Read the head, whose keys depend on its kind."""
    kind = next((head for head in HEADS if keys.get(next(iter(head.keys.values()), ""))), HeadSizes)
    sizes = _values(keys, kind.keys)
    if kind.kind == HeadKind.gru:
        refuse_values("config.json", keys, {"pure_draft_prefix_len": (1,)})
    if kind.kind == HeadKind.lattice:
        sizes.setdefault("hidden_size", keys["hidden_size"])
    if "form" in sizes:
        sizes["form"] = MarkovForm(sizes["form"])
    return kind(**sizes)


def _values(keys: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of those keys that are there, by the names of fields."""
    return {name: keys[key] for name, key in names.items() if key in keys}
