"""The tensors of a gated delta net as checkpoints store them, in two layouts. The lab's layers read Qwen3.5's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from spec_lab.checkpoints.checkpoint_files import StoredTensor
from spec_lab.checkpoints.plan import DeltaNetSizes


def ungrouped(stored: Mapping[str, StoredTensor], prefix: str, sizes: DeltaNetSizes) -> dict[str, StoredTensor]:
    """Return all tensors, those of one layer below `prefix` (ending in `linear_attn.`) converted to Qwen3.5's layout.

    Qwen3-Next stores the rows of each key head together: its query, its key, and the values and gates of its value
    heads; likewise their strengths and time steps. A tensor with an unexpected number of rows is left as it is, and
    refused later.
    """
    group = sizes.num_value_heads // sizes.num_key_heads
    values = group * sizes.value_head_dim
    layouts: dict[str, tuple[tuple[int, ...], dict[str, tuple[int, ...]]]] = {
        "in_proj_qkvz.weight": (
            (sizes.key_head_dim, sizes.key_head_dim, values, values),
            {"in_proj_qkv.weight": (0, 1, 2), "in_proj_z.weight": (3,)},
        ),
        "in_proj_ba.weight": ((group, group), {"in_proj_b.weight": (0,), "in_proj_a.weight": (1,)}),
    }
    result = dict(stored)
    for name, (rows, targets) in layouts.items():
        grouped = stored.get(prefix + name)
        if grouped is None or grouped.shape[0] != sizes.num_key_heads * sum(rows):
            continue
        del result[prefix + name]
        for target, picked in targets.items():
            form = partial(rows_of_heads, num_heads=sizes.num_key_heads, rows=rows, picked=picked)
            result[prefix + target] = grouped.made(form)
    return result


def rows_of_heads(
    grouped: torch.Tensor, num_heads: int, rows: tuple[int, ...], picked: tuple[int, ...]
) -> torch.Tensor:
    """Return the `picked` parts of a tensor: first one part of all heads, then the next part. `rows` has the number of
    rows of each part of a head."""
    parts = grouped.unflatten(0, (num_heads, -1)).split(rows, dim=1)
    return torch.cat([parts[part].flatten(0, 1) for part in picked])
