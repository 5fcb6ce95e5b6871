"""A block drafter as data: a body, a reading of its slots, and a head. Imports no torch.

DFlash (arXiv 2602.06036) has a body of plain layers whose context consists of the target's tapped hidden states. Its
successors differ in the head, the reading of slots, the causality or the convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.checkpoints.taps import Tap
from spec_lab.checkpoints.tensor_shapes import Shapes, below, norms, weights


class HeadKind(StrEnum):
    """The kind of head that relates the slots of a block: a value of `drafter.head`."""

    none = "none"
    markov = "markov"
    gru = "gru"
    selector = "selector"
    lattice = "lattice"


class MarkovForm(StrEnum):
    """The ways in which a Markov head computes its bias from the token before."""

    vanilla = "vanilla"
    gated = "gated"
    rnn = "rnn"


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
    keys: ClassVar[Mapping[str, str]] = {"num_taps": "conv_kernel_size", "group_size": "conv_group_size"}


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """The sizes of a head that relates the slots of a block. This one is none: slots are independent (DFlash).

    Names of tensors are those of the head's own checkpoints. `keys` has the key of each size in config.json.
    """

    kind: ClassVar[HeadKind] = HeadKind.none
    architecture: ClassVar[str] = "DFlashDraftModel"
    keys: ClassVar[Mapping[str, str]] = {}

    def tensor_shapes(self, block: BlockConfig) -> Shapes:
        """Return the names and shapes of its tensors."""
        return {}


@dataclass(frozen=True, slots=True)
class MarkovSizes(HeadSizes):
    """A low-rank bias of the logits, from the token before (DSpark, arXiv 2607.05147)."""

    rank: int = 256
    form: MarkovForm = MarkovForm.vanilla
    kind: ClassVar[HeadKind] = HeadKind.markov
    architecture: ClassVar[str] = "DSparkDraftModel"
    keys: ClassVar[Mapping[str, str]] = {"rank": "markov_rank", "form": "markov_head_type"}

    def tensor_shapes(self, block: BlockConfig) -> Shapes:
        rank, hidden = self.rank, block.body.hidden_size
        gates = {
            MarkovForm.vanilla: {},
            MarkovForm.gated: {"gate_proj": (rank, hidden + rank)},
            MarkovForm.rnn: {"joint_proj": (3 * rank, 2 * rank + hidden)},
        }[self.form]
        tables = {"markov_w1": (block.body.vocab_size, rank), "markov_w2": (block.draft_vocab_size, rank)}
        return below("markov_head", weights(tables | gates, gates))


@dataclass(frozen=True, slots=True)
class GruSizes(HeadSizes):
    """A correction of the logits from draft 2 on, by a GRU over the tokens before (Domino, arXiv 2605.29707).

    Attributes:
        state_size: state size of the GRU.
        rank: width between hidden rows and logits.
    """

    state_size: int = 1024
    rank: int = 256
    kind: ClassVar[HeadKind] = HeadKind.gru
    keys: ClassVar[Mapping[str, str]] = {"state_size": "gru_hidden_dim", "rank": "emb_dim"}

    def tensor_shapes(self, block: BlockConfig) -> Shapes:
        state, hidden = self.state_size, block.body.hidden_size
        return {
            "prefix_gru.weight_ih_l0": (3 * state, hidden),
            "prefix_gru.weight_hh_l0": (3 * state, state),
            "embed_proj.0.weight": (self.rank, hidden + state),
            "embed_proj.2.weight": (block.draft_vocab_size, self.rank),
        }


@dataclass(frozen=True, slots=True)
class SelectorSizes(HeadSizes):
    """A choice among the likeliest tokens of each slot, by how well each follows the token before (DFlash2, z-lab)."""

    rank: int = 256
    topk: int = 16
    kind: ClassVar[HeadKind] = HeadKind.selector
    architecture: ClassVar[str] = "DFlash2DraftModel"
    keys: ClassVar[Mapping[str, str]] = {"rank": "selector_rank", "topk": "selector_top_k"}

    def tensor_shapes(self, block: BlockConfig) -> Shapes:
        return {
            "candidate_selector.predecessor_codebook": (block.body.vocab_size, self.rank),
            "candidate_selector.successor_codebook": (block.body.vocab_size, self.rank),
            "candidate_selector.hidden_projection.weight": (self.rank, block.body.hidden_size),
        }


@dataclass(frozen=True, slots=True)
class LatticeSizes(HeadSizes):
    """A transformer over the likeliest tokens of all slots, which scores every pair of neighbours (LiLiCorr,
    arXiv 2608.20530).

    Attributes:
        hidden_size: hidden size of the transformer.
        factor_size: size of the vectors whose dot product scores a pair.
        vector_eps: lower bound of the lengths by which these vectors are divided.
        logit_scale: factor of the dot products.
    """

    topk: int = 16
    hidden_size: int = 512
    num_layers: int = 2
    num_heads: int = 8
    mlp_ratio: float = 4.0
    factor_size: int = 256
    vector_eps: float = 1e-6
    logit_scale: float = 10.0
    kind: ClassVar[HeadKind] = HeadKind.lattice
    architecture: ClassVar[str] = "LiLiCorrDraftModel"
    keys: ClassVar[Mapping[str, str]] = {
        "topk": "lilicorr_candidate_topk",
        "hidden_size": "lilicorr_hidden_size",
        "num_layers": "lilicorr_num_layers",
        "num_heads": "lilicorr_num_heads",
        "mlp_ratio": "lilicorr_mlp_ratio",
        "factor_size": "lilicorr_factor_dim",
        "vector_eps": "lilicorr_vector_eps",
        "logit_scale": "lilicorr_logit_scale",
    }

    def tensor_shapes(self, block: BlockConfig) -> Shapes:
        hidden, inner, outer = self.hidden_size, int(self.hidden_size * self.mlp_ratio), block.body.hidden_size
        inputs = {
            "token_proj": (hidden, outer),
            "pass_hidden_proj": (hidden, outer),
            "context_proj": (hidden, outer),
            "feature_norm": (5,),
            "feature_mlp.up_proj": (hidden, 5),
            "feature_mlp.down_proj": (hidden, hidden),
        }
        if hidden == outer:
            del inputs["token_proj"]
        layer = {"attn.out_proj": (hidden, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
        outputs = {
            "factor_input_proj": (hidden, 3 * hidden),
            "out_head": (self.factor_size, hidden),
            "in_head": (self.factor_size, hidden),
            "anchor_out_head": (self.factor_size, hidden),
        }
        shapes = weights(inputs, inputs) | {
            "slot_embedding": (1, 1, block.slots.most_drafts, 1, hidden),
            "rank_embedding": (1, 1, 1, self.topk, hidden),
            "relative_slot_bias": (self.num_heads, 2 * block.block_size - 1),
            "same_slot_bias": (self.num_heads,),
        }
        attention = {"attn.in_proj_weight": (3 * hidden, hidden), "attn.in_proj_bias": (3 * hidden,)}
        of_layer = attention | weights(layer, layer) | norms(hidden, "attn_norm", "mlp_norm")
        for index in range(self.num_layers):
            shapes |= below(f"layers.{index}", of_layer)
        shapes |= weights(outputs, outputs) | norms(hidden, "output_norm", "anchor_norm")
        return below("lilicorr", shapes)


HEADS: tuple[type[HeadSizes], ...] = (LatticeSizes, GruSizes, SelectorSizes, MarkovSizes, HeadSizes)
"""A file has the first of them whose first key is there and not 0."""


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
