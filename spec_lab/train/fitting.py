"""Checks whether the settings of a target fit one another, and those of a drafter its target.

Each check returns None, or one line with the knob and the remedy. Its docstring says what must hold. The options of
targets and drafters (`spec_lab.train.options`) list the checks that apply to them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from spec_lab.options.drafters.block_keys import READ_WITH, head_has_part
from spec_lab.options.shipped import missing_folder
from spec_lab.train.block_config import SlotWeights
from spec_lab.train.config import TrainConfig
from spec_lab.train.module_config import LayerConfig

MIN_TAPPED_LAYERS = 7
"""The fewest layers L for which layers 2, L // 2 and L - 3 ascend."""
SHALLOW = "choose another drafter, such as drafter=draft_model"


@dataclass(frozen=True, slots=True)
class TargetSizes:
    """The sizes of the target, which a drafter's must fit.

    Attributes:
        layer: the sizes that a drafter's layer may inherit.
        kv_layers: the layers of an existing target whose keys an assistant can read; None for all.
    """

    hidden_size: int
    num_layers: int
    num_kv_heads: int
    vocab_size: int
    layer: LayerConfig = field(default_factory=LayerConfig)
    kv_layers: tuple[int, ...] | None = None


def filled(drafter: Any, target: TargetSizes) -> Any:
    """Return the `drafter` part with nulls replaced by the sizes of the target's layer.

    If `kv_layers` is given, an assistant that names no layers gets up to three of these, from their middle on.
    """
    sizes, readable = asdict(target.layer), target.kv_layers
    if readable and getattr(drafter, "kv_source_layers", None) == []:
        picked = (len(readable) // 2, len(readable) * 3 // 4, len(readable) - 1)
        drafter = replace(drafter, kv_source_layers=sorted({readable[place] for place in picked}))
    return replace(drafter, **{name: size for name, size in sizes.items() if getattr(drafter, name, 0) is None})


@dataclass(frozen=True, slots=True)
class Fitting:
    """The configuration of a training, its `drafter` part after `filled`, and the sizes of the target."""

    config: TrainConfig
    drafter: Any
    target: TargetSizes


def heads_fit(prefix: str, part: LayerConfig) -> str | None:
    """Query heads divide evenly among key-value heads, and the head size is even, since RoPE rotates pairs."""
    if part.num_heads % part.num_kv_heads:
        return (
            f"{prefix}.num_heads={part.num_heads} must be a multiple of {prefix}.num_kv_heads={part.num_kv_heads}; "
            f"use {prefix}.num_heads={next_multiple(part.num_heads, part.num_kv_heads)}"
        )
    return even(f"{prefix}.head_dim", part.head_dim)


def even(knob: str, size: int) -> str | None:
    """Refuse an odd number of channels, since RoPE rotates pairs."""
    return f"{knob}={size} must be even; use {knob}={size + 1}" if size % 2 else None


def next_multiple(number: int, divisor: int) -> int:
    """Return the smallest multiple of `divisor` that is at least `number`."""
    return -(-number // divisor) * divisor


def heads(fitting: Fitting) -> str | None:
    """Apply `heads_fit` to the drafter."""
    return heads_fit("drafter", fitting.drafter)


def taps(fitting: Fitting) -> str | None:
    """The target has enough layers: EAGLE-3 and P-EAGLE heads read three different ones."""
    num_layers = fitting.target.num_layers
    if num_layers >= MIN_TAPPED_LAYERS:
        return None
    return (
        f"drafter={fitting.drafter.name} needs a target of {MIN_TAPPED_LAYERS} layers or more, and it has "
        f"{num_layers}; {SHALLOW}"
    )


def decay_is_read(fitting: Fitting) -> str | None:
    """A decay that no loss uses keeps its default. A confidence head's loss also uses drafter.slot_decay."""
    drafter = fitting.drafter
    by_slot = getattr(drafter, "confidence", False) is False and getattr(drafter, "slot_weights", None)
    for knob, reader, idle in (
        ("step_loss_decay", "num_unrolled_steps", getattr(drafter, "num_unrolled_steps", None) == 1),
        ("slot_decay", "slot_weights", by_slot == SlotWeights.dpace),
    ):
        if idle and (value := getattr(drafter, knob)) != getattr(type(drafter), knob):
            return (
                f"drafter.{knob}={value:g} is not read with drafter.{reader}={getattr(drafter, reader)}; leave it out"
            )
    return None


def draft_vocabulary(fitting: Fitting) -> str | None:
    """No more tokens can be drafted than the target has."""
    size, vocab_size = fitting.drafter.draft_vocab_size, fitting.target.vocab_size
    if size <= vocab_size:
        return None
    return (
        f"drafter.draft_vocab_size={size} is more than the target's {vocab_size}; "
        f"use drafter.draft_vocab_size={vocab_size}"
    )


def drafts_fit(fitting: Fitting) -> str | None:
    """No more drafts are measured than the drafter learns to make at once."""
    wanted, most = fitting.config.evaluation.num_draft_tokens, fitting.drafter.num_trained_drafts
    if wanted <= most:
        return None
    return (
        f"evaluation.num_draft_tokens={wanted} is more than the {most} drafts of {fitting.drafter.makes_drafts}; "
        f"use evaluation.num_draft_tokens={most}"
    )


def tokens_fit(fitting: Fitting) -> str | None:
    """The tokens that a drafter names exist in the target."""
    drafter, vocab_size = fitting.drafter, fitting.target.vocab_size
    for knob, largest in (("mask_token_id", vocab_size - 1), ("draft_vocab_size", vocab_size)):
        value = getattr(drafter, knob)
        if value is not None and value > largest:
            return f"drafter.{knob}={value} does not fit the target's {vocab_size} tokens; use drafter.{knob}={largest}"
    return None


def candidates_fit(fitting: Fitting) -> str | None:
    """A head that scores the likeliest tokens of a slot scores no more than can be drafted."""
    drafter = fitting.drafter
    size, topk = drafter.draft_vocab_size, drafter.head_topk
    if size is None or drafter.head not in READ_WITH["head_topk"] or topk <= size:
        return None
    return (
        f"drafter.head_topk={topk} is more than the tokens of drafter.draft_vocab_size={size}; "
        f"use drafter.head_topk={size}"
    )


def body_serves(fitting: Fitting) -> str | None:
    """The drafter whose body this one starts from exists, and has the requested sizes. Its mask token is used."""
    drafter = fitting.drafter
    if drafter.body is None:
        return None
    if (missing := missing_folder("drafter.body", drafter.body)) is not None:
        return missing
    from spec_lab.checkpoints.block_layouts import read_block_file  # torch from here on

    file = read_block_file(Path(drafter.body), "drafter.body")
    vocab_size = fitting.target.vocab_size
    found = {
        "block_size": (drafter.block_size, file.fields.integer("block_size")),
        "num_layers": (drafter.num_layers, int(file.decoder["num_hidden_layers"])),
        "draft_vocab_size": (
            drafter.draft_vocab_size or vocab_size,
            file.fields.integer("draft_vocab_size", vocab_size),
        ),
    }
    for knob, (given, size) in found.items():
        if given != size:
            return f"drafter.{knob}={given}: the body in drafter.body has {size}; use drafter.{knob}={size}"
    if drafter.mask_token_id is not None:
        return f"drafter.mask_token_id={drafter.mask_token_id}: the one of drafter.body is used; leave it out"
    return None


def parts_are_read(fitting: Fitting) -> str | None:
    """Keys of parts that the head lacks keep their defaults."""
    return head_has_part(fitting.drafter)


def width(fitting: Fitting) -> str | None:
    """The drafter is no wider than the target. Its embedding starts as the target's, projected to the drafter's
    width."""
    hidden_size, most = fitting.drafter.hidden_size, fitting.target.hidden_size
    return (
        None
        if hidden_size <= most
        else f"drafter.hidden_size={hidden_size} is wider than the target's {most}; use drafter.hidden_size={most}"
    )


def assistant_heads(fitting: Fitting) -> str | None:
    """Query heads of an assistant share the key-value heads of its target."""
    num_heads, num_kv_heads = fitting.drafter.num_heads, fitting.target.num_kv_heads
    if num_heads % num_kv_heads == 0:
        return None
    return (
        f"drafter.num_heads={num_heads} must be a multiple of the target's {num_kv_heads} key-value heads; "
        f"use drafter.num_heads={next_multiple(num_heads, num_kv_heads)}"
    )


def kv_sources(fitting: Fitting) -> str | None:
    """An assistant's layers read existing layers of the target, and its query heads divide evenly among their KV
    heads. It needs the target's keys, which `packing.kept_gigabytes` does not keep."""
    drafter, target = fitting.drafter, fitting.target
    if target.kv_layers == ():
        return "drafter=frozen_kv: the target has no layer whose keys an assistant can read; use drafter=eagle3"
    if target.kv_layers is not None and not {*drafter.kv_source_layers} <= {*target.kv_layers}:
        return (
            f"drafter.kv_source_layers={drafter.kv_source_layers} must name layers whose keys an assistant can read: "
            f"{list(target.kv_layers)}; use drafter.kv_source_layers=[]"
        )
    if fitting.config.packing.kept_gigabytes:
        return "packing.kept_gigabytes keeps no keys, which drafter=frozen_kv reads; leave it out"
    if not drafter.kv_source_layers or max(drafter.kv_source_layers) >= target.num_layers:
        return (
            f"drafter.kv_source_layers={drafter.kv_source_layers} must name layers of the target, "
            f"0 to {target.num_layers - 1}; use drafter.kv_source_layers=[{target.num_layers - 1}]"
        )
    return assistant_heads(fitting)
