"""The parts of a drafter under `kernels=triton`: the input of a draft step, and the likeliest tokens after it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_kernels.clusters import likeliest_in_clusters
from spec_kernels.draft_input import draft_input
from spec_kernels.likeliest import likeliest
from spec_kernels.product_tiles import MAX_ROWS
from spec_lab.models.clusters import TokenClusters
from spec_lab.models.draft_parts import DraftInput, LikeliestToken
from spec_lab.operators.triton_linear import dense


@dataclass(frozen=True, slots=True)
class FusedDraftInput:
    """`DraftInput` in one kernel."""

    plain: DraftInput

    def __call__(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embedding, first, second = self.plain.embedding, self.plain.embedding_norm, self.plain.hidden_norm
        out = draft_input(token_ids, embedding, first.weight, first.eps, hidden, second.weight, second.eps)
        return out, out[:, hidden.shape[1] :]


class FusedLikeliest:
    """The likeliest token in one kernel, for up to `max_rows` rows."""

    __slots__ = ("_arrivals", "_eps", "_max_rows", "_norm_weight", "_plain", "_weight")

    def __init__(self, plain: LikeliestToken, max_rows: int) -> None:
        norm = plain.norm
        self._plain = plain
        self._max_rows = max_rows
        self._weight = dense(plain.head).weight
        self._norm_weight = None if norm is None else norm.kernel_weight.float()
        self._eps = 0.0 if norm is None else norm.eps
        self._arrivals = torch.zeros(1, dtype=torch.int32, device=self._weight.device)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[0] > self._max_rows:
            return self._plain(hidden)
        return self._launch(hidden, False)[0]

    def with_probability(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if hidden.shape[0] > self._max_rows:
            return self._plain.with_probability(hidden)
        return self._launch(hidden, True)

    def _launch(self, hidden: torch.Tensor, weighed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        token_map = self._plain.token_map
        return likeliest(hidden, self._weight, self._arrivals, self._norm_weight, self._eps, token_map, weighed)


class TritonClusters:
    """The likeliest token of the likeliest clusters, as a product and two kernels, for up to 64 rows.

    With its probability it is computed in torch.
    """

    __slots__ = ("_arrivals", "_plain")

    def __init__(self, plain: TokenClusters) -> None:
        self._plain = plain
        self._arrivals = torch.zeros(MAX_ROWS, dtype=torch.int32, device=plain.rows.device)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        plain = self._plain
        if hidden.shape[0] > MAX_ROWS:
            return plain(hidden)
        return likeliest_in_clusters(
            hidden, plain.centroids(hidden), plain.rows, plain.token_ids, self._arrivals, plain.num_chosen
        )

    def with_probability(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._plain.with_probability(hidden)
