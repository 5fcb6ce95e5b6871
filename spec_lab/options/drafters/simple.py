"""The drafters without weights that draft on the device: none, random, oracle, ngram."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from spec_lab.config.groups import DrafterConfig
from spec_lab.config.option import knob, option
from spec_lab.config.run import Run

if TYPE_CHECKING:
    from spec_lab.build.lab import Lab
    from spec_lab.core.protocols import Drafter


@option("drafter", "none")
class NoDrafter(DrafterConfig):
    """Plain decoding."""

    drafts = False
    ingests_in_graphs = True

    num_draft_tokens: int = knob(0, "0: nothing is drafted", least=0, most=0)

    def build(self, lab: Lab) -> Drafter[Any]:
        from spec_lab.drafters.none import NoDrafter

        return NoDrafter()


@option("drafter", "random")
class Random(DrafterConfig):
    """Uniform tokens, the lower bound."""

    def build(self, lab: Lab) -> Drafter[Any]:
        from spec_lab.drafters.random import RandomDrafter

        return RandomDrafter(self.num_draft_tokens, lab.target.vocab_size, lab.seeds)


@option("drafter", "oracle")
class Oracle(DrafterConfig):
    """Replays plain decoding's output, recorded before the timed part: how fast a run is if every draft is right."""

    follows_greedy_text = "replays a greedy continuation"

    def build(self, lab: Lab) -> Drafter[Any]:
        from spec_lab.drafters.oracle import OracleDrafter

        return OracleDrafter(self.num_draft_tokens, lab.history())


@option("drafter", "ngram")
class Ngram(DrafterConfig):
    """Prompt lookup. It looks for an earlier place of the text's last max_ngram to min_ngram tokens, and drafts the
    tokens after it. The longest match counts, and of several the latest."""

    drafts_trees = True
    tells_offers = False  # places for which it finds nothing count as offered

    max_ngram: int = knob(4, "longest suffix of the text that is looked up, in tokens", most=1024)
    min_ngram: int = knob(2, "shortest suffix of the text that is looked up, in tokens", least=1)

    def check(self, run: Run) -> Iterator[str]:
        if self.min_ngram > self.max_ngram:
            yield f"drafter.min_ngram={self.min_ngram} is above drafter.max_ngram={self.max_ngram}; exchange them"
        if run.tree.name == "static":  # looked-up continuations have no probability ranks
            yield "drafter=ngram has no ranks for tree=static; use tree=dynamic"

    def build(self, lab: Lab) -> Drafter[Any]:
        from spec_lab.core.kernel_set import Op
        from spec_lab.drafters.ngram import NgramDrafter, extend_and_look_up
        from spec_lab.drafters.ngram_tree import NgramTreeDrafter

        lengths, sizes = (self.max_ngram, self.min_ngram), lab.run.sizes
        if sizes is not None:
            return NgramTreeDrafter(sizes.depth, sizes.num_rows, sizes.topk, *lengths, lab.history())
        look_up = lab.kernels.get(Op.LOOK_UP, extend_and_look_up)
        return NgramDrafter(self.num_draft_tokens, *lengths, lab.history(), look_up)
