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
        num_rows, size = hidden.shape
        out = hidden.new_empty(num_rows, 2 * size)
        embedding, first, second = self.plain.embedding, self.plain.embedding_norm, self.plain.hidden_norm
        draft_input(out, token_ids, embedding, first.weight, first.eps, hidden, second.weight, second.eps)
        return out, out[:, size:]


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
        return self._launch(hidden, None)

    def with_probability(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if hidden.shape[0] > self._max_rows:
            return self._plain.with_probability(hidden)
        probabilities = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        return self._launch(hidden, probabilities), probabilities

    def _launch(self, hidden: torch.Tensor, probabilities: torch.Tensor | None) -> torch.Tensor:
        tokens = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
        likeliest(
            tokens,
            hidden,
            self._weight,
            self._arrivals,
            self._norm_weight,
            self._eps,
            self._plain.token_map,
            probabilities,
        )
        return tokens


class TritonClusters:
    """The likeliest token of the likeliest clusters, as a product and two kernels, for up to 64 rows.

    With its probability it is computed in torch.
    """

    __slots__ = ("_arrivals", "_plain")

    def __init__(self, plain: TokenClusters) -> None:
        self._plain = plain
        self._arrivals = torch.zeros(MAX_ROWS, dtype=torch.int32, device=plain.rows.device)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        plain, num_rows = self._plain, hidden.shape[0]
        if num_rows > MAX_ROWS:
            return plain(hidden)
        tokens = torch.empty(num_rows, dtype=torch.int64, device=hidden.device)
        likeliest_in_clusters(
            tokens, hidden, plain.centroids(hidden), plain.rows, plain.token_ids, self._arrivals, plain.num_chosen
        )
        return tokens

    def with_probability(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._plain.with_probability(hidden)
