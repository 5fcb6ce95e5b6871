"""The plan of a decoder layer: everything in which two layers of one model may differ. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

EXPERTS = "layers of experts"
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
class DeltaNetSizes:
    """The sizes of one gated delta net (Yang et al. 2024, arXiv 2412.06464), as Qwen3-Next and Qwen3.5 have it.

    Attributes:
        num_key_heads: heads of the queries and of the keys; each serves one or more adjacent value heads.
        kernel_size: number of rows that the causal convolution reads, including the current one.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel_size: int

    @property
    def key_size(self) -> int:
        """Return the number of channels of the queries, which is also that of the keys."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Return the number of channels of the values, which is also that of the gate and of the output."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_size(self) -> int:
        """Return the number of channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def projected_sizes(self) -> tuple[int, int, int, int]:
        """Return the output sizes of the first product: convolution input, gate, strengths and time steps."""
        return self.conv_size, self.value_size, self.num_value_heads, self.num_value_heads

    @property
    def history(self) -> int:
        """Return the number of earlier rows that the convolution reads."""
        return self.kernel_size - 1

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Return the shape of the state after one row: a matrix from keys to values for each value head."""
        return self.num_value_heads, self.key_head_dim, self.value_head_dim


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Multi-head latent attention of one layer (MLA; DeepSeek-V2, arXiv 2405.04434).

    The cache holds one row for each token, which all heads share: `kv_lora_rank` latent numbers, and
    `qk_rope_head_dim` numbers of a rotated key. Linear maps compute each head's key and value from the latent numbers.

    Attributes:
        q_lora_rank: width between the two products that make queries from the layer input; None if there is only one
            product.
        qk_nope_head_dim: number of a query's unrotated channels, which are multiplied with the latent part.
        qk_rope_head_dim: number of a query's rotated channels, which are multiplied with the rotated key.
        v_head_dim: number of channels of a head's value.
        interleaved: whether rotated channels are stored as the pairs (0, 1), (2, 3), ...; else as two halves.
        bias: whether the products into `q_lora_rank` and into the cache row, and the output product, have biases.
        mscale: YaRN's correction; attention scores are multiplied by its square.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    interleaved: bool = True
    bias: bool = False
    mscale: float = 1.0

    @property
    def row_width(self) -> int:
        """Return how many numbers the cache holds for a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def query_width(self) -> int:
        """Return the number of channels of a head's query before absorption."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def unfolding_is_cheaper(self, num_queries: int, num_keys: int) -> bool:
        """Return whether computing keys and values of all rows takes fewer multiplications than absorbed queries do.

        Absorbed queries are better for few rows over many keys. For a long prompt's chunk, computing keys and values is
        better. Times on a CPU follow this count (docs/log/moe.md).
        """
        maps = self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim)
        absorbed = num_queries * (num_keys * (self.row_width + self.kv_lora_rank) + maps)
        unfolded = num_keys * (num_queries * (self.query_width + self.v_head_dim) + maps)
        return unfolded < absorbed

    @property
    def scale(self) -> float:
        """Return the factor of the scores, which depends on the width of the query as trained, not on the cache row."""
        return float(self.query_width**-0.5 * self.mscale**2)


class RouterScores(StrEnum):
    """The function that turns a router's logits into scores."""

    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The experts of one layer: a router sends each row through some of them, and through the shared one, if any.

    Attributes:
        num_experts: number of experts that the router chooses among.
        num_chosen: number of experts that it chooses for a row.
        intermediate_size: intermediate size of one expert.
        scores: function of the router's logits, applied over all experts before any is chosen.
        correction_bias: whether a bias is added to the scores, for the choice only (DeepSeek-V3).
        num_groups: number of equal groups of consecutive experts. A row may use `num_chosen_groups` of them: those
            whose two best experts have the highest sum of scores, with the bias if there is one.
        renormalized: whether the weights of a row's experts are divided by their sum.
        scaling: the factor that these weights are then multiplied by.
        shared_intermediate_size: width of the shared MLP that every row also goes through; 0 is none.
        shared_name: the family's name for the shared expert.
        clamp: the largest gate and up of experts whose products have biases, and whose router has one too (gpt-oss);
            None for other experts.
        shared_gate: whether its output is multiplied by the sigmoid of one more product (Qwen3-Next, Qwen3.5).
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    scores: RouterScores
    correction_bias: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    renormalized: bool = True
    scaling: float = 1.0
    shared_intermediate_size: int = 0
    shared_name: Literal["shared_experts", "shared_expert"] = "shared_experts"
    shared_gate: bool = False
    clamp: float | None = None


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

    @property
    def unusual_parts(self) -> tuple[str, ...]:
        """Return the parts, in words, whose weights can neither be split nor kept in fewer bits, except that experts
        can be kept in 4."""
        parts = {
            "layers that keep a state (gated delta net)": self.delta_net,
            "latent attention (MLA)": self.latent,
            EXPERTS: self.experts,
        }
        return tuple(words for words, part in parts.items() if part is not None)

    def problem_of_split(self, size: int) -> str | None:
        """Return why a layer cannot be split over `size` processes; None if it can."""
        for part in (*self.unusual_parts, *(["norms over all heads"] if self.wide_qk_norm else ())):
            return f"target.tensor_parallel={size} cannot split {part}; use target.tensor_parallel=1"
        divided = {
            "num_key_value_heads": self.num_kv_heads,
            "num_attention_heads": self.num_heads,
            "intermediate_size": self.intermediate_size,
        }
        odd = (f"{name}, {value}" for name, value in divided.items() if value % size)
        return next((f"target.tensor_parallel={size} does not divide the target's {each}" for each in odd), None)
