"""drafter=ngram: its keys, refusals and loaders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import DrafterConfig, RunConfig, TreeConfig, knob
from spec_lab.menu.option import DrafterOption
from spec_lab.options.trees.dynamic import DynamicTreeConfig

if TYPE_CHECKING:
    from spec_lab.wiring.drafting import DrafterFactory
    from spec_lab.wiring.models import DrafterBuild


@dataclass
class NgramDrafterConfig(DrafterConfig):
    """drafter=ngram: prompt lookup. It looks for an earlier place of the text's last max_ngram to min_ngram tokens, and
    drafts the tokens after it. The longest match counts, and of several the latest."""

    name: str = "ngram"
    max_ngram: int = knob(4, "longest suffix of the text that is looked up, in tokens", most=1024)
    min_ngram: int = knob(2, "shortest suffix of the text that is looked up, in tokens")


def ngram_lengths(config: RunConfig) -> str | None:
    """The shortest suffix that is looked up must not be longer than the longest."""
    options: Any = config.drafter
    if 1 <= options.min_ngram <= options.max_ngram:
        return None
    return (
        f"drafter.min_ngram={options.min_ngram} must be at least 1 and at most drafter.max_ngram={options.max_ngram}; "
        "use drafter.min_ngram=2 drafter.max_ngram=4"
    )


def continuations_have_no_ranks(config: RunConfig) -> str | None:
    """Of the trees only tree=dynamic is accepted, since looked-up continuations have no probability ranks."""
    if config.tree.name in (TreeConfig.name, DynamicTreeConfig.name):
        return None
    return f"drafter=ngram has no probability ranks for tree={config.tree.name}; use tree=dynamic, or drafter=eagle3"


def load(chosen: Chosen, options: NgramDrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Make drafter=ngram."""
    from spec_lab.drafters.ngram import NgramDrafter, extend_and_look_up
    from spec_lab.operators.kernel_set import Op
    from spec_lab.wiring.drafting import token_history

    most, look_up = options.num_draft_tokens, build.kernels.get(Op.LOOK_UP, extend_and_look_up)
    return lambda resources: NgramDrafter(
        most, options.max_ngram, options.min_ngram, token_history(resources, build), look_up
    )


def load_tree(chosen: Chosen, options: NgramDrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Make drafter=ngram for trees."""
    from spec_lab.drafters.ngram_tree import NgramTreeDrafter
    from spec_lab.wiring.drafting import token_history

    sizes = chosen.sizes
    assert sizes is not None, "called only for runs with a tree"
    return lambda resources: NgramTreeDrafter(
        sizes.depth, sizes.num_rows, sizes.topk, options.max_ngram, options.min_ngram, token_history(resources, build)
    )


ROW = DrafterOption(
    name="ngram",
    schema=NgramDrafterConfig,
    load=load,
    refusals=(ngram_lengths, continuations_have_no_ranks),
    no_moves="looks its drafts up",
    load_tree=load_tree,
    no_branch_keys=True,
)
