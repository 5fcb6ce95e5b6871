"""The lossless rules: strict for greedy decoding, rejection for sampling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from spec_lab.config.choices import Choice, DraftSampling, KernelsChoice
from spec_lab.config.groups import AcceptanceConfig
from spec_lab.config.option import knob, option
from spec_lab.config.run import Run

if TYPE_CHECKING:
    from spec_lab.acceptance.strict import StrictAcceptance
    from spec_lab.build.lab import Lab
    from spec_lab.core.protocols import AcceptanceRule
    from spec_lab.record.verify_rows import RowsOrigin


@option("acceptance", "strict")
class Strict(AcceptanceConfig):
    """The longest prefix equal to the target's argmax, plus one token."""

    greedy_only = "compares with the argmax"
    keeps_greedy_text = True
    takes_fewer_drafts = True
    judges_trees = True
    keeps_the_law = True

    def build(self, lab: Lab) -> AcceptanceRule:
        from spec_lab.acceptance.strict import StrictAcceptance
        from spec_lab.acceptance.tree import StrictTreeAcceptance

        return (StrictAcceptance if lab.run.sizes is None else StrictTreeAcceptance)(lab.kernels)

    def judge(self, origin: RowsOrigin) -> StrictAcceptance:
        from spec_lab.acceptance.strict import StrictAcceptance

        return StrictAcceptance()


class RejectionMethodChoice(Choice):
    """The methods of judging drafts in lossless sampling."""

    standard = "standard", "reads the draft distribution"
    one_hot = "one_hot", "takes a draft's probability as 1, as for greedy drafts"
    block = "block"
    traversal = "traversal", "sampled siblings of tree=static"


@option("acceptance", "rejection")
class Rejection(AcceptanceConfig):
    """Lossless sampling."""

    takes_fewer_drafts = True
    judges_trees = True
    keeps_the_law = True

    method: RejectionMethodChoice = knob(RejectionMethodChoice.standard, "how drafts are judged")

    def check(self, run: Run) -> Iterator[str]:
        """Methods must fit how drafts are picked.

        standard and block divide by the probability that a draft was sampled with, which is 1 for a greedy draft.
        Dividing by the head's probability instead would bias the output. one_hot is correct for all drafts, including
        sampled ones (tests/test_rejection.py enumerates this).
        """
        method, sampling = self.method, getattr(run.drafter, "draft_sampling", None)
        if method == RejectionMethodChoice.one_hot or run.drafter.num_draft_tokens == 0:
            return
        is_traversal = method == RejectionMethodChoice.traversal
        if is_traversal != (run.tree.name == "static"):
            # Where drafts choose a tree's shape, they have another distribution than the rule would use.
            yield (
                f"acceptance.method={method} does not judge tree={run.tree.name}: traversal is for tree=static, "
                "standard and block for chains; use acceptance.method=one_hot, or another tree"
            )
        if sampling is None or run.sampling.temperature <= 0:
            yield (
                f"acceptance.method={method} needs drawn drafts, which drafter={run.drafter.name} at "
                f"sampling.temperature={run.sampling.temperature} has not; use acceptance.method=one_hot"
            )
        elif sampling == DraftSampling.greedy:
            yield (
                f"acceptance.method={method} with drafter.draft_sampling=greedy divides by other probabilities than "
                "those of the draws; use drafter.draft_sampling=distribution, or acceptance.method=one_hot"
            )
        if method == RejectionMethodChoice.block and run.kernels == KernelsChoice.triton:
            yield "acceptance.method=block has no kernel for kernels=triton; use kernels=torch"

    def build(self, lab: Lab) -> AcceptanceRule:
        """Without drafts it is one_hot, since every method then just samples from the target."""
        from spec_lab.acceptance.rejection import METHODS, RejectionAcceptance
        from spec_lab.acceptance.traversal import TraversalAcceptance
        from spec_lab.acceptance.tree import OneHotTreeAcceptance
        from spec_lab.core.draft_paths import DraftPaths

        if lab.run.sizes is None:
            method = METHODS[self.method if lab.run.drafter.drafts else RejectionMethodChoice.one_hot]
            return RejectionAcceptance(method, lab.sampling, lab.seeds, kernels=lab.kernels)
        if self.method == RejectionMethodChoice.one_hot:
            return OneHotTreeAcceptance(lab.sampling, lab.seeds, lab.kernels)
        tree: Any = lab.run.tree
        return TraversalAcceptance(
            DraftPaths(tree.paths), lab.sampling, seeds=lab.seeds, device=lab.device, replacement=tree.replacement
        )
