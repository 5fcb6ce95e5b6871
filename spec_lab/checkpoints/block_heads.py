"""The sizes of the heads that relate the slots of a block drafter, and the names and shapes of their tensors.

DSpark (arXiv 2607.05147), Domino (2605.29707), DFlash2 (z-lab) and LiLiCorr (2608.20530), each under the names of its
own checkpoints. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from spec_lab.checkpoints.block_config import BlockConfig

Shapes = dict[str, tuple[int, ...]]


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


class HeadSizes(Protocol):
    """The sizes of one kind of head."""

    @property
    def kind(self) -> HeadKind: ...

    @property
    def num_candidates(self) -> int | None:
        """Return how many of a slot's likeliest tokens are scored; None for all."""
        ...

    def tensor_shapes(self, block: BlockConfig) -> Shapes:
        """Return the names and shapes of its tensors."""
        ...


@dataclass(frozen=True, slots=True)
class NoHead:
    """No head, with independent slots: DFlash (arXiv 2602.06036)."""

    kind: ClassVar[HeadKind] = HeadKind.none
    num_candidates: ClassVar[int | None] = None

    def tensor_shapes(self, block: BlockConfig) -> Shapes:
        return {}


@dataclass(frozen=True, slots=True)
class MarkovSizes:
    """A low-rank bias of the logits, from the token before."""

    rank: int = 256
    form: MarkovForm = MarkovForm.vanilla
    kind: ClassVar[HeadKind] = HeadKind.markov
    num_candidates: ClassVar[int | None] = None

    def tensor_shapes(self, block: BlockConfig) -> Shapes:
        rank, hidden = self.rank, block.body.hidden_size
        shapes: Shapes = {
            "markov_head.markov_w1.weight": (block.body.vocab_size, rank),
            "markov_head.markov_w2.weight": (block.draft_vocab_size, rank),
        }
        if self.form == MarkovForm.gated:
            shapes |= linear_shapes("markov_head.gate_proj", rank, hidden + rank)
        if self.form == MarkovForm.rnn:
            shapes |= linear_shapes("markov_head.joint_proj", 3 * rank, 2 * rank + hidden)
        return shapes


@dataclass(frozen=True, slots=True)
class GruSizes:
    """A correction of the logits from draft 2 on, by a GRU over the tokens before.

    Attributes:
        state_size: state size of the GRU.
        rank: width between hidden rows and logits.
    """

    state_size: int = 1024
    rank: int = 256
    kind: ClassVar[HeadKind] = HeadKind.gru
    num_candidates: ClassVar[int | None] = None

    def tensor_shapes(self, block: BlockConfig) -> Shapes:
        state, hidden = self.state_size, block.body.hidden_size
        return {
            "prefix_gru.weight_ih_l0": (3 * state, hidden),
            "prefix_gru.weight_hh_l0": (3 * state, state),
            "embed_proj.0.weight": (self.rank, hidden + state),
            "embed_proj.2.weight": (block.draft_vocab_size, self.rank),
        }


@dataclass(frozen=True, slots=True)
class SelectorSizes:
    """A choice among the likeliest tokens of each slot, by how well each follows the token before."""

    rank: int = 256
    topk: int = 16
    kind: ClassVar[HeadKind] = HeadKind.selector

    @property
    def num_candidates(self) -> int:
        return self.topk

    def tensor_shapes(self, block: BlockConfig) -> Shapes:
        return {
            "candidate_selector.predecessor_codebook": (block.body.vocab_size, self.rank),
            "candidate_selector.successor_codebook": (block.body.vocab_size, self.rank),
            "candidate_selector.hidden_projection.weight": (self.rank, block.body.hidden_size),
        }


@dataclass(frozen=True, slots=True)
class LatticeSizes:
    """A transformer over the likeliest tokens of all slots, which scores every pair of neighbours.

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

    @property
    def num_candidates(self) -> int:
        return self.topk

    def tensor_shapes(self, block: BlockConfig) -> Shapes:
        hidden, inner, factor = self.hidden_size, int(self.hidden_size * self.mlp_ratio), self.factor_size
        shapes: Shapes = {
            **({} if hidden == block.body.hidden_size else linear_shapes("token_proj", hidden, block.body.hidden_size)),
            **linear_shapes("pass_hidden_proj", hidden, block.body.hidden_size),
            **linear_shapes("context_proj", hidden, block.body.hidden_size),
            "feature_norm.weight": (5,),
            "feature_norm.bias": (5,),
            **linear_shapes("feature_mlp.up_proj", hidden, 5),
            **linear_shapes("feature_mlp.down_proj", hidden, hidden),
            "slot_embedding": (1, 1, block.slots.most_drafts, 1, hidden),
            "rank_embedding": (1, 1, 1, self.topk, hidden),
            "relative_slot_bias": (self.num_heads, 2 * block.block_size - 1),
            "same_slot_bias": (self.num_heads,),
        }
        for index in range(self.num_layers):
            layer = f"layers.{index}"
            shapes |= {
                f"{layer}.attn_norm.weight": (hidden,),
                f"{layer}.attn.in_proj_weight": (3 * hidden, hidden),
                f"{layer}.attn.in_proj_bias": (3 * hidden,),
                **linear_shapes(f"{layer}.attn.out_proj", hidden, hidden),
                f"{layer}.mlp_norm.weight": (hidden,),
                **linear_shapes(f"{layer}.mlp.up_proj", inner, hidden),
                **linear_shapes(f"{layer}.mlp.down_proj", hidden, inner),
            }
        shapes |= {
            "output_norm.weight": (hidden,),
            "anchor_norm.weight": (hidden,),
            **linear_shapes("factor_input_proj", hidden, 3 * hidden),
            **linear_shapes("out_head", factor, hidden),
            **linear_shapes("in_head", factor, hidden),
            **linear_shapes("anchor_out_head", factor, hidden),
        }
        return {f"lilicorr.{name}": shape for name, shape in shapes.items()}


def linear_shapes(name: str, out_size: int, in_size: int) -> Shapes:
    """Return the shapes of a product with a bias."""
    return {f"{name}.weight": (out_size, in_size), f"{name}.bias": (out_size,)}
