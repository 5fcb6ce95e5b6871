"""The sizes of multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434), and its tensors, without torch.

The cache holds one row for each token, which all heads share: `kv_lora_rank` latent numbers, and `qk_rope_head_dim`
numbers of a rotated key. Linear maps compute each head's key and value from the latent numbers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Multi-head latent attention of one layer.

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


def latent_tensor_shapes(
    sizes: LatentSizes, num_heads: int, hidden_size: int, input_size: int
) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors below `self_attn.`. `input_size` is the hidden size, or twice that in
    an EAGLE-3 head."""
    rank, heads_width = sizes.q_lora_rank, num_heads * sizes.query_width
    query: dict[str, tuple[int, ...]] = (
        {"q_proj.weight": (heads_width, input_size)}
        if rank is None
        else {
            "q_a_proj.weight": (rank, input_size),
            "q_a_layernorm.weight": (rank,),
            "q_b_proj.weight": (heads_width, rank),
        }
    )
    unfolded = num_heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)
    shapes = query | {
        "kv_a_proj_with_mqa.weight": (sizes.row_width, input_size),
        "kv_a_layernorm.weight": (sizes.kv_lora_rank,),
        "kv_b_proj.weight": (unfolded, sizes.kv_lora_rank),
        "o_proj.weight": (hidden_size, num_heads * sizes.v_head_dim),
    }
    if sizes.bias:
        biased = [name for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj") if f"{name}.weight" in shapes]
        shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in biased}
    return shapes
