"""The Gemma 4 assistant: a small decoder with queries only, which reads keys and values that the target wrote.

Google, 2026; `gemma4_assistant` in transformers, SGLang #24436, vLLM #41745. Input of a step is the target's embedding
of a token beside a recurrent vector of the target's width: first the target's hidden state after its final norm, then
the assistant's own output, projected back. Keys and values come normed and rotated from the target's cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from spec_lab.checkpoints.gemma4_assistant_checkpoint import TOKEN_ORDERING
from spec_lab.checkpoints.gemma4_assistant_config import AssistantConfig, AssistantLayerConfig
from spec_lab.checkpoints.slices import kept_part
from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.types import AttentionMetadata
from spec_lab.models.clusters import TokenClusters
from spec_lab.models.draft_parts import LikeliestToken
from spec_lab.models.linear import GatedMLP, fused_linear, gelu_tanh, make_linear
from spec_lab.models.norms import RMSNorm
from spec_lab.models.partition import WHOLE, Partition
from spec_lab.models.products import PLAIN, Products
from spec_lab.models.queries import norm_and_turn_queries
from spec_lab.models.rope import RotaryRows, rotary_table
from spec_lab.models.sandwich import AddNormed, AddNormedThenNorm, NormedLinear, SandwichParts
from spec_lab.models.scored_tokens import ScoredTokens

ATTENTION_SCALE = 1.0


class Gemma4Assistant:
    """Weights and forward; no state between calls. See `DraftHead` for `greedy` and `target_logits`.

    Rows are in the checkpoint's own width, hidden_size, where not said otherwise.
    """

    def __init__(
        self,
        config: AssistantConfig,
        tensors: Mapping[str, torch.Tensor],
        target_embedding: torch.Tensor,
        backend: AttentionBackend,
        max_positions: int,
        extra_window_keys: int = 0,
        partition: Partition = WHOLE,
        products: Products = PLAIN,
    ) -> None:
        """Build the model from whole tensors.

        Args:
            target_embedding: [vocab, target hidden_size].
            extra_window_keys: added to every sliding window.
            partition: of the target: where a process holds the KV of some heads only, the queries that read them and
                the product behind them are split as well. All else is in every process.
            products: gives the parts that few rows go through, where the target is not split.
        """
        self.config = config
        self._embedding = target_embedding
        self._launching = products.launching
        # Rounded to the weights' dtype first, as the target's embedding module does.
        self._embedding_scale = float(torch.tensor(config.target.embedding_scale, dtype=target_embedding.dtype))
        self._pre_projection = products.linear(make_linear(tensors["pre_projection.weight"]))
        self._post_projection = products.linear(make_linear(tensors["post_projection.weight"]))
        self._layers = [
            AssistantLayer(
                config, layer, tensors, f"model.layers.{index}.", backend, extra_window_keys, partition, products
            )
            for index, layer in enumerate(config.layers)
        ]
        self._norm = products.norm(RMSNorm(tensors["model.norm.weight"], config.rms_norm_eps))
        self._head = build_token_head(config, tensors, products)
        self._rotary_keys = [(layer.rope.config, layer.head_dim) for layer in config.layers]
        like = target_embedding
        self._rotary = {
            key: rotary_table(*key, max_positions, like.dtype, like.device) for key in dict.fromkeys(self._rotary_keys)
        }

    def forward(
        self,
        token_ids: torch.Tensor,
        recurrent: torch.Tensor,
        caches: Sequence[LayerCache],
        attention: AttentionMetadata,
    ) -> torch.Tensor:
        """Turn [batch] tokens and [batch, target hidden_size] recurrent vectors into the normed output [batch,
        hidden_size].

        `caches` holds the target layer that each layer reads; nothing is written to them.
        """
        with self._launching():
            return self._forward(token_ids, recurrent, caches, attention)

    def _forward(
        self,
        token_ids: torch.Tensor,
        recurrent: torch.Tensor,
        caches: Sequence[LayerCache],
        attention: AttentionMetadata,
    ) -> torch.Tensor:
        embedded = F.embedding(token_ids, self._embedding) * self._embedding_scale
        stream = self._pre_projection(torch.cat((embedded, recurrent), dim=-1))
        rotary = {shape: table.rows(attention.positions) for shape, table in self._rotary.items()}
        for layer, key, cache in zip(self._layers, self._rotary_keys, caches, strict=True):
            stream = layer(stream, rotary[key], cache, attention)
        return self._norm(stream)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Turn output rows into the next step's recurrent vectors [batch, target hidden_size]."""
        return self._post_projection(hidden)

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.greedy(hidden)

    def greedy_with_probability(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._head.greedy_with_probability(hidden)

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.target_logits(hidden)

    def scored_tokens(self, hidden: torch.Tensor) -> ScoredTokens:
        """Return the same logits, as of a head that knows every token."""
        return ScoredTokens(self.target_logits(hidden))


class AssistantLayer:
    """A Gemma 4 layer without keys and values: each half is normed before and after, and the sum is scaled."""

    def __init__(
        self,
        config: AssistantConfig,
        layer: AssistantLayerConfig,
        tensors: Mapping[str, torch.Tensor],
        prefix: str,
        backend: AttentionBackend,
        extra_window_keys: int,
        partition: Partition,
        products: Products,
    ) -> None:
        def kept(name: str) -> torch.Tensor:
            return kept_part(partition, name, tensors[f"{prefix}{name}"])

        def norm(name: str) -> RMSNorm:
            return RMSNorm(tensors[f"{prefix}{name}.weight"], config.rms_norm_eps)

        self._backend = backend
        self._head_dim = layer.head_dim
        self._window = None if layer.window is None else layer.window + extra_window_keys
        q = kept("self_attn.q_proj.weight")
        self._turn = norm_and_turn_queries(norm("self_attn.q_norm"), q.shape[0] // layer.head_dim, backend)
        gate_up = fused_linear([tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")])
        parts = SandwichParts(
            project=NormedLinear(norm("input_layernorm"), make_linear(q)),
            output=partition.output(kept("self_attn.o_proj.weight")),
            after_attention=AddNormedThenNorm(
                AddNormed(norm("post_attention_layernorm")), norm("pre_feedforward_layernorm")
            ),
            mlp=GatedMLP(gate_up, make_linear(tensors[f"{prefix}mlp.down_proj.weight"]), gelu_tanh),
            after_mlp=AddNormed(norm("post_feedforward_layernorm"), tensors[f"{prefix}layer_scalar"]),
        )
        self._parts = products.sandwich(parts)

    def __call__(
        self, stream: torch.Tensor, rotary: RotaryRows, cache: LayerCache, attention: AttentionMetadata
    ) -> torch.Tensor:
        parts = self._parts
        heads = parts.project(stream).view(stream.shape[0], -1, self._head_dim)
        queries = self._turn(heads, rotary, cache, attention)
        attended = self._backend.attend(queries, cache, attention, self._window, ATTENTION_SCALE)
        stream, normed = parts.after_attention(stream, parts.output(attended))
        return parts.after_mlp(stream, parts.mlp(normed))


class TokenHead(Protocol):
    """Turns output rows [batch, hidden_size] into tokens."""

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the [batch] likeliest tokens; of equal ones the lowest id."""
        ...

    def greedy_with_probability(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return them and their probabilities [batch] among the tokens that were scored."""
        ...

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, vocab], -inf for tokens that were not scored."""
        ...


class DenseHead:
    """Scores every token, by the assistant's own embedding [vocab, hidden_size]."""

    def __init__(self, embedding: torch.Tensor, products: Products = PLAIN) -> None:
        linear = make_linear(embedding)
        self._linear = products.linear(linear)
        self._likeliest = products.likeliest(LikeliestToken(None, linear))

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._likeliest(hidden)

    def greedy_with_probability(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._likeliest.with_probability(hidden)

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._linear(hidden)


class CentroidHead:
    """Scores only the tokens of the likeliest clusters.

    The embedding serves the head alone, tokens go in by the target's. Unscored tokens are -inf: transformers' smallest
    score minus 1 leaves them real probability, and asks the device for it.
    """

    def __init__(
        self,
        embedding: torch.Tensor,
        centroids: torch.Tensor,
        token_ordering: torch.Tensor,
        top_k: int,
        products: Products = PLAIN,
    ) -> None:
        """embedding [vocab, hidden_size], centroids [num_centroids, hidden_size], token_ordering [vocab]."""
        num_centroids, (self._vocab_size, hidden_size) = centroids.shape[0], embedding.shape
        self._clusters = TokenClusters(
            products.linear(make_linear(centroids)),
            embedding.index_select(0, token_ordering).view(num_centroids, -1, hidden_size),
            token_ordering.view(num_centroids, -1),
            top_k,
        )
        self._likeliest = products.likeliest_in_clusters(self._clusters)

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._likeliest(hidden)

    def greedy_with_probability(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._likeliest.with_probability(hidden)

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens, logits = self._clusters.scored(hidden)
        return logits.new_full((hidden.shape[0], self._vocab_size), float("-inf")).scatter_(1, tokens, logits)


def build_token_head(
    config: AssistantConfig, tensors: Mapping[str, torch.Tensor], products: Products = PLAIN
) -> TokenHead:
    """Build the head that the checkpoint was trained with."""
    embedding = tensors["model.embed_tokens.weight"]
    if config.centroids is None:
        return DenseHead(embedding, products)
    centroids = tensors["masked_embedding.centroids.weight"]
    return CentroidHead(embedding, centroids, tensors[TOKEN_ORDERING], config.centroids.top_k, products)
