"""The plan of a decoder layer: everything in which two layers of one model may differ. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spec_lab.checkpoints.delta_sizes import DeltaNetSizes
from spec_lab.checkpoints.expert_sizes import ExpertSizes
from spec_lab.checkpoints.latent_sizes import LatentSizes

RopeScaling = Literal["none", "linear", "dynamic", "llama3", "proportional", "yarn", "longrope"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of a layer.

    Attributes:
        low_freq_factor: used by `llama3` only, as is `high_freq_factor`.
        original_max_position_embeddings: not used by `none`, `linear` and `proportional`.
        partial_rotary_factor: fraction of a head's channels that are rotated, the first ones. With `proportional`
            (Gemma 4) it is the fraction of the whole head's channel pairs, also the first ones.
        beta_fast: frequencies with at least this many turns within the original positions are kept; `yarn` only.
        beta_slow: frequencies with at most this many turns there are divided by `factor`; `yarn` only.
        whole_channels: whether the two borders of `yarn` between kept, blended and divided frequencies are rounded to
            whole channel pairs.
        amplitude: factor of cosines and sines.
        short_divisors: the divisor of each frequency in a table of at most the original positions; `longrope` only.
        long_divisors: those in a longer table.
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
    short_divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One layer: grouped-query attention over paged keys and values, then a gated MLP or experts.

    Attributes:
        window: most keys that a query sees, including its own; None is full attention.
        attention_gate: whether q_proj has twice as many rows: for each head those of its query, then those of its
            output gate (Qwen3-Next).
        delta_net: the gated delta net, which replaces attention and keeps a state; the fields of attention are then
            unused. None for a layer with attention.
        experts: experts that replace the MLP, so that `intermediate_size` and `mlp_bias` are unused, or that are added
            to it (Gemma 4). None for an MLP without experts.
        kv_owner: the layer whose keys and values this layer reads instead of writing its own; None if it writes them.
        float32_norms: whether norms multiply by their weight in float32 and round once (Qwen3.5), rather than round
            both before and after it.
        sinks: whether each head has a learned score of one more key, without a value (gpt-oss).
        latent: latent attention, which replaces grouped-query attention. `num_kv_heads` is then 1, and `head_dim` is
            the number of rotated channels. None for grouped-query attention.
        wide_qk_norm: whether the norm of queries, and that of keys, is over all heads of a row together (MiniMax-M2).
        norms_outputs: whether the outputs of attention and MLP are normed rather than their inputs (OLMo 3).
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
    sinks: bool = False
    wide_qk_norm: bool = False
    norms_outputs: bool = False

    @property
    def is_plain(self) -> bool:
        """Return whether this is a layer as in Llama and Qwen: attention that writes its own KV, and an MLP."""
        others = self.delta_net, self.experts, self.latent, self.kv_owner
        is_other = self.attention_gate or self.sinks or self.wide_qk_norm or self.norms_outputs
        return all(part is None for part in others) and not is_other
