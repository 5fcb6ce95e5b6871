"""A block drafter as data: a body, a reading of its slots, and a head. Imports no torch.

DFlash (arXiv 2602.06036) is a body of plain layers whose context are the target's tapped hidden states. Its successors
differ in one part each.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from spec_lab.checkpoints.block_heads import BodySizes, HeadKind, HeadSizes
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.checkpoints.taps import Tap


class Slots(StrEnum):
    """Which row of a block predicts which token."""

    mask_first = "mask_first"
    anchor_first = "anchor_first"


class Causality(StrEnum):
    """The layers in which a row of a block sees no row behind it."""

    none = "none"
    windows = "windows"
    all = "all"


@dataclass(frozen=True, slots=True)
class SlotReading:
    """Which rows of a block hold drafts: row `first_row` holds draft 1, the next one draft 2, and so on.

    Attributes:
        first_row: 1 where a row predicts the token at its own position, so that the pending token's row holds no
            draft (DFlash); 0 where it predicts the token behind it (DSpark).
        most_drafts: rows that were trained to hold one.
    """

    first_row: int
    most_drafts: int

    @property
    def name(self) -> Slots:
        return Slots.mask_first if self.first_row else Slots.anchor_first

    @classmethod
    def of(cls, slots: Slots, block_size: int, head: HeadKind = HeadKind.none) -> SlotReading:
        """Return the reading of a whole block. Domino leaves the last row out where the pending token's has a draft."""
        first_row = 1 if slots == Slots.mask_first else 0
        return cls(first_row, block_size - (1 if head == HeadKind.gru else first_row))


@dataclass(frozen=True, slots=True)
class ConvSizes:
    """The causal convolutions within a block that stand around both halves of a layer (DFlash2).

    Attributes:
        num_taps: rows that one reads, its own included.
        group_size: neighbouring channels that share the part of the kernel that rows make themselves.
    """

    num_taps: int = 2
    group_size: int = 16


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """A block drafter.

    Attributes:
        body: the decoder that the body is, with its windows; embedding and head are the target's where the tensors have
            none.
        taps: the hidden states of the target that make the context, in the order in which `fc` reads them.
        mask_token_id: the token that stands in every row of a block behind the pending one.
        draft_vocab_size: tokens that can be drafted.
        causality: in which layers a row of a block sees no row behind it: none, those with a window, or all (JetSpec).
        conv: None where layers have no convolutions.
        confidence_reads: width of what the confidence head reads; 0 where there is none. What it has beside the hidden
            row is the Markov head's embedding of the token before.
    """

    body: ModelConfig
    block_size: int
    slots: SlotReading
    taps: tuple[Tap, ...]
    target_hidden_size: int
    mask_token_id: int
    head: HeadSizes
    draft_vocab_size: int
    causality: Causality = Causality.none
    conv: ConvSizes | None = None
    confidence_reads: int = 0

    def is_causal(self, plan: LayerPlan) -> bool:
        """Tell whether rows of a block see no row behind them in this layer of the body."""
        with_window = self.causality == Causality.windows and plan.window is not None
        return with_window or self.causality == Causality.all

    @property
    def sizes(self) -> BodySizes:
        """What the head knows of the body."""
        body = self.body
        sizes = body.hidden_size, body.vocab_size, self.draft_vocab_size
        return BodySizes(*sizes, self.block_size, self.slots.most_drafts)


def default_taps(num_target_layers: int, num_layers: int) -> tuple[Tap, ...]:
    """Return the taps of a body of so many layers where nobody names them: as many, evenly from layer 1 to L - 3."""
    if num_layers == 1:
        return (Tap(num_target_layers // 2),)
    last = num_target_layers - 3
    outputs = {round(1 + (last - 1) * index / (num_layers - 1)) for index in range(num_layers)}
    return tuple(Tap(output) for output in sorted(outputs) if 0 <= output < num_target_layers - 1)


def no_place(layout: str, head: HeadKind, slots: Slots, has_conv: bool, is_cut: bool) -> str | None:
    """Name the knob of a part that another project's layout has no place for; None where it has one for all.

    `is_cut`: fewer tokens than the target's can be drafted.
    """
    lacking = {
        "speculators": {"head": head not in (HeadKind.none, HeadKind.markov, HeadKind.selector)},
        "deepspec": {
            "head": head not in (HeadKind.none, HeadKind.markov),
            "slots": slots != Slots.anchor_first,
            "conv": has_conv,
            "draft_vocab_size": is_cut,
        },
    }
    return next((knob for knob, is_lacking in lacking.get(layout, {}).items() if is_lacking), None)
