"""The schemas of `drafter=` in a training, for block drafters: dflash and its presets. It does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from spec_lab.checkpoints.block_config import SlotReading, Slots
from spec_lab.checkpoints.block_heads import HeadKind
from spec_lab.menu.choices import Choice
from spec_lab.menu.config import knob
from spec_lab.options.drafters.block_keys import (
    Dflash2DrafterConfig,
    DominoDrafterConfig,
    DsparkDrafterConfig,
    Form,
    Head,
    LilicorrDrafterConfig,
    RowReading,
)
from spec_lab.train.drafter_config import PackedTrainingConfig


class SlotWeights(Choice):
    """The weight of a slot's loss; j is 1 for the first draft of a block, g is drafter.slot_decay."""

    exp = "exp", "e^(-(j - 1) / g)"
    dspark = "dspark", "e^(-j / g), which differs from exp only with drafter.normalise_by=slots"
    dpace = "dpace", "the expected number of slots from j on that are accepted"


class Normaliser(Choice):
    """The divisors of the weighted losses of a step."""

    weights = "weights", "the sum of the slots' weights"
    slots = "slots", "the number of slots, so that weights change the size of a step"


@dataclass
class SlotTrainingConfig(PackedTrainingConfig):
    """The keys of a drafter that drafts all slots of a block in one pass."""

    slot_weights: SlotWeights = knob(SlotWeights.exp, "weight of each slot of a block in the loss")
    slot_decay: float = knob(4.0, "slots over which weights fall to 1 / e", above=0, most=1000)
    normalise_by: Normaliser = knob(Normaliser.weights, "divisor of a step's losses")
    num_anchors: int = knob(64, "number of blocks in each row of texts", least=1, most=2**14)
    mask_token_id: int | None = knob(
        None, "token of the mask rows; null is the one that the target writes least", least=0
    )
    draft_vocab_size: int | None = knob(
        None, "number of tokens that can be drafted, those the target writes most; null is all", least=2
    )
    num_layers: int = knob(2, "layers of the body", least=1, most=64)

    @property
    def alone_weight(self) -> float:
        """The weight of a second loss, which compares the logits before the head changes them; 0 for none."""
        return 0.0


@dataclass
class PEagleTrainingConfig(SlotTrainingConfig):
    """drafter=p_eagle: an EAGLE-3 head with mask rows after the pending token, which predict drafts."""

    name: str = "p_eagle"
    num_drafts: int = knob(7, "drafts of a round; mask rows make all but the first", least=2, most=64)

    @property
    def num_trained_drafts(self) -> int:
        return self.num_drafts

    @property
    def makes_drafts(self) -> str:
        """Return the override that sets the number of drafts."""
        return f"drafter.num_drafts={self.num_drafts}"


@dataclass
class BlockTrainingConfig(SlotTrainingConfig):
    """drafter=dflash: a body, a choice of slots, and a head that turns them into drafts."""

    name: str = "dflash"
    head: Head = knob(Head.none, "the head that relates the slots of a block")
    slots: RowReading = knob(RowReading.mask_first, "which row of a block predicts which token")
    conv: bool = knob(False, "convolutions within a block, around both halves of every layer")
    confidence: bool = knob(False, "a separate head learns how likely a draft is to be accepted")
    markov_form: Form = knob(Form.vanilla, "how a Markov head reads the token before")
    head_rank: int = knob(64, "width of the head's factors", least=1, most=4096)
    head_topk: int = knob(8, "number of tokens that a selector or a lattice scores in a slot", least=1, most=4096)
    block_size: int = knob(8, "rows of a block", least=2, most=64)
    alone_loss: float = knob(
        0.0, "weight of a second loss, on the logits before the head changes them", least=0, most=100
    )
    body: str | None = knob(None, "folder of a trained drafter whose body and sizes this one starts from")

    @property
    def num_trained_drafts(self) -> int:
        return SlotReading.of(Slots(self.slots.value), self.block_size, HeadKind(self.head.value)).most_drafts

    @property
    def drafter_words(self) -> tuple[str, ...]:
        parts = {name: getattr(self, name) for name in ("head", "slots", "conv", "confidence", "markov_form")}
        return tuple(f"drafter.{name}={str(value).lower()}" for name, value in parts.items())

    @property
    def makes_drafts(self) -> str:
        """Return the override that sets the number of drafts."""
        return f"drafter.block_size={self.block_size}"

    @property
    def alone_weight(self) -> float:
        return self.alone_loss


@dataclass
class DsparkTrainingConfig(BlockTrainingConfig):
    """drafter=dspark: a Markov head, a draft in every row, and a head for confidence."""

    name: str = "dspark"
    head: Head = DsparkDrafterConfig.head
    slots: RowReading = DsparkDrafterConfig.slots
    confidence: bool = DsparkDrafterConfig.confidence


@dataclass
class DominoTrainingConfig(BlockTrainingConfig):
    """drafter=domino: a GRU over the drafts so far."""

    name: str = "domino"
    head: Head = DominoDrafterConfig.head
    alone_loss: float = 0.3


@dataclass
class Dflash2TrainingConfig(BlockTrainingConfig):
    """drafter=dflash2: a selector, and convolutions in the body."""

    name: str = "dflash2"
    head: Head = Dflash2DrafterConfig.head
    conv: bool = Dflash2DrafterConfig.conv
    alone_loss: float = 1.0


@dataclass
class LilicorrTrainingConfig(BlockTrainingConfig):
    """drafter=lilicorr: a transformer over the candidates of all slots."""

    name: str = "lilicorr"
    head: Head = LilicorrDrafterConfig.head
    alone_loss: float = 1.0
