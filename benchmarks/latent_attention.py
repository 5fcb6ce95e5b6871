"""Times latent attention on a CPU in two ways: the key map is applied to the queries, or keys and values are unfolded.

    python benchmarks/latent_attention.py        # the sizes of GLM-4.7-Flash, about a minute

`absorbed` multiplies the queries by the key map, attends to the cached latent rows, and applies the value map to the
result. `unfolded` computes keys and values from the cached rows. The times are milliseconds of one layer's attention
without its other products, the least of several. The last column is what `LatentSizes.unfolding_is_cheaper` chooses.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch

from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.checkpoints.latent_sizes import LatentSizes
from spec_lab.core.kv_cache import NUM_RESERVED_PAGES, LayerCache
from spec_lab.core.types import AttentionMetadata
from spec_lab.models.latent import each_head
from spec_lab.program.ending import guarded
from spec_lab.program.table import format_table

PAGE_SIZE = 16
CASES = ((1, 1024), (4, 128), (4, 1024), (16, 1024), (64, 1024), (32, 32), (128, 128), (512, 512))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("heads", 20), ("latent", 512), ("rope", 64), ("nope", 192), ("value", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = LatentSizes(None, options.latent, options.nope, options.rope, options.value)
    body = []
    with torch.inference_mode():
        for num_queries, num_keys in CASES:
            ways = both_ways(sizes, options.heads, num_queries, num_keys)
            absorbed, unfolded = (way() for way in ways)
            torch.testing.assert_close(absorbed, unfolded, rtol=0, atol=1e-3)
            chosen = "unfolded" if sizes.unfolding_is_cheaper(num_queries, num_keys) else "absorbed"
            times = [f"{milliseconds(way):.2f}" for way in ways]
            body.append([str(num_queries), str(num_keys), *times, chosen])
    print(format_table(["query rows", "keys", "absorbed", "unfolded", "chosen"], body, left=()))


def both_ways(
    sizes: LatentSizes, num_heads: int, num_queries: int, num_keys: int
) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
    """Return the two ways, as functions of the attention of one request's newest rows, over random cached rows and
    maps."""
    backend = TorchAttention(PAGE_SIZE, num_keys)
    assert backend.latent is not None
    latent, num_pages = backend.latent, -(-num_keys // PAGE_SIZE)
    rows = torch.randn((NUM_RESERVED_PAGES + num_pages) * PAGE_SIZE, sizes.row_width)
    rows[:PAGE_SIZE] = 0  # the null page
    cache, pages = LayerCache(rows), torch.arange(NUM_RESERVED_PAGES, NUM_RESERVED_PAGES + num_pages + 1).unsqueeze(0)
    positions = torch.arange(num_keys - num_queries, num_keys).unsqueeze(0)
    plain = torch.randn(num_queries, num_heads, sizes.qk_nope_head_dim)
    turned = torch.randn(num_queries, num_heads, sizes.qk_rope_head_dim)
    scale = sizes.kv_lora_rank**-0.5
    key_map = torch.randn(num_heads, sizes.qk_nope_head_dim, sizes.kv_lora_rank) * scale
    value_map = torch.randn(num_heads, sizes.kv_lora_rank, sizes.v_head_dim) * scale

    def metadata() -> AttentionMetadata:
        return backend.build(positions, torch.tensor([num_keys]), pages, num_keys)

    def absorbed() -> torch.Tensor:
        queries = torch.cat((each_head(plain, key_map), turned), dim=-1)
        return each_head(latent.attend(queries, cache, metadata(), None, sizes.kv_lora_rank, sizes.scale), value_map)

    def unfolded() -> torch.Tensor:
        queries = torch.cat((plain, turned), dim=-1)
        return latent.attend_unfolded(queries, cache, metadata(), None, key_map, value_map, sizes.scale)

    return absorbed, unfolded


def milliseconds(way: Callable[[], torch.Tensor], calls: int = 5) -> float:
    """Return the time of the fastest of some calls."""
    best = float("inf")
    for _ in range(calls):
        start = time.perf_counter()
        way()
        best = min(best, time.perf_counter() - start)
    return 1e3 * best


if __name__ == "__main__":
    sys.exit(guarded(main))
