"""A first embedding for a drafter narrower than its target, so that it need not learn the vocabulary from nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from spec_lab.core.errors import UserError


@torch.no_grad()
def leading_directions(embedding: Tensor, width: int) -> Tensor:
    """Return `[hidden, width]`, orthonormal columns: the directions in which `embedding` `[vocab, hidden]` is largest.

    `embedding @ directions` is the best embedding of that width in the least-squares sense.
    """
    hidden_size = embedding.shape[1]
    if width > hidden_size:
        raise UserError(f"drafter.hidden_size={width} is wider than the target's {hidden_size}; lower it")
    values = embedding.double().cpu()
    _, directions = torch.linalg.eigh(values.T @ values)
    return directions.flip(1)[:, :width].to(embedding.device, embedding.dtype)
