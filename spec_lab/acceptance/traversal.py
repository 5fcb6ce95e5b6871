"""Traversal verification: judges a tree of sampled drafts from its leaves to the root (Weng et al., arXiv 2505.12398).

A path is judged as a whole. So a draft that the target finds unlikely can be compensated by likely ones after it, as in
block verification. On a chain it is block verification. After a draft is rejected, its siblings can still be accepted.

Each row v has a measure m over the next token, with total w. Its children c were drawn one after another, each from a
distribution q that may depend on the children drawn before it. The rule is:

    judge(v, m):  for each child c:  judge(c, P p(. | c)) with P = min(1, m(c) / q(c)); if it accepts, stop;
                                     r = max(m - q, 0), S = total of r;  m <- r / (S + 1 - w), w <- S / (S + 1 - w)
                  accept v with probability w, and draw the token after it from m / w

The root has m = p, w = 1.

Claim: for every x, the probability that judge(v, m) accepts v or a descendant, and that the token emitted after v is x,
is m(x). After x the text continues as the target's does. The proof is by induction over the tree. Without children,
judge(v, m) accepts v with probability w, and draws x from m / w.

With a child c ~ q, judging c accepts with probability P. So x is emitted through this child with probability q(x)
min(1, m(x) / q(x)) = min(q(x), m(x)). The rest, max(m - q, 0) = r, must come from later children or from v. Judging
this child accepts nothing with probability 1 - total(min(q, m)) = 1 - (w - S). Conditional on that, the rest must be
emitted with the measure r / (S + 1 - w), whatever c was.

So the next child may be drawn without replacement, from the tokens other than c. It does not matter which siblings have
children, as long as the shape of the tree does not depend on the drawn tokens. So the root emits from p, like plain
sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_kernels.noise_reference import Use, race, round_key, uniform
from spec_lab.acceptance.distribution import SamplingParams, at_tokens, probabilities, total
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.acceptance.rejection import METHODS, RejectionAcceptance
from spec_lab.acceptance.tokenwise import clipped_ratio
from spec_lab.core.draft_paths import DraftPaths
from spec_lab.core.tree_protocols import JudgedRows, Walk
from spec_lab.core.types import Verification


@dataclass(slots=True)
class TraversalDecision:
    """The rule's decision up to the random draws.

    Attributes:
        thresholds: [batch, N] a row passes its test if its draw is below this. Rows are tested from the leaves to the
            root, and the first row that passes ends the path.
        weights: [batch, N, vocab] the weights of the token after each row, if the path ends there.
    """

    thresholds: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class Siblings:
    """The children of one rank below the branches of one level: all first children, or all second ones, and so on.

    Attributes:
        among: [count] the indices, among the level's branches, of those that have such a child.
        rows: [count] the rows of these branches.
        children: [count] the rows of the children.
    """

    among: torch.Tensor
    rows: torch.Tensor
    children: torch.Tensor


@dataclass(frozen=True, slots=True)
class BranchLevel:
    """The branches of one level: their rows [width], their indices among all branches [width], and their children."""

    rows: torch.Tensor
    numbers: torch.Tensor
    siblings: tuple[Siblings, ...]


def branch_levels(paths: DraftPaths, device: torch.device) -> list[BranchLevel]:
    """Find the branches of each level but the last, and their children by rank."""
    return [_level(paths, depth, device) for depth in range(paths.depth)]


def _level(paths: DraftPaths, depth: int, device: torch.device) -> BranchLevel:
    rows = paths.branches_at(depth)
    by_rank = []
    for rank in range(max(len(paths.children[row]) for row in rows)):
        among = [index for index, row in enumerate(rows) if rank < len(paths.children[row])]
        having = [rows[index] for index in among]
        children = [paths.children[row][rank] for row in having]
        by_rank.append(Siblings(*(torch.tensor(part, device=device) for part in (among, having, children))))
    numbers = [paths.branches.index(row) for row in rows]
    return BranchLevel(torch.tensor(rows, device=device), torch.tensor(numbers, device=device), tuple(by_rank))


def traversal_decision(
    p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor, levels: list[BranchLevel], replacement: bool
) -> TraversalDecision:
    """Compute the test of each row, for the case that all rows judged before it are rejected.

    All tests follow from p, q and the drafts. No random draw of the rule is needed for them.

    Args:
        p: [batch, N, vocab] the target's probabilities after each row.
        q: [batch, branches, vocab] the distribution from which the first child of each branch was drawn.
        tokens: [batch, N].
        replacement: whether the other children were drawn from the same distribution, or without the earlier tokens.
    """
    thresholds = torch.ones_like(p[..., 0])
    weights = torch.empty_like(p)
    weights[:, 0] = p[:, 0]
    for level in levels:
        w, m, proposal = (
            part.index_select(1, which)
            for part, which in ((thresholds, level.rows), (weights, level.rows), (q, level.numbers))
        )
        for siblings in level.siblings:
            drafts = tokens.index_select(1, siblings.children)
            w_before, m_before, drawn_from = (part.index_select(1, siblings.among) for part in (w, m, proposal))
            at_m, at_q = at_tokens(m_before, drafts), at_tokens(drawn_from, drafts)
            # A token with q = 0 only fills a child's place for which no token was left to draw. It changes nothing.
            follows = torch.where(at_q > 0, clipped_ratio(at_m, at_q), 0)
            thresholds.index_copy_(1, siblings.children, follows)
            below = follows.unsqueeze(-1) * p.index_select(1, siblings.children)
            weights.index_copy_(1, siblings.children, below)
            rest = (m_before - drawn_from).clamp(min=0)
            left = total(rest).to(p.dtype)
            denominator = left + (1 - w_before)
            # 0 / 0 means w = 1 and m = q. Then the child is always accepted, so any value will do.
            w_after = torch.where(denominator > 0, left / denominator, 1)
            thresholds.index_copy_(1, siblings.rows, w_after)
            weights.index_copy_(1, siblings.rows, rest)
            w = w.index_copy(1, siblings.among, w_after)
            m = m.index_copy(1, siblings.among, rest / denominator.clamp(min=_LEAST).unsqueeze(-1))
            if not replacement:
                proposal = proposal.index_copy(1, siblings.among, without(drawn_from, drafts))
    # All weights of a row are 0 if it cannot pass, or by rounding; p is then as good as any.
    some = (weights > 0).any(dim=-1, keepdim=True)
    return TraversalDecision(thresholds, torch.where(some, weights, p))


_LEAST = 2.0**-100
"""Replaces a denominator of 0, whose numerator is also 0."""


def without(q: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """Return q [..., vocab] without `drafts` [...], renormalised; zeros if nothing is left."""
    rest = q.scatter(-1, drafts.unsqueeze(-1), 0)
    # `total` has an absolute error. Scaling by the largest entry keeps the relative error small. Scaled by that alone,
    # a nearly uniform q over a large vocabulary would sum to more than `total` can hold.
    largest, room = rest.amax(dim=-1, keepdim=True), 2.0 ** (rest.shape[-1] // 2048).bit_length()
    scaled = torch.where(largest > 0, rest / largest / room, 0)
    return torch.where(largest > 0, scaled / total(scaled).to(q.dtype).unsqueeze(-1), 0)


class TraversalAcceptance(RejectionAcceptance):
    """Traversal verification, for trees of a fixed shape. On a chain it is block verification, with the same draws."""

    def __init__(
        self,
        paths: DraftPaths,
        sampling: SamplingParams,
        seeds: SlotSeeds,
        device: torch.device,
        replacement: bool = False,
    ) -> None:
        super().__init__(METHODS["block"], sampling, seeds)
        self._replacement = replacement
        self._levels = branch_levels(paths, device)
        self._leaves_first = torch.tensor(paths.leaves_first(), device=device)
        self._depths = torch.tensor([len(path) for path in paths.paths], device=device)
        num_rows, depth = len(paths.paths), paths.depth
        # Past the path's end, column j holds row j, as in a chain, or the last row if there is no row j.
        stays = [min(column, num_rows - 1) for column in range(depth + 1)]
        ways = [paths.way_to(row) for row in range(num_rows)]
        self._ways = torch.tensor([[*way, *stays[len(way) :]] for way in ways], device=device)

    def walk(self, judged: JudgedRows, depth: int) -> Walk:
        assert judged.draft_logits is not None, "this rule reads the drafter's logits"
        seeds, kv_lens = self._seeds.of(judged.slot_ids), judged.kv_lens
        p = probabilities(judged.logits, self._sampling)
        q = torch.softmax(judged.draft_logits, dim=-1, dtype=torch.promote_types(judged.draft_logits.dtype, p.dtype))
        decision = traversal_decision(p, q, judged.tokens, self._levels, self._replacement)
        drafts = torch.arange(judged.tokens.shape[1] - 1, device=seeds.device)
        draws = uniform(round_key(seeds.unsqueeze(1), kv_lens.unsqueeze(1), drafts, Use.ACCEPT))
        passed = torch.cat((torch.ones_like(judged.active.unsqueeze(1)), draws < decision.thresholds[:, 1:]), dim=1)
        first = passed.index_select(1, self._leaves_first).int().argmax(dim=1)
        end = self._leaves_first.index_select(0, first)
        weights = decision.weights.gather(1, end.view(-1, 1, 1).expand(-1, 1, p.shape[-1])).squeeze(1)
        last = race(weights, round_key(seeds, kv_lens, end, Use.EMIT))
        path, num_accepted = self._ways.index_select(0, end), self._depths.index_select(0, end)
        tokens = judged.tokens.gather(1, path).roll(-1, dims=1).scatter(1, num_accepted.unsqueeze(1), last.unsqueeze(1))
        return Walk(Verification(tokens, torch.where(judged.active, num_accepted + 1, 0)), path)
