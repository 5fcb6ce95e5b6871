"""The Gemma 4 assistant: a small decoder with queries only, which reads the target's keys and values.

Google, 2026; `gemma4_assistant` in transformers, SGLang #24436, vLLM #41745. The input of a step is the target's
embedding of a token, concatenated with a recurrent vector of the target's width. In the first step that vector is the
target's hidden state after the final norm. Later it is the assistant's own output, projected to that width. Keys in
the target's cache are already rotated; Gemma's keys and values are also normed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from spec_lab.checkpoints.gemma4_assistant_checkpoint import TOKEN_ORDERING
from spec_lab.checkpoints.gemma4_assistant_config import AssistantConfig
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.checkpoints.slices import kept_part
from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.passes import Pass
from spec_lab.core.types import AttentionMetadata
from spec_lab.models.clusters import TokenClusters
from spec_lab.models.draft_parts import LikeliestToken
from spec_lab.models.linear import GatedMLP, fused_linear, gelu_tanh, make_linear
from spec_lab.models.norms import Float32Norm
from spec_lab.models.partition import WHOLE, Partition
from spec_lab.models.products import PLAIN, Products
from spec_lab.models.queries import norm_and_turn_queries
from spec_lab.models.rope import rotary_table
from spec_lab.models.sandwich import AddNormed, AddNormedThenNorm, NormedLinear, SandwichParts
from spec_lab.models.scored_tokens import ScoredTokens

ATTENTION_SCALE = 1.0


class Gemma4Assistant:
    """Weights and forward; no state between calls. See `DraftHead` for `greedy` and `target_logits`.

    Unless noted otherwise, rows have the assistant's own hidden_size.
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
            partition: that of the target. If a process holds the KV of some heads only, the queries of these heads and
                the product after them are split too. Everything else is whole in every process.
            products: makes the parts that kernels may replace, if the target is not split.
        """
        self.config = config
        self._embedding = target_embedding
        self._launching = products.launching
        # The target's embedding module also rounds the scale to the weights' dtype first.
        self._embedding_scale = float(torch.tensor(config.target.embedding_scale, dtype=target_embedding.dtype))
        self._pre_projection = products.linear(make_linear(tensors["pre_projection.weight"]))
        self._post_projection = products.linear(make_linear(tensors["post_projection.weight"]))
        self._layers = [
            AssistantLayer(
                config, layer, tensors, f"model.layers.{index}.", backend, extra_window_keys, partition, products
            )
            for index, layer in enumerate(config.body.layers)
        ]
        self._norm = products.norm(Float32Norm(tensors["model.norm.weight"], config.body.rms_norm_eps))
        self._head = build_token_head(config, tensors, products)
        self._rotary_keys = [(layer.rope, layer.head_dim) for layer in config.body.layers]
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
        """Run tokens [batch] and recurrent vectors [batch, target hidden_size]; return the normed output [batch,
        hidden_size].

        `caches` holds, for each layer, the cache of the target layer that it reads. Nothing is written to them.
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
            stream = layer(stream, Pass(cache, attention, rotary=rotary[key]))
        return self._norm(stream)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Project output rows to the next step's recurrent vectors [batch, target hidden_size]."""
        return self._post_projection(hidden)

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.greedy(hidden)

    def greedy_with_probability(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._head.greedy_with_probability(hidden)

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.target_logits(hidden)

    def scored_tokens(self, hidden: torch.Tensor) -> ScoredTokens:
        """Return `target_logits` as scores of all tokens."""
        return ScoredTokens(self.target_logits(hidden))


class AssistantLayer:
    """A Gemma 4 layer without keys and values. Each half has a norm before and after it. The output is scaled."""

    def __init__(
        self,
        config: AssistantConfig,
        layer: LayerPlan,
        tensors: Mapping[str, torch.Tensor],
        prefix: str,
        backend: AttentionBackend,
        extra_window_keys: int,
        partition: Partition,
        products: Products,
    ) -> None:
        def kept(name: str) -> torch.Tensor:
            return kept_part(partition, name, tensors[f"{prefix}{name}"])

        def norm(name: str) -> Float32Norm:
            return Float32Norm(tensors[f"{prefix}{name}.weight"], config.body.rms_norm_eps)

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

    def __call__(self, stream: torch.Tensor, at: Pass) -> torch.Tensor:
        parts = self._parts
        heads = parts.project(stream).view(stream.shape[0], -1, self._head_dim)
        queries = self._turn(heads, at)
        attended = self._backend.attend(queries, at.cache, at.metadata, self._window, ATTENTION_SCALE)
        stream, normed = parts.after_attention(stream, parts.output(attended))
        return parts.after_mlp(stream, parts.mlp(normed))


class TokenHead(Protocol):
    """Turns output rows [batch, hidden_size] into tokens."""

    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the likeliest tokens [batch]; ties go to the lowest id."""
        ...

    def greedy_with_probability(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same tokens, and their probabilities [batch] among the scored tokens."""
        ...

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, vocab], -inf for tokens that were not scored."""
        ...


class DenseHead:
    """Scores every token, with the assistant's own embedding [vocab, hidden_size]."""

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

    The embedding is used only by the head; input tokens use the target's. Unscored tokens are -inf. transformers gives
    them the smallest score minus 1, which leaves them some probability and needs a synchronisation.
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
    """Build the kind of head that the checkpoint was trained with."""
    embedding = tensors["model.embed_tokens.weight"]
    if config.centroids is None:
        return DenseHead(embedding, products)
    centroids = tensors["masked_embedding.centroids.weight"]
    return CentroidHead(embedding, centroids, tensors[TOKEN_ORDERING], config.centroids.top_k, products)
