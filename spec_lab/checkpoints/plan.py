"""The plan of a decoder's layer: everything in which two layers of one model may differ, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spec_lab.checkpoints.delta_sizes import DeltaNetSizes
from spec_lab.checkpoints.expert_sizes import ExpertSizes
from spec_lab.checkpoints.latent_sizes import LatentSizes

RopeScaling = Literal["none", "linear", "llama3", "proportional", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of a layer.

    Attributes:
        low_freq_factor: this and the next two matter for `llama3` only.
        partial_rotary_factor: part of a head's channels that turn, from the first on. With `proportional` (Gemma 4) it
            is the first part of the pairs of the whole head, and the others stand still.
        beta_fast: turns within the original positions from which on channels are kept; these matter for `yarn` only.
        beta_slow: turns within the original positions up to which channels are divided by `factor`.
        whole_channels: the two borders between kept, blended and divided channels are rounded to whole ones.
        amplitude: what cosines and sines are multiplied by.
    """

    theta: float
    scaling: RopeScaling
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    partial_rotary_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    whole_channels: bool = True
    amplitude: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One layer: grouped-query attention over paged keys and values, and behind it a gated MLP or experts.

    Attributes:
        window: keys a query sees, itself included; None is full attention.
        attention_gate: q_proj has doubled rows, of each head the query's and then its output gate's (Qwen3-Next).
        delta_net: what stands in the place of attention and keeps a state; the fields of attention say nothing then.
        experts: what stands in the MLP's place, so that `intermediate_size` and `mlp_bias` say nothing, or beside it
            (Gemma 4).
        kv_owner: the layer whose keys and values this one reads, which then writes none of its own; None is itself.
        float32_norms: norms have float32 weights, and round once, behind these (Qwen3.5); others round before.
        latent: of a layer with latent attention in place of grouped-query attention, which then has one KV head and a
            `head_dim` of rotated channels; None where it has not.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    intermediate_size: int
    window: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_gate: bool = False
    kv_owner: int | None = None
    delta_net: DeltaNetSizes | None = None
    experts: ExpertSizes | None = None
    latent: LatentSizes | None = None
    float32_norms: bool = False

    @property
    def is_plain(self) -> bool:
        """Tell whether it is a layer of Llama and Qwen: attention that writes its own KV, and an MLP."""
        others = self.delta_net, self.experts, self.latent, self.kv_owner
        return all(part is None for part in others) and not self.attention_gate
