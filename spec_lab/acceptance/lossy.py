"""Lossy acceptance by a token law, maybe with the window of FLy, and the distance of its output from the target.

The distance of a row is total variation and KL between the distribution of the token that it emits and the target's. It
is exact, given the prefix and q. A round adds up the distances of the rows that it reached. The row after the last
draft has none, since it emits from the target's distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spec_kernels.noise_reference import Use, race, round_key, uniform
from spec_lab.acceptance.distribution import SamplingParams, at_tokens, one_hot, probabilities
from spec_lab.acceptance.emit import emit, leading, only_offered
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.acceptance.rejection import one_hot_proposal, sampled_proposal
from spec_lab.acceptance.token_laws import TokenLaw, entropy, total_variation
from spec_lab.core.protocols import RuleTraits
from spec_lab.core.types import AcceptanceInputs, Request, Verification


@dataclass(frozen=True, slots=True)
class Window:
    """FLy (arXiv 2511.22972, vLLM #50808): forgives a rejected draft if the target is unsure there and agrees
    afterwards.

    There are three conditions. The entropy of the target's `topk` likeliest tokens, renormalised, is at least
    `least_entropy` nats. p(x) is above 0. The next `length` drafts all pass without being forgiven. A draft that is
    followed by fewer drafts is not forgiven. At temperature 0, p is the softmax of the raw logits.
    """

    length: int
    least_entropy: float
    topk: int

    def is_unsure(self, p: torch.Tensor) -> torch.Tensor:
        """Return whether the target is unsure in each row [...] of p [..., vocab]."""
        top = p.topk(min(self.topk, p.shape[-1]), dim=-1).values
        return entropy(top / top.sum(dim=-1, keepdim=True)).squeeze(-1) >= self.least_entropy

    def agreed(self, chances: torch.Tensor) -> torch.Tensor:
        """Return the probability [batch, K] that the next `length` drafts after each draft all pass.

        `chances` [batch, K] are the probabilities that single drafts pass.
        """
        padded = torch.nn.functional.pad(chances, (0, self.length))
        windows = padded.unfold(1, self.length, 1)[:, 1:]
        return windows.prod(dim=-1)


@dataclass(slots=True)
class JudgedDrafts:
    """The facts that a rule has about the K drafts of a round before it draws random numbers.

    Attributes:
        p: [batch, N, vocab] the target's distribution.
        q: [batch, K, vocab] the distribution that drafts were drawn from.
        accepts: [batch, K, vocab] the acceptance probability of every token.
        forgivable: [batch, K, vocab] whether a rejected token may be forgiven; None without a window.
    """

    p: torch.Tensor
    q: torch.Tensor
    accepts: torch.Tensor
    forgivable: torch.Tensor | None = None


class LossyAcceptance:
    """Accepts the leading drafts that pass or are forgiven, and draws the token after them."""

    traits = RuleTraits(lossless=False)

    def __init__(self, law: TokenLaw, sampling: SamplingParams, seeds: SlotSeeds, window: Window | None = None) -> None:
        self._law = law
        self._sampling = sampling
        self._seeds = seeds
        self._window = window

    def admit(self, slot: int, request: Request) -> None:
        self._seeds.admit(slot, request)

    def first_tokens(self, logits: torch.Tensor, slot_ids: torch.Tensor, kv_lens: torch.Tensor) -> torch.Tensor:
        return race(probabilities(logits, self._sampling), round_key(self._seeds.of(slot_ids), kv_lens, 0, Use.PROMPT))

    def accept(self, inputs: AcceptanceInputs) -> Verification:
        judged, drafts = self.judge(inputs), inputs.draft_tokens
        seeds, kv_lens = self._seeds.of(inputs.slot_ids), inputs.kv_lens
        rows = torch.arange(drafts.shape[1], device=seeds.device)
        draws = uniform(round_key(seeds.unsqueeze(1), kv_lens.unsqueeze(1), rows, Use.ACCEPT))
        passed = only_offered(draws < at_tokens(judged.accepts, drafts), inputs.num_drafts)
        num_accepted = leading(passed | self.forgiven(judged, drafts, passed))
        last = race(self.last_law(judged, inputs, num_accepted), round_key(seeds, kv_lens, num_accepted, Use.EMIT))
        verification = emit(inputs, num_accepted, last)
        distances = self.distances(judged, inputs)
        reached = (rows <= num_accepted.unsqueeze(1)) & inputs.active.unsqueeze(1)
        verification.distance = torch.where(reached.unsqueeze(-1), distances, 0).sum(dim=1)
        return verification

    def judge(self, inputs: AcceptanceInputs) -> JudgedDrafts:
        """Apply the token law to the row of every draft. Without draft logits q is one-hot."""
        p = probabilities(inputs.logits, self._sampling)
        q = one_hot_proposal(inputs) if inputs.draft_logits is None else sampled_proposal(inputs)
        accepts = self._law.accepts(p[:, :-1], q)
        if self._window is None:
            return JudgedDrafts(p, q, accepts)
        raw = p[:, :-1] if self._sampling.temperature > 0 else torch.softmax(inputs.logits[:, :-1].float(), dim=-1)
        return JudgedDrafts(p, q, accepts, self._window.is_unsure(raw).unsqueeze(-1) & (raw > 0))

    def forgiven(self, judged: JudgedDrafts, drafts: torch.Tensor, passed: torch.Tensor) -> torch.Tensor:
        """Return which drafts [batch, K] are forgiven if they are rejected, given which drafts `passed` [batch, K]."""
        if self._window is None or judged.forgivable is None:
            return torch.zeros_like(passed)
        behind = self._window.agreed(passed.to(judged.p.dtype)) > 0
        return at_tokens(judged.forgivable, drafts) & behind

    def last_law(self, judged: JudgedDrafts, inputs: AcceptanceInputs, num_accepted: torch.Tensor) -> torch.Tensor:
        """Return the distribution [batch, vocab] of the last token: that of the rejected draft's replacement, or p if
        none was rejected."""
        drafts, vocab_size = inputs.draft_tokens, judged.p.shape[-1]
        if drafts.shape[1] == 0:
            return judged.p[:, 0]
        place = num_accepted.clamp(max=drafts.shape[1] - 1)
        p, q = (_row(law, place) for law in (judged.p, judged.q))
        failed = one_hot(at_tokens(drafts, place), vocab_size, p.dtype)
        offered = inputs.offered
        has_failed = num_accepted < drafts.shape[1]
        if offered is not None:
            has_failed = has_failed & at_tokens(offered, place)
        behind = torch.where(has_failed.unsqueeze(1), self._law.spread(p, q, failed), _row(judged.p, num_accepted))
        # If a draft should always pass, only rounding can reject it, and then nothing may be left to draw from.
        return torch.where((behind > 0).any(dim=-1, keepdim=True), behind, p)

    def emitted_law(self, judged: JudgedDrafts, inputs: AcceptanceInputs) -> torch.Tensor:
        """Return the distribution [batch, K, vocab] that the row of each offered draft emits from, given the prefix and
        q.

        With a window it is also conditional on the later drafts, whose acceptance decides which drafts are forgiven.
        """
        p, passes = judged.p[:, :-1], judged.accepts
        if self._window is not None and judged.forgivable is not None:
            chances = at_tokens(judged.accepts, inputs.draft_tokens)
            if inputs.offered is not None:
                chances = torch.where(inputs.offered, chances, 0)
            behind = self._window.agreed(chances).unsqueeze(-1)
            passes = passes + (1 - passes) * behind * judged.forgivable
        return judged.q * passes + self._law.spread(p, judged.q, judged.q * (1 - passes))

    def distances(self, judged: JudgedDrafts, inputs: AcceptanceInputs) -> torch.Tensor:
        """Return total variation and KL in nats [batch, K, 2] from the target; 0 for drafts that are not offered."""
        p, emitted = judged.p[:, :-1], self.emitted_law(judged, inputs)
        ratio = torch.where(emitted > 0, emitted / p, 1)
        divergence = torch.special.xlogy(emitted, ratio).sum(dim=-1, keepdim=True).clamp(min=0)
        distances = torch.cat((total_variation(emitted, p), divergence), dim=-1)
        return distances if inputs.offered is None else torch.where(inputs.offered.unsqueeze(-1), distances, 0)


def _row(laws: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Return the row [batch, vocab] of `laws` [batch, rows, vocab] at index `place` [batch]."""
    return laws.gather(1, place.view(-1, 1, 1).expand(-1, 1, laws.shape[-1])).squeeze(1)
