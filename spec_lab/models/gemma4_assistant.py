"""The Gemma 4 assistant: a small decoder with queries only, which reads the target's keys and values.

Google, 2026; `gemma4_assistant` in transformers, SGLang #24436, vLLM #41745. The input of a step is the target's
embedding of a token, concatenated with a recurrent vector of the target's width. In the first step that vector is the
target's hidden state after the final norm. Later it is the assistant's own output, projected to that width. Keys in
the target's cache are already rotated; Gemma's keys and values are also normed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.nn.functional as F

from spec_lab.checkpoints.checkpoint_files import kept_part
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.gemma4_assistant_checkpoint import TOKEN_ORDERING, AssistantConfig
from spec_lab.checkpoints.plan import LayerPlan
from spec_lab.core.kernel_set import TORCH_FORMS, KernelSet, Op
from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.passes import Pass
from spec_lab.core.types import AttentionMetadata
from spec_lab.models.clusters import TokenClusters
from spec_lab.models.draft_parts import GreedyHead, LikeliestToken
from spec_lab.models.gemma4_layers import Gemma4Layer, build_gemma4_attention, build_gemma4_parts
from spec_lab.models.linear import make_linear
from spec_lab.models.norms import Float32Norm, rounded
from spec_lab.models.partition import WHOLE, Partition
from spec_lab.models.rope import rotary_table
from spec_lab.models.scored_tokens import ScoredTokens


class Gemma4Assistant(GreedyHead):
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
        kernels: KernelSet = TORCH_FORMS,
    ) -> None:
        """Build the model from whole tensors.

        Args:
            target_embedding: [vocab, target hidden_size].
            extra_window_keys: added to every sliding window.
            partition: that of the target. If a process holds the KV of some heads only, the queries of these heads and
                the product after them are split too. Everything else is whole in every process.
            kernels: replace the parts that they have, if the target is not split.
        """
        self.config = config
        self._embedding = target_embedding
        self._launching = kernels.get(Op.EARLY_LAUNCHES, nullcontext)
        # The target's embedding module also rounds the scale to the weights' dtype first.
        self._embedding_scale = rounded(config.target.embedding_scale, target_embedding.dtype)
        self._pre_projection = kernels.get(Op.LINEAR, make_linear(tensors["pre_projection.weight"]))
        self._post_projection = kernels.get(Op.LINEAR, make_linear(tensors["post_projection.weight"]))
        self._layers = [
            build_assistant_layer(
                config.body,
                replace(plan, window=None if plan.window is None else plan.window + extra_window_keys),
                tensors,
                f"model.layers.{index}.",
                backend,
                partition,
                kernels,
            )
            for index, plan in enumerate(config.body.layers)
        ]
        self._norm = kernels.get(Op.NORM, Float32Norm(tensors["model.norm.weight"], config.body.rms_norm_eps))
        self._head = build_token_head(config, tensors, kernels)
        self.likeliest = self._head.likeliest
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
            stream = layer(stream, None, Pass(cache, attention, rotary=rotary[key]))
        return self._norm(stream)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Project output rows to the next step's recurrent vectors [batch, target hidden_size]."""
        return self._post_projection(hidden)

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.target_logits(hidden)

    def scored_tokens(self, hidden: torch.Tensor) -> ScoredTokens:
        """Return `target_logits` as scores of all tokens."""
        return ScoredTokens(self.target_logits(hidden))


def build_assistant_layer(
    body: ModelConfig,
    plan: LayerPlan,
    tensors: Mapping[str, torch.Tensor],
    prefix: str,
    backend: AttentionBackend,
    partition: Partition,
    kernels: KernelSet,
) -> Gemma4Layer:
    """Build a Gemma 4 layer without keys and values, of which only queries and the product after them may be split."""
    names = (f"{prefix}self_attn.{name}.weight" for name in ("q_proj", "q_norm", "o_proj"))
    own = {name: kept_part(partition, name.removeprefix(prefix), tensors[name]) for name in names}
    num_heads = own[f"{prefix}self_attn.q_proj.weight"].shape[0] // plan.head_dim
    attention = build_gemma4_attention(
        replace(plan, num_heads=num_heads), body.rms_norm_eps, own, f"{prefix}self_attn.", backend, partition
    )
    parts = build_gemma4_parts(body, attention, tensors, prefix, WHOLE)
    return Gemma4Layer(attention, kernels.get(Op.SANDWICH, parts), None)


class DenseHead(GreedyHead):
    """Scores every token, with the assistant's own embedding [vocab, hidden_size]."""

    def __init__(self, embedding: torch.Tensor, kernels: KernelSet = TORCH_FORMS) -> None:
        linear = make_linear(embedding)
        self._linear = kernels.get(Op.LINEAR, linear)
        self.likeliest = kernels.get(Op.LIKELIEST, LikeliestToken(None, linear))

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._linear(hidden)


class CentroidHead(GreedyHead):
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
        kernels: KernelSet = TORCH_FORMS,
    ) -> None:
        """embedding [vocab, hidden_size], centroids [num_centroids, hidden_size], token_ordering [vocab]."""
        num_centroids, (self._vocab_size, hidden_size) = centroids.shape[0], embedding.shape
        self._clusters = TokenClusters(
            kernels.get(Op.LINEAR, make_linear(centroids)),
            embedding.index_select(0, token_ordering).view(num_centroids, -1, hidden_size),
            token_ordering.view(num_centroids, -1),
            top_k,
        )
        self.likeliest = kernels.get(Op.LIKELIEST_IN_CLUSTERS, self._clusters)

    def target_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens, logits = self._clusters.scored(hidden)
        return logits.new_full((hidden.shape[0], self._vocab_size), float("-inf")).scatter_(1, tokens, logits)


def build_token_head(
    config: AssistantConfig, tensors: Mapping[str, torch.Tensor], kernels: KernelSet = TORCH_FORMS
) -> DenseHead | CentroidHead:
    """Build the kind of head that the checkpoint was trained with."""
    embedding = tensors["model.embed_tokens.weight"]
    if config.centroids is None:
        return DenseHead(embedding, kernels)
    centroids = tensors["masked_embedding.centroids.weight"]
    return CentroidHead(embedding, centroids, tensors[TOKEN_ORDERING], config.centroids.top_k, kernels=kernels)
