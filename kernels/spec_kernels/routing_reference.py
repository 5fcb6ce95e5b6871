"""The kernels of `routing.py` in plain torch."""

from __future__ import annotations

import torch

from spec_kernels.norms import rms_norm_reference


def choose_experts_reference(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    num_chosen: int,
    num_groups: int,
    num_chosen_groups: int,
    scores: str,
    renormalized: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `choose_experts` does, row by row; return expert ids and weights, both [rows, chosen]."""
    values = logits.sigmoid() if scores == "sigmoid" else logits.softmax(-1)
    all_ids, all_weights = [], []
    for row in values:
        ranked = row if bias is None else row + bias
        groups = list(ranked.view(num_groups, -1))
        best = sorted(range(num_groups), key=lambda group: -float(groups[group].topk(2).values.sum()))
        if num_chosen_groups < num_groups:
            kept = [groups[g] if g in best[:num_chosen_groups] else groups[g] - float("inf") for g in range(num_groups)]
            ranked = torch.cat(kept)
        ids = sorted(range(len(row)), key=lambda expert: -float(ranked[expert]))[:num_chosen]
        weights = row[ids] / (row[ids].sum() + 1e-20) if renormalized else row[ids]
        all_ids.append(torch.tensor(ids, device=logits.device))
        all_weights.append(weights * scaling)
    return torch.stack(all_ids), torch.stack(all_weights)


def route_reference(
    rows: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    gate: torch.Tensor,
    bias: torch.Tensor | None,
    num_chosen: int,
    num_groups: int,
    num_chosen_groups: int,
    scores: str,
    renormalized: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what `route` does; return expert ids, weights, and the rows that the gate multiplies."""
    normed = rows
    if norm_weight is not None:
        normed = torch.empty_like(rows)
        rms_norm_reference(normed, rows, norm_weight, eps)
    logits = normed.float() @ gate.float().t()
    return *choose_experts_reference(
        logits, bias, num_chosen, num_groups, num_chosen_groups, scores, renormalized, scaling
    ), normed
