"""The likeliest token of the likeliest clusters of tokens: the head of the small Gemma 4 assistants.

In torch this takes a sort of all clusters, two gathers, a batched product and three more operators.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

from spec_kernels.early import placed, wait_for_inputs
from spec_kernels.operators import operator
from spec_kernels.utils import assert_rows_of, launch_on
from spec_kernels.vocabulary import NO_TOKEN, lowest_top, nan_as_largest

_CLUSTER_TILE, _OTHERS_TILE, _MOST_CHANNELS = 16, 512, 256


@triton.jit
def _choose_clusters(
    chosen_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    logits_stride: tl.tensor,
    NUM_CLUSTERS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    CLUSTER_TILE: tl.constexpr,
    OTHERS_TILE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Finds the ranks of some clusters of a row: the number of clusters with a higher score, or an equal one and a
    lower index. Ranks are distinct, so every place of the chosen clusters is written."""
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    clusters = tl.program_id(1) * CLUSTER_TILE + tl.arange(0, CLUSTER_TILE)
    row_ptr = logits_ptr + row * logits_stride
    own = tl.load(row_ptr + clusters, mask=clusters < NUM_CLUSTERS, other=float("-inf")).to(tl.float32)
    own = nan_as_largest(own)[:, None]
    before = tl.zeros((CLUSTER_TILE, OTHERS_TILE), tl.int32)
    for first in range(0, NUM_CLUSTERS, OTHERS_TILE):
        others = first + tl.arange(0, OTHERS_TILE)
        is_other = others < NUM_CLUSTERS
        logits = nan_as_largest(tl.load(row_ptr + others, mask=is_other, other=float("-inf")).to(tl.float32))[None, :]
        is_before = (logits > own) | ((logits == own) & (others[None, :] < clusters[:, None]))
        before += (is_before & is_other[None, :]).to(tl.int32)
    ranks = tl.sum(before, 1)
    is_chosen = (ranks < NUM_CHOSEN) & (clusters < NUM_CLUSTERS)
    tl.store(chosen_ptr + row * NUM_CHOSEN + ranks, clusters, mask=is_chosen)


@triton.jit
def _best_of_clusters(
    tokens_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    tops_ptr: tl.tensor,
    top_ids_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    rows_stride: tl.tensor,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    CHOSEN_TILE: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Finds the best token of one chosen cluster. The last program of a row to finish compares the clusters' tokens."""
    wait_for_inputs(EARLY)
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cluster = tl.load(chosen_ptr + row * NUM_CHOSEN + place).to(tl.int64)
    members = tl.arange(0, SIZE_TILE)
    is_member = members < SIZE
    logits = tl.zeros((SIZE_TILE,), tl.float32)
    for first in range(0, HIDDEN, CHANNEL_TILE):
        channels = first + tl.arange(0, CHANNEL_TILE)
        is_channel = channels < HIDDEN
        hidden = tl.load(rows_ptr + row * rows_stride + channels, mask=is_channel, other=0.0).to(tl.float32)
        at = weight_ptr + (cluster * SIZE + members)[:, None] * HIDDEN + channels[None, :]
        weight = tl.load(at, mask=is_member[:, None] & is_channel[None, :], other=0.0).to(tl.float32)
        logits += tl.sum(weight * hidden[None, :], 1)
    # Logits are rounded to the dtype before they are compared, so that ties are the same as for stored logits.
    logits = nan_as_largest(logits.to(weight_ptr.dtype.element_ty).to(tl.float32))
    ids = tl.load(token_ids_ptr + cluster * SIZE + members, mask=is_member, other=0).to(tl.int32)
    top, top_id = lowest_top(tl.where(is_member, logits, float("-inf")), tl.where(is_member, ids, NO_TOKEN), 0)
    tl.store(tops_ptr + row * NUM_CHOSEN + place, top)
    tl.store(top_ids_ptr + row * NUM_CHOSEN + place, top_id)
    tl.debug_barrier()  # all threads must have stored before one signals it
    if tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel") == NUM_CHOSEN - 1:
        places = tl.arange(0, CHOSEN_TILE)
        is_place = places < NUM_CHOSEN
        at = row * NUM_CHOSEN + places
        tops = tl.load(tops_ptr + at, mask=is_place, other=float("-inf"), cache_modifier=".cg")
        top_ids = tl.load(top_ids_ptr + at, mask=is_place, other=NO_TOKEN, cache_modifier=".cg")
        _, found = lowest_top(tops, top_ids, 0)
        tl.store(tokens_ptr + row, found.to(tl.int64))
        tl.store(arrivals_ptr + row, 0)


@operator("likeliest_in_clusters", mutates_args=("arrivals",))
def likeliest_in_clusters(
    rows: torch.Tensor,
    cluster_logits: torch.Tensor,
    weight: torch.Tensor,
    token_ids: torch.Tensor,
    arrivals: torch.Tensor,
    num_chosen: int,
) -> torch.Tensor:
    """Return the argmax [rows] of each row over the tokens of its likeliest clusters. Of clusters with equal scores the
    first are chosen, and of tokens with equal logits the lowest id.

    Args:
        rows: [rows, hidden_size].
        cluster_logits: [rows, num_clusters].
        weight: [num_clusters, size, hidden_size], contiguous: the head's rows, cluster by cluster.
        token_ids: [num_clusters, size] int64, contiguous: the token ids of these rows.
        arrivals: [rows or more] int32 zeros, and zero again afterwards.
        num_chosen: the number of clusters whose tokens are compared.
    """
    num_rows, num_clusters = cluster_logits.shape
    size, hidden_size = weight.shape[1:]
    assert_rows_of(rows, num_rows, hidden_size)
    assert_rows_of(cluster_logits, num_rows, num_clusters)
    assert_rows_of(weight, num_clusters, size, hidden_size)
    assert_rows_of(token_ids, num_clusters, size)
    assert weight.is_contiguous() and token_ids.is_contiguous()
    assert arrivals.shape[0] >= num_rows and num_chosen <= num_clusters
    chosen = torch.empty((num_rows, num_chosen), dtype=torch.int32, device=rows.device)
    tokens, tops = chosen.new_empty(num_rows, dtype=torch.int64), torch.empty_like(chosen, dtype=torch.float32)
    with launch_on(rows):
        _choose_clusters[(num_rows, triton.cdiv(num_clusters, _CLUSTER_TILE))](
            chosen,
            cluster_logits,
            cluster_logits.stride(0),
            NUM_CLUSTERS=num_clusters,
            NUM_CHOSEN=num_chosen,
            CLUSTER_TILE=_CLUSTER_TILE,
            OTHERS_TILE=_OTHERS_TILE,
            **placed(True),
        )
        _best_of_clusters[(num_rows, num_chosen)](
            tokens,
            rows,
            weight,
            token_ids,
            chosen,
            tops,
            torch.empty_like(chosen),
            arrivals,
            rows.stride(0),
            HIDDEN=hidden_size,
            SIZE=size,
            SIZE_TILE=triton.next_power_of_2(size),
            NUM_CHOSEN=num_chosen,
            CHOSEN_TILE=triton.next_power_of_2(num_chosen),
            CHANNEL_TILE=min(_MOST_CHANNELS, triton.next_power_of_2(hidden_size)),
            **placed(True),
            num_warps=8,
        )
    return tokens
