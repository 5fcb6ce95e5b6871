"""Helpers that write tiny block drafters with the exact names of each project's files."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from spec_lab.checkpoints.block_config import HeadKind, MarkovForm, Slots
from spec_lab.checkpoints.config import ModelConfig
from tests.tiny_checkpoints import make_tiny_eagle3, random_weight, rewrite_config, rewrite_tensors

HEADS, KV_HEADS, HEAD_DIM, INNER, RANK, TOPK = 4, 2, 16, 40, 12, 5


@dataclass(frozen=True)
class TinyBlock:
    """A block drafter for a test.

    Attributes:
        layout: "zlab", "deepspec" or "speculators".
        head: as `drafter.head` names it; `form` is a Markov head's.
        window: of the layers in `sliding`; the others see everything.
        outputs: the target's layers whose outputs are tapped.
        is_causal: z-lab's key of that name; the windows of a file with it follow z-lab's rule.
        embedding_scale: keys of `dflash_config`, as are the two after it.
        keys: further keys of config.json.
    """

    layout: str = "zlab"
    head: str = "none"
    anchor_first: bool = False
    form: str = "vanilla"
    conv: bool = False
    confidence: bool = False
    block_size: int = 6
    num_layers: int = 2
    outputs: tuple[int, ...] = (1, 4)
    window: int | None = None
    sliding: tuple[int, ...] = (0,)
    non_causal: bool = True
    draft_vocab_size: int | None = None
    shares_head: bool = False
    shift_label: bool = False
    seed: int = 0
    rank: int = RANK
    keys: dict[str, Any] = field(default_factory=dict)
    is_causal: bool | None = None
    embedding_scale: float | None = None
    output_multiplier: float | None = None
    softcap: float | None = None

    @property
    def first_row(self) -> int:
        return 0 if self.anchor_first or self.shift_label else 1

    @property
    def most_drafts(self) -> int:
        return self.block_size if self.anchor_first else self.block_size - 1

    @property
    def options(self) -> dict[str, Any]:
        """The parts, as knobs of drafter=dflash."""
        slots = Slots.anchor_first if self.first_row == 0 else Slots.mask_first
        form = MarkovForm(self.form) if self.head == "markov" else MarkovForm.vanilla
        return {"head": HeadKind(self.head), "slots": slots, "conv": self.conv, "markov_form": form}


TINY_PRESETS = {
    "dflash": TinyBlock(),
    "dspark": TinyBlock(head="markov", anchor_first=True, confidence=True),
    "domino": TinyBlock(head="gru"),
    "dflash2": TinyBlock(head="selector", conv=True),
    "lilicorr": TinyBlock(head="lattice"),
}
"""A block drafter of each preset's parts."""


