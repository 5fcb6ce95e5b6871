"""Reading the config.json of block drafters in three layouts: z-lab's (SpecForge's too), DeepSpec's, and speculators'.

Each describes the same block with different keys. They count the target's layers in two ways. A key or the
architecture's name says which row predicts which token; some files do not say it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spec_lab.checkpoints.block_config import BlockConfig, Causality, ConvSizes, SlotReading, Slots
from spec_lab.checkpoints.block_heads import (
    GruSizes,
    HeadKind,
    HeadSizes,
    LatticeSizes,
    MarkovForm,
    MarkovSizes,
    NoHead,
    SelectorSizes,
)
from spec_lab.checkpoints.checks import refuse_other_target, refuse_values
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families import read_decoder
from spec_lab.checkpoints.json_input import ConfigFields, read_json
from spec_lab.checkpoints.taps import SPELLINGS, TapSpelling, refuse_taps

KNOB = "drafter.path"
MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
KNOWN_KEYS = frozenset(
    (
        *("target_layer_ids", "block_size", "num_target_layers", "draft_vocab_size", *MASK_KEYS),
        *("sample_from_anchor", "projector_type", "shift_label", "pure_draft_prefix_len"),
        *("is_causal", "causal", "sliding_window_non_causal", "use_swa", "swa_window_size"),
        *("input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
        *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
        *("markov_rank", "markov_head_type", "gru_hidden_dim", "emb_dim"),
        *("enable_confidence_head", "confidence_head_with_markov", "confidence_head_alpha"),
        *("lilicorr_candidate_topk", "lilicorr_hidden_size", "lilicorr_num_layers", "lilicorr_num_heads"),
        *("lilicorr_mlp_ratio", "lilicorr_factor_dim", "lilicorr_vector_eps", "lilicorr_logit_scale"),
    )
)
"""The keys of `dflash_config` that are read, or that only training reads."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The layout in which one project stores block drafters.

    Attributes:
        taps_key: the key that lists the tapped layers.
        spelling: how that list counts layers.
        drops_tables: whether `embed_tokens`, and an `lm_head` over the whole vocabulary, are copies of the target's,
            and so are not read.
    """

    name: str
    taps_key: str
    spelling: TapSpelling
    drops_tables: bool


ZLAB = BlockLayout("zlab", "target_layer_ids", SPELLINGS["layer_outputs"], drops_tables=False)
DEEPSPEC = BlockLayout("deepspec", "target_layer_ids", SPELLINGS["layer_outputs"], drops_tables=True)
SPECULATORS = BlockLayout("speculators", "aux_hidden_state_layer_ids", SPELLINGS["hidden_states"], drops_tables=True)
BY_ARCHITECTURE: Mapping[str, BlockLayout] = {
    "DFlashDraftModel": ZLAB,
    "DSparkDraftModel": ZLAB,
    "DFlash2DraftModel": ZLAB,
    "LiLiCorrDraftModel": ZLAB,
    "Qwen3DSparkModel": DEEPSPEC,
}
SPECULATORS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "dflash": {},
    "dspark": {"markov_rank": 256},
    "dflash2": {
        "sliding_window_non_causal": True,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    },
}
"""Default values of missing keys, by `speculators_model_type`."""


@dataclass(frozen=True, slots=True)
class BlockFile:
    """A config.json, whatever its layout.

    Attributes:
        fields: the keys of the block.
        decoder: the keys of the body's layers.
    """

    layout: BlockLayout
    fields: ConfigFields
    decoder: dict[str, Any]

    @property
    def source(self) -> str:
        return self.fields.source


def read_block_config(folder: Path, target: ModelConfig, knob: str = KNOB) -> tuple[BlockConfig, BlockLayout]:
    """Read a block drafter's config.json, and check that it belongs to the target. `knob` names the folder.

    Raises:
        UserError: another kind of drafter, an option that is not supported, or a drafter for another target.
    """
    file = read_block_file(folder)
    fields, layout = file.fields, file.layout
    body = _body(file, target)
    block_size = fields.integer("block_size")
    taps = layout.spelling.read(fields.required(layout.taps_key))
    causality = _causality(fields)
    is_capped = bool(fields.values.get("final_logit_softcapping"))  # 0 is no cap
    config = BlockConfig(
        body=body,
        block_size=block_size,
        slots=_slots(fields, block_size),
        taps=taps,
        target_hidden_size=target.hidden_size,
        mask_token_id=_mask_token_id(fields),
        head=_head(fields),
        draft_vocab_size=fields.integer("draft_vocab_size", body.vocab_size),
        causality=causality,
        window_moves=_window_moves(fields, layout, body) and causality == Causality.none,
        conv=_conv(fields),
        embedding_scale=fields.number("input_embedding_scale", target.embedding_scale),
        logit_scale=fields.number("output_multiplier", 1.0),
        logit_softcap=fields.number("final_logit_softcapping") if is_capped else None,
    )
    pairs = {
        "vocab_size": (body.vocab_size, target.vocab_size),
        "num_target_layers": (fields.integer("num_target_layers", target.num_layers), target.num_layers),
    }
    refuse_other_target(fields.source, knob, pairs)
    refuse_taps(fields.source, layout.taps_key, taps, target.num_layers)
    return config, layout


def read_block_file(folder: Path) -> BlockFile:
    """Read the keys of a config.json, and find its layout."""
    config, source = read_json(folder / "config.json"), str(folder / "config.json")
    top = ConfigFields(config, source)
    kind = top.text("speculators_model_type", "")
    if kind:
        refuse_values(source, config, {"speculators_model_type": SPECULATORS_DEFAULTS})
        named = {key: value for key, value in config.items() if value is not None}
        if "sample_from_anchor" not in named:
            named["sample_from_anchor"] = _samples_from_anchor(top, kind)
        fields = ConfigFields({**SPECULATORS_DEFAULTS[kind], **named}, source)
        return BlockFile(SPECULATORS, fields, config["transformer_layer_config"])
    names = top.texts("architectures")
    name = next((name for name in names if name in BY_ARCHITECTURE), ", ".join(names))
    refuse_values(source, {"architecture": name}, {"architecture": BY_ARCHITECTURE})
    layout, nested = BY_ARCHITECTURE[name], top.object("dflash_config")
    unknown = [key for key, value in nested.items() if value and key not in KNOWN_KEYS]
    refuse_values(f"{source} (dflash_config)", nested, dict.fromkeys(unknown, ()))
    is_dspark = "DSparkDraftModel" in names or nested.get("projector_type") == "dspark" or layout is DEEPSPEC
    implied = {"sample_from_anchor": True} if is_dspark else {}
    return BlockFile(layout, ConfigFields({**implied, **config, **nested}, source), config)


def _samples_from_anchor(top: ConfigFields, kind: str) -> bool:
    """Return whether row 0 holds draft 1, for a file of speculators without `sample_from_anchor`.

    Files from before speculators 0.7 lack this key, and row 0 of DSpark's may or may not hold draft 1. The number of
    drafts that they propose tells: if row 0 holds one, a block has as many drafts as rows. In a file without
    that number, the anchor row holds a draft if the drafter is DSpark.
    """
    methods = top.object("speculators_config").get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    num_drafts = ConfigFields(first, top.source).integer("speculative_tokens", 0)
    return num_drafts == top.integer("block_size") if num_drafts else kind == "dspark"


def _body(file: BlockFile, target: ModelConfig) -> ModelConfig:
    """Read the layers, which are Qwen3's in every layout."""
    decoder = dict(file.decoder)
    if decoder.get("head_dim") is None and decoder.get("model_type", "qwen3") != "qwen3":
        sizes = ConfigFields(decoder, file.source)
        decoder["head_dim"] = sizes.integer("hidden_size") // sizes.integer("num_attention_heads")
    decoder |= {"model_type": "qwen3", "vocab_size": decoder.get("vocab_size") or target.vocab_size}
    if "sliding_attention" in (decoder.get("layer_types") or ()):
        decoder["use_sliding_window"] = True
    body = read_decoder(decoder, file.source)
    positions = max(body.max_position_embeddings, target.max_position_embeddings)
    if file.fields.flag("use_swa"):
        window = file.fields.integer("swa_window_size")
        body = replace(body, layers=tuple(replace(plan, window=window) for plan in body.layers))
    return replace(body, max_position_embeddings=positions)


