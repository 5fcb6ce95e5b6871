"""A block drafter as data: a body, a reading of its slots, and a head. Imports no torch.

DFlash (arXiv 2602.06036) has a body of plain layers whose context consists of the target's tapped hidden states. Its
successors differ in the head, the reading of slots, the causality or the convolutions.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from spec_lab.checkpoints.block_heads import HeadKind, HeadSizes
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.checkpoints.taps import Tap


class Slots(StrEnum):
    """The conventions about which row of a block predicts which token."""

    mask_first = "mask_first"
    anchor_first = "anchor_first"


class Causality(StrEnum):
    """The layers in which a row of a block sees no later row."""

    none = "none"
    windows = "windows"
    all = "all"


@dataclass(frozen=True, slots=True)
class SlotReading:
    """The rows of a block that hold drafts: row `first_row` holds draft 1, the next one draft 2, and so on.

    Attributes:
        first_row: 1 if a row predicts the token at its own position, so that the pending token's row holds no draft
            (DFlash); 0 if it predicts the next token (DSpark).
        most_drafts: number of rows that were trained to hold a draft.
    """

    first_row: int
    most_drafts: int

    @property
    def name(self) -> Slots:
        return Slots.mask_first if self.first_row else Slots.anchor_first

    @classmethod
    def of(cls, slots: Slots, block_size: int, head: HeadKind = HeadKind.none) -> SlotReading:
        """Return the reading of a whole block. If the pending token's row holds a draft, Domino does not use the last
        row."""
        first_row = 1 if slots == Slots.mask_first else 0
        return cls(first_row, block_size - (1 if head == HeadKind.gru else first_row))


@dataclass(frozen=True, slots=True)
class ConvSizes:
    """The causal convolutions within a block, before and after both halves of a layer (DFlash2).

    Attributes:
        num_taps: number of rows that the convolution reads, including the current one.
        group_size: number of neighbouring channels that share the part of the kernel that is computed from each row.
    """

    num_taps: int = 2
    group_size: int = 16


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """A block drafter.

    Attributes:
        body: the config of the body as a decoder, with its windows; the target's embedding and head are used if the
            tensors have none.
        taps: the hidden states of the target that make the context, in the order in which `fc` reads them.
        mask_token_id: the token in every row of a block after the pending token's row.
        draft_vocab_size: number of tokens that can be drafted.
        causality: the layers in which a row of a block sees no later row: none, those with a window, or all (JetSpec).
        window_moves: whether a window that is not causal is counted from each row, so that row i of a block sees i
            fewer rows of context (z-lab); if false, all rows see the same context (speculators).
        most_context: how many of the newest rows of context a row sees at most, in any layer (`drafter.window`); None
            if only the body's windows limit them.
        conv: None if layers have no convolutions.
        confidence_reads: input width of the confidence head; 0 if there is none. If it is wider than the hidden row,
            the head also reads the Markov head's embedding of the token before.
        embedding_scale: factor of the embeddings that a block starts from.
        logit_scale: factor of the logits; before `logit_softcap`, which bounds their absolute values.
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
    window_moves: bool = False
    most_context: int | None = None
    conv: ConvSizes | None = None
    confidence_reads: int = 0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    def is_causal(self, plan: LayerPlan) -> bool:
        """Return whether rows of a block see no later row in this layer of the body."""
        with_window = self.causality == Causality.windows and plan.window is not None
        return with_window or self.causality == Causality.all

    def window_of(self, plan: LayerPlan) -> int | None:
        """Return how many of the newest rows of context a row sees in this layer of the body; None for all."""
        return min((limit for limit in (plan.window, self.most_context) if limit is not None), default=None)


def default_taps(num_target_layers: int, num_layers: int) -> tuple[Tap, ...]:
    """Return the default taps: as many as the body has layers, evenly spaced from the output of target layer 1 to that
    of layer `num_target_layers` - 3.

    A body of one layer taps the middle of the target. A target with few layers has fewer taps.
    """
    if num_layers == 1:
        return (Tap(num_target_layers // 2),)
    last = num_target_layers - 3
    outputs = {round(1 + (last - 1) * index / (num_layers - 1)) for index in range(num_layers)}
    return tuple(Tap(output) for output in sorted(outputs) if 0 <= output < num_target_layers - 1)


def no_place(layout: str, head: HeadKind, slots: Slots, has_conv: bool, is_cut: bool) -> str | None:
    """Return the knob of a part that another project's layout cannot store; None if it can store all.

    `is_cut`: whether fewer tokens than the target's can be drafted.
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
