"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464), row by row and in chunks. Everything is float32.

A head's state S [key_head_dim, value_head_dim] maps a key to a value. A row first decays S, then corrects the value for
its own key, and reads the corrected state with its query:

    S = exp(log_decay) * S
    S = S + key x (strength * (value - S^T key))
    output = S^T query
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

CHUNK_SIZE = 64


@dataclass(slots=True)
class DeltaRows:
    """The inputs of the delta rule for some rows. A key head serves one or more adjacent value heads.

    Attributes:
        queries, keys: [batch, num_rows, num_key_heads, key_head_dim].
        values: [batch, num_rows, num_value_heads, value_head_dim].
        log_decay: [batch, num_rows, num_value_heads], never above 0.
        strength: [batch, num_rows, num_value_heads], from 0 to 1.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    log_decay: torch.Tensor
    strength: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.keys.shape[1]

    def for_value_heads(self, heads: torch.Tensor) -> torch.Tensor:
        """Repeat queries or keys, or some rows of them, for each value head."""
        return heads.repeat_interleave(self.values.shape[2] // heads.shape[2], dim=2)


def delta_row_by_row(rows: DeltaRows, states: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield for each row its output [batch, num_value_heads, value_head_dim] and the states after it.

    Args:
        states: [batch, num_value_heads, key_head_dim, value_head_dim] before the first row; not modified.
    """
    decay = rows.log_decay.exp()[..., None, None]
    keys, queries = rows.for_value_heads(rows.keys), rows.for_value_heads(rows.queries)
    for row in range(rows.num_rows):
        key, query = keys[:, row].unsqueeze(-2), queries[:, row].unsqueeze(-2)
        states = states * decay[:, row]
        error = rows.values[:, row].unsqueeze(-2) - key @ states
        states = torch.addcmul(states, key.transpose(-1, -2), rows.strength[:, row, :, None, None] * error)
        yield (query @ states).squeeze(-2), states


def delta_in_chunks(
    rows: DeltaRows, states: torch.Tensor, chunk_size: int = CHUNK_SIZE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run rows a chunk at a time. Return the outputs [batch, num_rows, num_value_heads, value_head_dim], and the states
    after the last row.
    """
    outputs = []
    for start in range(0, rows.num_rows, chunk_size):
        output, states = _chunk(rows, slice(start, start + chunk_size), states)
        outputs.append(output)
    return torch.cat(outputs, dim=1), states


def _chunk(rows: DeltaRows, part: slice, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one chunk as products over all its rows.

    Let D_i be the decay from the chunk's start to row i. The state after row i is D_i S + sum over j <= i of D_i / D_j
    * key_j x u_j. Here u_i = strength_i * (value_i - S_i^T key_i), and S_i is the state before row i, decayed. So u_i
    depends on all u_j before it. This is a triangular system (the UT transform of Yang et al. 2024, arXiv 2406.06484).
    """
    queries, keys = (rows.for_value_heads(heads[:, part]).transpose(1, 2) for heads in (rows.queries, rows.keys))
    values = rows.values[:, part].transpose(1, 2)
    strength = rows.strength[:, part].transpose(1, 2).unsqueeze(-1)
    log_decay = rows.log_decay[:, part].transpose(1, 2).cumsum(-1)  # from the chunk's start: [batch, heads, rows]
    later = torch.ones(log_decay.shape[-1], log_decay.shape[-1], dtype=torch.bool, device=keys.device).triu(1)
    between = (log_decay.unsqueeze(-1) - log_decay.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
    from_start = log_decay.exp().unsqueeze(-1)
    answers = keys @ states * from_start
    system = strength * between * (keys @ keys.transpose(-1, -2))
    # The solver takes the diagonal to be ones, and ignores everything above it.
    updates = torch.linalg.solve_triangular(system, strength * (values - answers), upper=False, unitriangular=True)
    outputs = queries @ states * from_start + between * (queries @ keys.transpose(-1, -2)) @ updates
    to_end = (log_decay[..., -1:] - log_decay).exp().unsqueeze(-1)
    states = states * from_start[..., -1:, :] + (keys * to_end).transpose(-1, -2) @ updates
    return outputs.transpose(1, 2), states
