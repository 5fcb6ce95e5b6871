"""Measures what `prune.prefill=last_row` saves in the prompt pass of a target whose last layers share KV, on a CPU.

    python benchmarks/shared_layers.py

The targets have the layers of Gemma 4 E2B and E4B (20 of 35 and 18 of 42 only read KV). Their hidden size is 256, and
their weights are random. Three ways take turns. In the first, all rows go through all layers. In the second, all rows
but the last are dropped in the very last layer, as for a drafter that taps the layers before it. In the third they are
dropped after the last KV write. The figure is the least of many turns, in CPU time of one thread, so that other work on
the machine matters little.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch

from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.checkpoints.families.table import read_decoder
from spec_lab.core.kv_cache import NUM_RESERVED_PAGES, SCRATCH_PAGE, PagedKVCache
from spec_lab.core.selection import AllRows, BeforeAttention
from spec_lab.core.types import FeatureSpec
from spec_lab.models.target_loader import WeightSource, load_target
from spec_lab.program.ending import guarded
from spec_lab.program.table import format_table
from spec_lab.wiring.caches import cache_row

NUM_TURNS, PAGE_SIZE, VOCAB = 12, 16, 1000
PROMPTS = (128, 512)
WIDTHS: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "global_head_dim": 128,
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 48,
}
LAYERS: dict[str, dict[str, Any]] = {
    "E2B": {
        "num_hidden_layers": 35,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
    },
    "E4B": {"num_hidden_layers": 42, "num_kv_shared_layers": 18},
}


def main() -> None:
    """Print a line for each target and prompt length."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    body = []
    for name in LAYERS:
        for num_rows in PROMPTS:
            all_rows, *pruned = milliseconds(name, num_rows)
            body.append([name, str(num_rows), f"{all_rows:.1f}", *(f"{of_way / all_rows:.2f}" for of_way in pruned)])
    print(format_table(["layers of", "prompt", "all rows, ms", "last layer pruned", "layers behind KV pruned"], body))


@torch.inference_mode()
def milliseconds(name: str, num_rows: int) -> list[float]:
    """Time the target's forward of one prompt in the three ways."""
    config = read_decoder({"architectures": ["Gemma4ForCausalLM"], **WIDTHS, **LAYERS[name]}, name)
    cpu = torch.device("cpu")
    backend = TorchAttention(PAGE_SIZE, num_rows)
    target = load_target(config, WeightSource(None, torch.float32, cpu), backend, num_rows)
    num_pages = num_rows // PAGE_SIZE
    rows = [cache_row(plan) for plan in config.layers]
    cache = PagedKVCache(rows, NUM_RESERVED_PAGES + num_pages, PAGE_SIZE, torch.float32, cpu)
    pages = torch.tensor([[*range(NUM_RESERVED_PAGES, NUM_RESERVED_PAGES + num_pages), SCRATCH_PAGE]])
    lens = torch.tensor([num_rows])
    token_ids = torch.arange(num_rows) % VOCAB

    def seconds(prunes: bool, features: FeatureSpec) -> float:
        started = time.process_time()
        attention = backend.build(torch.arange(num_rows).unsqueeze(0), lens, pages, num_rows)
        live = backend.build(lens.unsqueeze(0) - 1, lens, pages, num_rows)
        selection = BeforeAttention(lens - 1, live) if prunes else AllRows()
        target.forward(token_ids, cache, attention, selection, features)
        return time.process_time() - started

    tap = FeatureSpec(layer_inputs=(config.num_layers - 1,))
    ways = [(False, FeatureSpec()), (True, tap), (True, FeatureSpec())]
    turns = [[seconds(*way) for way in ways] for _ in range(NUM_TURNS)]
    return [1e3 * min(of_way) for of_way in zip(*turns, strict=True)]


if __name__ == "__main__":
    sys.exit(guarded(main))
