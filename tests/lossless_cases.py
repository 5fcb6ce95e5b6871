"""The table of cases of `test_lossless.py`: which drafter runs on which target, with what beside it.

A full product would take hours, so sizes go round with the case: every drafter meets every pruning with every batch
size, and over these rows every number of drafts, page size, prompt chunk, padding and target. A third of these rows, in
which every drafter meets every pruning, are in the default tier; `SLOW_CASES` has the others, and more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from spec_lab.menu.config import TreeConfig
from spec_lab.options.trees.dynamic import DynamicTreeConfig
from spec_lab.options.trees.static import StaticTreeConfig
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
    "ngram": SOME,
    "oracle": SOME,
    "random": SOME,
}
"""The numbers of drafts that each drafter is tested with."""

CAPTURED = ("eagle3", "draft_model", "mtp_eagle", "mtp_vanilla", "frozen_kv", "ngram", "oracle", "random")
"""Every drafter whose rounds can be captured."""
TRAINED = ("eagle3", "draft_model", "mtp_eagle", "mtp_vanilla", "frozen_kv")
BATCHES, PAGES, CHUNKS, PADDINGS = (1, 3, 8), (1, 4, 16), (1, 5, 512), (1, 4)
POSITIONS = ("last", "bonus")

TREES: dict[str, TreeConfig] = {
    "none": TreeConfig(),
    "dynamic": DynamicTreeConfig(topk=3, depth=3, num_rows=9),
    "static": StaticTreeConfig(paths=[[1], [0], [0, 0], [0, 2], [1, 0], [0, 0, 1], [0, 0, 0]]),
    "deep": DynamicTreeConfig(topk=2, depth=5, num_rows=16),
    "flat": DynamicTreeConfig(topk=4, depth=1, num_rows=4),
}
"""Trees by name; their depths are among the numbers of drafts of those that draft them."""

TREE_DRAFTERS = ("frozen_kv", "eagle3", "mtp_eagle", "draft_model")


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

    def __str__(self) -> str:
        sizes = f"batch{self.batch_size}-k{self.num_draft_tokens}-page{self.page_size}-chunk{self.chunk}"
        options = "".join(f"-{value}" for _, value in self.options)
        options += "" if self.tree == "none" else f"-{self.tree}"
        return f"{self.drafter}{options}-{self.prune}-{self.graph}-{sizes}-pad{self.padding}-{self.target}"


def eager_cases() -> Iterator[Case]:
    """Every drafter with every pruning and batch size; everything else goes round, at paces of its own."""
    for number, (drafter, counts) in enumerate(DRAFTERS.items()):
        for row, (prune, batch_size) in enumerate(product(PRUNING, BATCHES)):
            turn = row + number
            yield Case(
                list(TARGETS)[(turn + row // 3) % 3],
                drafter,
                prune,
                batch_size,
                counts[(5 * row + row // 8) % len(counts)],
                PAGES[(turn + row // 6) % 3],
                CHUNKS[turn // 2 % 3],
                PADDINGS[turn // 2 % 2],
                options=(("position", POSITIONS[row // 4 % 2]),) if drafter == "frozen_kv" else (),
            )


def captured_cases() -> Iterator[Case]:
    """Every drafter whose rounds can be captured, under every graph mode; each drafter starts with another mode."""
    modes = list(MODES)
    for number, drafter in enumerate(CAPTURED):
        for turn in range(len(modes)):
            graph = modes[(number + turn) % len(modes)]
            yield Case("qwen3", drafter, "catchup", batch_size=3, page_size=4, graph=graph)


def slow_cases() -> Iterator[Case]:
    """Every drafter on every target with every pruning and number of drafts, at a batch size that goes round."""
    for drafter, counts in DRAFTERS.items():
        for target, (p, prune), (i, batch_size), (j, count) in product(
            TARGETS, enumerate(PRUNING), enumerate(BATCHES), enumerate(counts)
        ):
            if (i + j + p - list(TARGETS).index(target)) % 3:
                continue
            sizes = PAGES[(i + j) % 3], CHUNKS[(i + 2 * j) % 3], PADDINGS[(i + j) % 2]
            case = Case(target, drafter, prune, batch_size, count, *sizes)
            positions = POSITIONS if drafter == "frozen_kv" and count == 3 else ()
            yield from [replace(case, options=(("position", position),)) for position in positions] or [case]


EAGER = list(eager_cases())
QUICK = [case for row, case in enumerate(EAGER) if row % 3 == row // 3 % 3]
"""A third of them: each drafter with each pruning at one batch size, which goes round."""


def tree_cases() -> Iterator[Case]:
    """Every drafter of trees with every tree and every graph mode that runs them; everything else goes round."""
    trees = [name for name in TREES if name != "none"]
    modes = ["eager", *(mode for mode in MODES if mode != "step_replay")]
    for turn, (tree, graph, drafter) in enumerate(product(trees, modes, TREE_DRAFTERS)):
        yield Case(
            list(TARGETS)[turn % 3],
            drafter,
            list(PRUNING)[turn % 4],
            BATCHES[turn // 3 % 3],
            page_size=PAGES[turn // 2 % 3],
            chunk=CHUNKS[turn // 4 % 3],
            padding=PADDINGS[turn % 2],
            graph=graph,
            tree=tree,
        )
    for turn, (tree, graph) in enumerate(product(("dynamic", "deep", "flat"), modes)):
        sizes = {"page_size": PAGES[turn % 3], "padding": 4 if graph == "eager" else 1}
        yield Case(list(TARGETS)[turn % 3], "ngram", "none", BATCHES[turn % 3], graph=graph, tree=tree, **sizes)


QUICK_TREES = list(tree_cases())[::48]
QUICK_CAPTURED = list(captured_cases())[::4]
CASES = [*QUICK, *QUICK_CAPTURED, *QUICK_TREES]
SLOW_CASES = list(
    dict.fromkeys(
        [
            *slow_cases(),
            *(c for c in EAGER if c not in QUICK),
            *(c for c in captured_cases() if c not in QUICK_CAPTURED),
            *(c for c in tree_cases() if c not in QUICK_TREES),
        ]
    )
)