def _slots(fields: ConfigFields, block_size: int) -> SlotReading:
    """Read which row holds draft 1.

    Domino's files say it with `shift_label`: if it is true, row 0 holds draft 1, and the last row is not used.
    """
    if fields.text("projector_type", "") == "domino" and fields.flag("shift_label"):
        return SlotReading.of(Slots.anchor_first, block_size, HeadKind.gru)
    slots = Slots.anchor_first if fields.flag("sample_from_anchor") else Slots.mask_first
    return SlotReading.of(slots, block_size)


def _mask_token_id(fields: ConfigFields) -> int:
    """Read the mask token from the first of `MASK_KEYS` that is there, in vLLM's order."""
    key = next((key for key in MASK_KEYS if fields.has(key)), MASK_KEYS[0])
    return fields.integer(key)


def _causality(fields: ConfigFields) -> Causality:
    """Read which layers are causal. z-lab's `is_causal` and vLLM's `causal` decide for all layers if they are there."""
    for key in ("is_causal", "causal"):
        if fields.has(key):
            return Causality.all if fields.flag(key) else Causality.none
    sees_whole_block = fields.flag("sliding_window_non_causal") or fields.flag("use_swa")
    return Causality.none if sees_whole_block else Causality.windows


def _window_moves(fields: ConfigFields, layout: BlockLayout, body: ModelConfig) -> bool:
    """Return whether each row has a window of its own, as in z-lab's model; `sliding_window_non_causal` is speculators'
    window, which ends at the block."""
    has_window = any(plan.window is not None for plan in body.layers)
    return layout is ZLAB and has_window and not fields.flag("sliding_window_non_causal")


