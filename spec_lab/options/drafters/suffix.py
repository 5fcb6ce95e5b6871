"""drafter=suffix and drafter=hybrid, which look drafts up on the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_lab.config.choices import Choice
from spec_lab.config.groups import DrafterConfig
from spec_lab.config.option import get, knob, option
from spec_lab.config.run import Run

if TYPE_CHECKING:
    from spec_lab.build.lab import Lab
    from spec_lab.core.protocols import Drafter
    from spec_lab.drafters.suffix import SuffixSizes


class HybridModel(Choice):
    """The drafters that may be the model part. mtp_vanilla may not, since it always runs all of its modules."""

    eagle3 = "eagle3"
    mtp_eagle = "mtp_eagle"
    frozen_kv = "frozen_kv"
    draft_model = "draft_model"


@option("drafter", "suffix")
class Suffix(DrafterConfig):
    """Suffix decoding. It drafts the most frequent continuation of the text's end, in this text or in outputs of ended
    requests."""

    drafts_on_host = True

    num_draft_tokens: int = knob(
        8, "most draft tokens a round, K; a round offers as many as are found", least=1, most=16
    )
    depth: int = knob(24, "most tokens of match and draft together", least=2, most=256)
    factor: float = knob(1.0, "most draft tokens for each token of the match", least=0.125, most=16)
    min_probability: float = knob(
        0.1, "a draft ends before the estimated probability of its tokens falls below this", least=0, most=1
    )
    outputs: int = knob(1000, "outputs of ended requests that are searched too; 0 is the request alone", least=0)

    def build(self, lab: Lab) -> Drafter[Any]:
        from spec_lab.drafters.none import NoDrafter
        from spec_lab.drafters.suffix import SuffixLookup

        return NoDrafter(self.num_draft_tokens, SuffixLookup(self.suffix_sizes()))

    def suffix_sizes(self) -> SuffixSizes:
        """Return the sizes of the trees that are searched."""
        from spec_lab.drafters.suffix import SuffixSizes
        from spec_lab.drafters.suffix_tree import DraftLimits

        limits = DraftLimits(self.num_draft_tokens, self.factor, self.min_probability)
        return SuffixSizes(self.depth, limits, self.outputs)


@option("drafter", "hybrid")
class Hybrid(Suffix):
    """Suffix decoding and a model's head. In a round, a request takes the drafts of the part whose expected acceptance
    is longer."""

    model: HybridModel = knob(HybridModel.eagle3, "the drafter with weights")
    head_drafts: int = knob(3, "drafts of the head in a round, at most num_draft_tokens", least=1)
    path: str | None = knob(None, "folder of the head's weights; null is what is shipped for the target")

    @property
    def head(self) -> Any:
        """The option of the head, which has room for the drafts of suffix."""
        return get("drafter", self.model)(num_draft_tokens=self.num_draft_tokens, path=self.path)

    def folder(self, run: Run) -> Path:
        """Return the folder of the head's weights."""
        folder: Path = self.head.folder(run)
        return folder

    def files(self, run: Run) -> list[Path]:
        return [self.folder(run)]

    def build(self, lab: Lab) -> Drafter[Any]:
        from spec_lab.drafters.hybrid import HybridLookup

        head: Drafter[Any] = self.head.build(replace(lab, run=replace(lab.run, drafter=self.head)))
        lookup = HybridLookup(
            self.suffix_sizes(), ("suffix", str(self.model)), min(self.head_drafts, self.num_draft_tokens)
        )
        head.requirements = replace(head.requirements, on_host=lookup)
        return head
