"""A head that scores only the tokens of the likeliest clusters, as the small Gemma 4 assistants have."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_lab.models.linear import Linear
from spec_lab.models.scored_tokens import top_probability


@dataclass(frozen=True, slots=True)
class TokenClusters:
    """Finds the likeliest token of the likeliest clusters; ties go to the lowest id.

    Attributes:
        centroids: computes the scores of the clusters.
        rows: [num_clusters, size, hidden_size] the head's rows in cluster order (as in SGLang), so that a cluster is
            one block of memory.
        token_ids: [num_clusters, size] the ids of these rows.
        num_chosen: the number of clusters whose tokens are scored.
    """

    centroids: Linear
    rows: torch.Tensor
    token_ids: torch.Tensor
    num_chosen: int

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the token ids [batch] for `hidden` [batch, hidden_size]."""
        return self._best(*self.scored(hidden))

    def with_probability(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token ids [batch] for `hidden` [batch, hidden_size], and their probabilities [batch] among the
        scored tokens."""
        tokens, logits = self.scored(hidden)
        return self._best(tokens, logits), top_probability(logits)

    def _best(self, tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        # Clusters are in the order of their scores, so the lowest id among ties takes a separate search.
        best = logits.amax(dim=-1, keepdim=True)
        return tokens.masked_fill(logits < best, self.token_ids.numel() - 1).amin(dim=-1)

    def scored(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids and logits of the likeliest clusters, both [batch, num_chosen * size]."""
        # A stable sort, since topk promises no order of equal scores.
        order = self.centroids(hidden).sort(dim=-1, descending=True, stable=True).indices
        clusters = order[:, : self.num_chosen].reshape(-1)
        batch, hidden_size = hidden.shape
        rows = self.rows.index_select(0, clusters).view(batch, -1, hidden_size)
        tokens = self.token_ids.index_select(0, clusters).view(batch, -1)
        return tokens, torch.bmm(rows, hidden.unsqueeze(2)).squeeze(2)
