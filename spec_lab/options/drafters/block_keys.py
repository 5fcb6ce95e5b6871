"""The keys of drafter=dflash, and the presets of its parts: dspark, domino, dflash2, lilicorr.

A block drafter consists of a body, a reading of its slots, and a head. A preset is only a choice of these parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spec_lab.menu.bounds import default_of
from spec_lab.menu.choices import Choice, Weights
from spec_lab.menu.config import RunConfig, TrainedDrafterConfig, TreeConfig, knob

BLOCK_SIZE = 8


class Head(Choice):
    """The heads that relate the slots of a block."""

    none = "none", "slots are independent"
    markov = "markov", "a bias from the token before, as in DSpark"
    gru = "gru", "a GRU over the block so far, as in Domino"
    selector = "selector", "scores the likeliest tokens after the token before, as in DFlash2"
    lattice = "lattice", "a transformer over the likeliest tokens of all slots, as in LiLiCorr"


class RowReading(Choice):
    """The readings of a block's rows."""

    mask_first = (
        "mask_first",
        "a row predicts the token at its own position, so there are block_size - 1 drafts, as in DFlash",
    )
    anchor_first = (
        "anchor_first",
        "a row predicts the next token, so there are block_size drafts, one fewer with drafter.head=gru, as in DSpark",
    )


class Form(Choice):
    """The ways in which a Markov head reads the token before."""

    vanilla = "vanilla"
    gated = "gated", "by a gate of the hidden row"
    rnn = "rnn", "into a state that it carries"


@dataclass
class BlockDrafterConfig(TrainedDrafterConfig):
    """drafter=dflash: a block of mask tokens in one pass over the target's hidden states."""

    name: str = "dflash"
    weights: Weights = knob(Weights.checkpoint, "where the weights come from")
    head: Head = knob(Head.none, "the head that relates the slots of a block")
    slots: RowReading = knob(RowReading.mask_first, "which row of a block predicts which token")
    conv: bool = knob(False, "convolutions within a block, around both halves of every layer")
    window: int | None = knob(
        None, "newest context rows that a block sees; null is the checkpoint's window, or all", least=1
    )
    confidence: bool = knob(False, "a separate head estimates confidence, for drafter.stop and verify.budget")
    block_size: int | None = knob(None, "rows of a block of random weights; null is 8", least=2, most=64)
    num_layers: int | None = knob(None, "layers of a body of random weights; null is 2", least=1, most=64)
    head_rank: int | None = knob(None, "width of the factors of a head of random weights; null is 256", least=1)
    head_topk: int | None = knob(
        None, "tokens that a head of random weights scores in a slot; null is 16", least=1, most=256
    )
    markov_form: Form = knob(Form.vanilla, "how a Markov head reads the token before")


@dataclass
class DsparkDrafterConfig(BlockDrafterConfig):
    """drafter=dspark: a Markov head, a draft in every row, and a head for confidence."""

    name: str = "dspark"
    head: Head = Head.markov
    slots: RowReading = RowReading.anchor_first
    confidence: bool = True


@dataclass
class DominoDrafterConfig(BlockDrafterConfig):
    """drafter=domino: a GRU over the drafts so far."""

    name: str = "domino"
    head: Head = Head.gru


@dataclass
class Dflash2DrafterConfig(BlockDrafterConfig):
    """drafter=dflash2: a selector, and convolutions in the body."""

    name: str = "dflash2"
    head: Head = Head.selector
    conv: bool = True


@dataclass
class LilicorrDrafterConfig(BlockDrafterConfig):
    """drafter=lilicorr: a transformer over the candidates of all slots."""

    name: str = "lilicorr"
    head: Head = Head.lattice


READ_WITH: Mapping[str, tuple[Head, ...]] = {
    "markov_form": (Head.markov,),
    "head_rank": (Head.markov, Head.gru, Head.selector, Head.lattice),
    "head_topk": (Head.selector, Head.lattice),
}
"""Keys of a head's parts, with the heads that have this part."""


def head_has_part(options: Any) -> str | None:
    """Refuse a key for a part that the chosen head does not have, in runs and trainings."""
    usual = {field.name: default_of(field) for field in dataclasses.fields(options)}
    for name, heads in READ_WITH.items():
        value = getattr(options, name)
        if value != usual[name] and options.head not in heads:
            return (
                f"drafter.{name}={value} is read only with drafter.head={'|'.join(heads)}, but drafter.head="
                f"{options.head}; leave it out"
            )
    return None


def fewer_drafts(config: RunConfig, most: int) -> str:
    """Return the remedy, for a run whose blocks hold `most` drafts: how to draft that many."""
    return f"drafter.num_draft_tokens={most}" if config.tree.name == TreeConfig.name else f"a tree of depth {most}"


PRESETS: Mapping[str, type[BlockDrafterConfig]] = {
    "dflash": BlockDrafterConfig,
    "dspark": DsparkDrafterConfig,
    "domino": DominoDrafterConfig,
    "dflash2": Dflash2DrafterConfig,
    "lilicorr": LilicorrDrafterConfig,
}
