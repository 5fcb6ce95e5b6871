"""The table of cases of `test_lossless.py`: which drafter runs on which target, with what beside it.

In `CASES` every two values meet that may stand together. `PRODUCT` has every drafter on every target with every pruning
and number of drafts, and every tree under every graph mode; it is run by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from spec_lab.checkpoints.block_config import HeadKind, Slots
from spec_lab.config.groups import TreeConfig
from spec_lab.options.trees import DynamicTreeConfig, StaticTreeConfig
from tests.covering import covering_array
from tests.graph_lab import MODES
from tests.lab import PRUNING

TARGETS: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3", "seed": 1, "eos_token_id": [2, 19]},
    "llama": {"family": "llama", "num_key_value_heads": 4, "eos_token_id": [2, 18]},
    "qwen2_sliding": {
        "family": "qwen2",
        "seed": 1,
        "eos_token_id": 16,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 4,
    },
}
"""Options of `make_tiny_target` by name."""

UP_TO_8, SOME = (1, 2, 3, 4, 5, 6, 7, 8), (1, 3, 5)
DRAFTERS: dict[str, tuple[int, ...]] = {
    "none": (0,),
    "eagle3": UP_TO_8,
    "draft_model": UP_TO_8,
    "mtp_eagle": UP_TO_8,
    "mtp_vanilla": (1, 2, 3),  # a module a draft: the tiny checkpoint has three
    "frozen_kv": UP_TO_8,
    "dflash": UP_TO_8,
    "p_eagle": SOME,
    "ngram": SOME,
    "oracle": SOME,
    "random": SOME,
    "suffix": SOME,
    "hybrid": SOME,
}
"""The numbers of drafts that each drafter is tested with."""

KNOBS: dict[str, dict[str, Any]] = {
    "dflash": {"head": HeadKind.markov, "slots": Slots.anchor_first, "confidence": True}
}
"""Knobs by which a drafter reads the weights that it is taught."""

TRAINED = ("eagle3", "draft_model", "mtp_eagle", "mtp_vanilla", "frozen_kv", "dflash")
CAPTURED = (*TRAINED, "p_eagle", "ngram", "oracle", "random", "suffix", "hybrid")
"""Every drafter whose rounds can be captured."""
GUESSERS = {
    "ngram": ("eager", "full_loop", "overlap", "round"),
    "oracle": ("eager", "round", "step_replay"),
    "random": ("eager", "full_loop", "verify_eager"),
    "suffix": ("eager", "split_seed"),
    "hybrid": ("eager", "step_replay", "round"),
}
"""Drafters without layers of their own to capture, and the graph modes of each in `CASES`: together, all of them."""
BATCHES, PAGES, CHUNKS, PADDINGS = (1, 3, 8), (1, 4, 16), (1, 5, 512), (1, 4)
GATHERING = ("post_attention", "catchup")
"""Prunings of the catch-up step, which a block drafter asks the host for."""

OPTIONS = ((), (("position", "bonus"),))

TREES: dict[str, TreeConfig] = {
    "none": TreeConfig(),
    "dynamic": DynamicTreeConfig(topk=3, depth=3, num_rows=9),
    "static": StaticTreeConfig(paths=[[1], [0], [0, 0], [0, 2], [1, 0], [0, 0, 1], [0, 0, 0]]),
    "deep": DynamicTreeConfig(topk=2, depth=5, num_rows=16),
    "flat": DynamicTreeConfig(topk=4, depth=1, num_rows=4),
}
"""Trees by name."""
DEPTHS = {"dynamic": 3, "static": 3, "deep": 5, "flat": 1}
"""Depths of trees, which stand for numbers of drafts."""

TREE_DRAFTERS = ("frozen_kv", "eagle3", "mtp_eagle", "draft_model", "dflash", "p_eagle")

PLANS = ("none", "drawn", "cost")
PLANNED = (*TRAINED, "p_eagle", "ngram")


@dataclass(frozen=True, slots=True)
class Case:
    """One engine of the table: which drafter drafts for which target, and the sizes under which both run.

    Attributes:
        page_size: cache positions of a page.
        chunk: the most prompt rows of one forward.
        padding: an eager batch is rounded up to a multiple of it; a captured one has its own sizes.
        graph: a key of `MODES`, or "eager".
        options: further knobs of the drafter.
        tree: a key of `TREES`, whose depth stands for the number of drafts.
        plan: `drafter.plan`.
    """

    target: str
    drafter: str
    prune: str = "none"
    batch_size: int = 1
    num_draft_tokens: int = 3
    page_size: int = 16
    chunk: int = 512
    padding: int = 1
    graph: str = "eager"
    options: tuple[tuple[str, Any], ...] = ()
    tree: str = "none"
    plan: str = "none"

    def __str__(self) -> str:
        sizes = f"batch{self.batch_size}-k{self.num_draft_tokens}-page{self.page_size}-chunk{self.chunk}"
        options = "".join(f"-{value}" for _, value in self.options)
        options += "" if self.tree == "none" else f"-{self.tree}"
        options += "" if self.plan == "none" else f"-{self.plan}"
        return f"{self.drafter}{options}-{self.prune}-{self.graph}-{sizes}-pad{self.padding}-{self.target}"


FACTORS: dict[str, Any] = {
    "drafter": list(DRAFTERS),
    "tree": list(TREES),
    "num_draft_tokens": sorted({count for counts in DRAFTERS.values() for count in counts}),
    "graph": ["eager", *MODES],
    "target": list(TARGETS),
    "prune": list(PRUNING),
    "batch_size": BATCHES,
    "page_size": PAGES,
    "chunk": CHUNKS,
    "padding": PADDINGS,
    "options": OPTIONS,
    "plan": PLANS,
}


def may_stand_together(row: dict[str, Any]) -> bool:
    """Tell whether no two values exclude each other: the lab refuses them, or one says nothing beside the other."""
    drafter, graph, tree = row.get("drafter"), row.get("graph", "eager"), row.get("tree", "none")
    num_drafts, padding = row.get("num_draft_tokens"), row.get("padding")
    return not (
        (drafter is not None and num_drafts is not None and num_drafts not in DRAFTERS[drafter])
        or (tree != "none" and num_drafts is not None and num_drafts != DEPTHS[tree])
        or (tree != "none" and drafter not in (None, *TREE_DRAFTERS, *(("ngram",) if tree != "static" else ())))
        or (graph != "eager" and drafter not in (None, *CAPTURED))
        or (graph == "overlap" and drafter in ("suffix", "hybrid"))
        or (graph == "step_replay" and tree != "none")
        or (graph != "eager" and padding not in (None, PADDINGS[0]))
        or (row.get("options") and drafter not in (None, "frozen_kv"))
        or (row.get("plan", "none") != "none" and (tree == "static" or drafter not in (None, *PLANNED)))
        or (drafter in ("dflash", "p_eagle") and graph == "step_replay")
        or (drafter == "dflash" and graph != "eager" and row.get("prune") in GATHERING)
    )


def every_case() -> Iterator[Case]:
    """Every drafter with every tree or number of drafts, graph mode, pruning and option; the rest goes round."""
    names = ("drafter", "tree", "num_draft_tokens", "graph", "prune", "options")
    rows = (dict(zip(names, values, strict=True)) for values in product(*(FACTORS[name] for name in names)))
    for turn, row in enumerate(filter(may_stand_together, rows)):
        padding = PADDINGS[turn % 2] if row["graph"] == "eager" else PADDINGS[0]
        sizes = BATCHES[turn // 2 % 3], PAGES[turn // 3 % 3], CHUNKS[turn // 4 % 3]
        is_planned = row["tree"] != "static" and row["drafter"] in PLANNED
        yield Case(
            **row,
            target=list(TARGETS)[turn % 3],
            batch_size=sizes[0],
            page_size=sizes[1],
            chunk=sizes[2],
            padding=padding,
            plan=PLANS[turn % len(PLANS)] if is_planned else "none",
        )


NUMBERS = (0, 1, 3, 5, 8)
"""The numbers of drafts in `CASES`: those between are as those beside them."""


def may_meet(row: dict[str, Any]) -> bool:
    """Tell whether values that may stand together also do in `CASES`."""
    graphs = GUESSERS.get(row.get("drafter", ""))
    return may_stand_together(row) and (graphs is None or row.get("graph", "eager") in graphs)


CASES = [Case(**row) for row in covering_array(FACTORS | {"num_draft_tokens": NUMBERS}, may_meet)]
PRODUCT = list(every_case())