def write_block(folder: Path, block: TinyBlock, target: ModelConfig) -> dict[str, torch.Tensor]:
    """Write a random block drafter; return its tensors."""
    shapes = _shapes(block, target)
    generator = torch.Generator().manual_seed(block.seed)
    tensors = {name: random_weight(name, shape, generator) for name, shape in shapes.items()}
    if block.draft_vocab_size is not None:
        kept = torch.randperm(target.vocab_size, generator=generator)[: block.draft_vocab_size].sort().values
        tensors["d2t"] = kept - torch.arange(len(kept))
        tensors["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, kept, True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(block, target), indent=2))
    return tensors


def make_tiny_p_eagle(
    folder: Path, target: ModelConfig, num_layers: int = 2, **overrides: Any
) -> dict[str, torch.Tensor]:
    """Write a random P-EAGLE head in the layout of speculators; return its tensors under SafeAILab's names, the layers
    behind the first under the file's."""
    overrides |= {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"]}
    tensors = make_tiny_eagle3(folder, target, "speculators", mask_token_id=target.vocab_size - 1, **overrides)
    layers = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    rewrite_config(folder, transformer_layer_config=layers | {"num_hidden_layers": num_layers})
    generator, hidden = torch.Generator().manual_seed(1), target.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    of_layer = {name: shape for name, shape in _layer_shapes(hidden).items() if "_norm." not in name}
    for index in range(1, num_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in of_layer.items()}
    more = {name: random_weight(name, shape, generator) for name, shape in shapes.items()}
    more["mask_hidden"] = torch.randn(1, 1, 3 * hidden, generator=generator)
    rewrite_tensors(folder, more)
    return tensors | more


def _config(block: TinyBlock, target: ModelConfig) -> dict[str, Any]:
    decoder: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": target.hidden_size,
        "intermediate_size": INNER,
        "num_hidden_layers": block.num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
    }
    if block.window is not None:
        types = ["sliding_attention" if i in block.sliding else "full_attention" for i in range(block.num_layers)]
        decoder |= {"sliding_window": block.window, "layer_types": types, "use_sliding_window": True}
    mask = target.vocab_size - 1
    parts = _head_keys(block)
    if block.layout == "deepspec":
        flat = {"block_size": block.block_size, "target_layer_ids": list(block.outputs), "mask_token_id": mask}
        architectures = ["Qwen3DSparkModel"]
        keys = {"architectures": architectures, "enable_confidence_head": block.confidence, "markov_rank": 0}
        return decoder | flat | keys | parts | block.keys
    if block.layout == "speculators":
        kind, name = {
            "none": ("dflash", "DFlashSpeculator"),
            "markov": ("dspark", "DSparkSpeculator"),
            "selector": ("dflash2", "DFlash2DraftModel"),
        }[block.head]
        return {
            "architectures": [name],
            "speculators_model_type": kind,
            "transformer_layer_config": decoder,
            "draft_vocab_size": block.draft_vocab_size or target.vocab_size,
            "block_size": block.block_size,
            "aux_hidden_state_layer_ids": [output + 1 for output in block.outputs],
            "mask_token_id": mask,
            "sample_from_anchor": block.anchor_first,
            "sliding_window_non_causal": block.non_causal,
            **parts,
            **block.keys,
        }
    scales = {
        "input_embedding_scale": block.embedding_scale,
        "output_multiplier": block.output_multiplier,
        "final_logit_softcapping": block.softcap,
    }
    nested = {"mask_token_id": mask, "target_layer_ids": list(block.outputs), **parts}
    nested |= {key: value for key, value in scales.items() if value is not None}
    causal = {"is_causal": block.is_causal}
    if block.is_causal is None:
        causal = {"sliding_window_non_causal": block.non_causal}
    names = {"markov": "DSparkDraftModel", "lattice": "LiLiCorrDraftModel", "selector": "DFlash2DraftModel"}
    top = {
        "architectures": [names.get(block.head, "DFlashDraftModel")],
        "block_size": block.block_size,
        "num_target_layers": target.num_layers,
        "dflash_config": nested,
        "sample_from_anchor": block.anchor_first,
        **causal,
    }
    return decoder | top | block.keys


def _head_keys(block: TinyBlock) -> dict[str, Any]:
    keys: dict[str, dict[str, Any]] = {
        "none": {},
        "markov": {"markov_rank": block.rank, "markov_head_type": block.form},
        "gru": {
            "projector_type": "domino",
            "gru_hidden_dim": 10,
            "emb_dim": RANK,
            "shift_label": block.shift_label,
            "pure_draft_prefix_len": 1,
        },
        "selector": {"selector_rank": RANK, "selector_top_k": TOPK},
        "lattice": {
            "lilicorr_candidate_topk": 4,
            "lilicorr_hidden_size": 24,
            "lilicorr_num_layers": 2,
            "lilicorr_num_heads": 2,
            "lilicorr_mlp_ratio": 2.0,
            "lilicorr_factor_dim": 8,
            "lilicorr_vector_eps": 1e-6,
            "lilicorr_logit_scale": 5.0,
        },
    }
    conv = {"conv_kernel_size": 2, "conv_group_size": 8} if block.conv else {}
    if block.layout == "speculators" and block.head == "selector" and not block.conv:
        conv = {"conv_kernel_size": 0}
    return keys[block.head] | conv


def _layer_shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a layer with norms of queries and keys."""
    return {
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, hidden),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, hidden),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, hidden),
        "self_attn.o_proj.weight": (hidden, HEADS * HEAD_DIM),
        "self_attn.q_norm.weight": (HEAD_DIM,),
        "self_attn.k_norm.weight": (HEAD_DIM,),
        "mlp.gate_proj.weight": (INNER, hidden),
        "mlp.up_proj.weight": (INNER, hidden),
        "mlp.down_proj.weight": (hidden, INNER),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }


def _shapes(block: TinyBlock, target: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, vocab = target.hidden_size, target.vocab_size
    draft_vocab = block.draft_vocab_size or vocab
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(block.outputs) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    layer = _layer_shapes(hidden)
    if block.conv:
        for half in ("attention_conv", "mlp_conv"):
            layer[f"{half}.base_kernel"] = (2, 2, hidden)
            layer[f"{half}.kernel_projection.weight"] = (4 * hidden // 8, hidden)
    for index in range(block.num_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes |= _head_shapes(block, hidden, vocab, draft_vocab)
    if block.confidence:
        width = hidden + (block.rank if block.head == "markov" else 0)
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    if block.layout == "deepspec":
        shapes |= {"embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    if block.draft_vocab_size is not None and not block.shares_head:
        shapes["lm_head.weight"] = (draft_vocab, hidden)
    return shapes


def _head_shapes(block: TinyBlock, hidden: int, vocab: int, draft_vocab: int) -> dict[str, tuple[int, ...]]:
    markov: dict[str, tuple[int, ...]] = {
        "markov_head.markov_w1.weight": (vocab, block.rank),
        "markov_head.markov_w2.weight": (draft_vocab, block.rank),
    }
    if block.form == "gated":
        markov |= _product("markov_head.gate_proj", RANK, hidden + RANK)
    if block.form == "rnn":
        markov |= _product("markov_head.joint_proj", 3 * RANK, 2 * RANK + hidden)
    lattice: dict[str, tuple[int, ...]] = {
        **_product("token_proj", 24, hidden),
        **_product("pass_hidden_proj", 24, hidden),
        **_product("context_proj", 24, hidden),
        "feature_norm.weight": (5,),
        "feature_norm.bias": (5,),
        **_product("feature_mlp.up_proj", 24, 5),
        **_product("feature_mlp.down_proj", 24, 24),
        "slot_embedding": (1, 1, block.block_size - 1, 1, 24),
        "rank_embedding": (1, 1, 1, 4, 24),
        "relative_slot_bias": (2, 2 * block.block_size - 1),
        "same_slot_bias": (2,),
        "output_norm.weight": (24,),
        "anchor_norm.weight": (24,),
        **_product("factor_input_proj", 24, 72),
        **_product("out_head", 8, 24),
        **_product("in_head", 8, 24),
        **_product("anchor_out_head", 8, 24),
    }
    for index in range(2):
        lattice |= {
            f"layers.{index}.attn_norm.weight": (24,),
            f"layers.{index}.attn.in_proj_weight": (72, 24),
            f"layers.{index}.attn.in_proj_bias": (72,),
            **_product(f"layers.{index}.attn.out_proj", 24, 24),
            f"layers.{index}.mlp_norm.weight": (24,),
            **_product(f"layers.{index}.mlp.up_proj", 48, 24),
            **_product(f"layers.{index}.mlp.down_proj", 24, 48),
        }
    of_head: dict[str, dict[str, tuple[int, ...]]] = {
        "none": {},
        "markov": markov,
        "gru": {
            "prefix_gru.weight_ih_l0": (30, hidden),
            "prefix_gru.weight_hh_l0": (30, 10),
            "embed_proj.0.weight": (RANK, hidden + 10),
            "embed_proj.2.weight": (draft_vocab, RANK),
        },
        "selector": {
            "candidate_selector.predecessor_codebook": (vocab, RANK),
            "candidate_selector.successor_codebook": (vocab, RANK),
            "candidate_selector.hidden_projection.weight": (RANK, hidden),
        },
        "lattice": {f"lilicorr.{name}": shape for name, shape in lattice.items()},
    }
    return of_head[block.head]


def _product(name: str, out_size: int, in_size: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out_size, in_size), f"{name}.bias": (out_size,)}
