"""Clusters of tokens, of which a head scores the likeliest alone: that of the small Gemma 4 assistants."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_lab.models.linear import Linear
from spec_lab.models.scored_tokens import top_probability


@dataclass(frozen=True, slots=True)
class TokenClusters:
    """Finds the likeliest token of the likeliest clusters; of equal ones the lowest id.

    Attributes:
        centroids: gives the scores of the clusters.
        rows: [num_clusters, size, hidden_size] the head's rows in cluster order (as SGLang has them), so that a cluster
            is read as one block.
        token_ids: [num_clusters, size] of these rows.
        num_chosen: clusters whose tokens are scored.
    """

    centroids: Linear
    rows: torch.Tensor
    token_ids: torch.Tensor
    num_chosen: int

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Turn [batch, hidden_size] into [batch] token ids."""
        return self._best(*self.scored(hidden))

    def with_probability(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn [batch, hidden_size] into [batch] token ids and their probabilities among the tokens that are scored."""
        tokens, logits = self.scored(hidden)
        return self._best(tokens, logits), top_probability(logits)

    def _best(self, tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        # Clusters come in the order of their scores, so the lowest id of the best is looked for by itself.
        best = logits.amax(dim=-1, keepdim=True)
        return tokens.masked_fill(logits < best, self.token_ids.numel() - 1).amin(dim=-1)

    def scored(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids and logits of the likeliest clusters, both [batch, num_chosen * size]."""
        # topk promises no order of equal scores; the sort is stable.
        order = self.centroids(hidden).sort(dim=-1, descending=True, stable=True).indices
        clusters = order[:, : self.num_chosen].reshape(-1)
        batch, hidden_size = hidden.shape
        rows = self.rows.index_select(0, clusters).view(batch, -1, hidden_size)
        tokens = self.token_ids.index_select(0, clusters).view(batch, -1)
        return tokens, torch.bmm(rows, hidden.unsqueeze(2)).squeeze(2)