def _conv(fields: ConfigFields) -> ConvSizes | None:
    num_taps = fields.integer("conv_kernel_size", 0)
    return ConvSizes(num_taps, fields.integer("conv_group_size")) if num_taps else None


def _head(fields: ConfigFields) -> HeadSizes:
    """Read the head, whose keys depend on its kind."""
    readers: list[tuple[bool, Callable[[ConfigFields], HeadSizes]]] = [
        (fields.has("lilicorr_candidate_topk"), _lattice),
        (fields.text("projector_type", "") == "domino", _gru),
        (fields.integer("selector_rank", 0) > 0, _selector),
        (fields.integer("markov_rank", 0) > 0, _markov),
    ]
    return next((read(fields) for is_there, read in readers if is_there), NoHead())


def _lattice(fields: ConfigFields) -> LatticeSizes:
    hidden_size = fields.integer("lilicorr_hidden_size") or fields.integer("hidden_size")
    return LatticeSizes(
        topk=fields.integer("lilicorr_candidate_topk"),
        hidden_size=hidden_size,
        num_layers=fields.integer("lilicorr_num_layers"),
        num_heads=fields.integer("lilicorr_num_heads"),
        mlp_ratio=fields.number("lilicorr_mlp_ratio"),
        factor_size=fields.integer("lilicorr_factor_dim"),
        vector_eps=fields.number("lilicorr_vector_eps"),
        logit_scale=fields.number("lilicorr_logit_scale"),
    )


def _gru(fields: ConfigFields) -> GruSizes:
    refuse_values(fields.source, fields.values, {"pure_draft_prefix_len": (1,)})
    return GruSizes(fields.integer("gru_hidden_dim"), fields.integer("emb_dim"))


def _selector(fields: ConfigFields) -> SelectorSizes:
    return SelectorSizes(fields.integer("selector_rank"), fields.integer("selector_top_k"))


def _markov(fields: ConfigFields) -> MarkovSizes:
    form = fields.text("markov_head_type", "vanilla")
    return MarkovSizes(fields.integer("markov_rank"), MarkovForm(form))
