"""Token laws: the probability that a draft is accepted, and the distribution of the token that replaces a rejected one.

A token law judges every row by itself, from two distributions [..., vocab]. p is the target's, after temperature, top-k
and top-p. q is the one that the draft was drawn from, one-hot for a greedy draft. Let a(x) be the probability that a
draft x is accepted, and r_x the distribution of the token that replaces a rejected x. The row emits

    e(y) = q(y) a(y) + sum over x of q(x) (1 - a(x)) r_x(y).

`accepts` returns a. `spread` returns the second term, with any weights `failed` for q (1 - a). One-hot weights give
r_x, from which the last token of a round is drawn. Both are pure and keep the dtype of their inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from spec_lab.acceptance.tokenwise import clipped_ratio

BISECTIONS = 60
"""Number of bisection steps. Each halves an interval of logarithms, so they exhaust the precision of float64."""


class TokenLaw(Protocol):
    """Judges each draft by p and q of its own row."""

    def accepts(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Return the acceptance probability a(x) of every token x, [..., vocab]."""
        ...

    def spread(self, p: torch.Tensor, q: torch.Tensor, failed: torch.Tensor) -> torch.Tensor:
        """Return the sum over x of failed(x) r_x, [..., vocab]; `failed` [..., vocab] weighs the rejected drafts."""
        ...


def normalised_residual(law: torch.Tensor, q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return max(law - q, 0), normalised. If it is 0 everywhere, only rounding can reject a draft, and p is
    returned."""
    left = (law - q).clamp(min=0)
    left = torch.where((left > 0).any(dim=-1, keepdim=True), left, p)
    return left / left.sum(dim=-1, keepdim=True)


def mass_of(failed: torch.Tensor) -> torch.Tensor:
    """Return the total weight of rejected drafts, [..., 1]."""
    return failed.sum(dim=-1, keepdim=True)


@dataclass(frozen=True, slots=True)
class OverlapLaw:
    """Speculative sampling with output distribution v: a = min(1, v / q), and r_x is max(v - q, 0), normalised.

    It emits exactly v (Leviathan et al., arXiv 2211.17192), so v = p is lossless. `towards` computes v from p and q.
    """

    towards: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def accepts(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return clipped_ratio(self.towards(p, q), q)

    def spread(self, p: torch.Tensor, q: torch.Tensor, failed: torch.Tensor) -> torch.Tensor:
        return mass_of(failed) * normalised_residual(self.towards(p, q), q, p)


def exact(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return v = p, the lossless law."""
    return p


@dataclass(frozen=True, slots=True)
class Ensemble:
    """Returns v = w p + (1 - w) q (static ensemble of transformers, #45865). TV(v, p) is (1 - w) TV(q, p)."""

    weight: float

    def __call__(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return self.weight * p + (1 - self.weight) * q


@dataclass(frozen=True, slots=True)
class Mentored:
    """Returns the distribution v with KL(v || p) <= bound that accepts the most drafts. It is the one nearest to q.

    By Lagrange's conditions v is q clamped between two multiples of p: v = min(max(q, low p), high p), low <= 1 <=
    high. `high` determines `low`, since v sums to 1. The divergence grows with `high`, which is found by bisection.
    With a bound of 0, v is p. The idea is mentored decoding (Hugging Face's blog, Vivien 2024).
    """

    bound: float

    def __call__(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        if self.bound == 0:  # the divergence is flat there: rounding would decide
            return p
        ratios = ByRatio.of(p, q)
        least = torch.ones_like(p[..., :1], dtype=torch.float64)
        most = ratios.ratio[..., -1:].clamp(min=1)  # beyond the largest ratio nothing changes
        for _ in range(BISECTIONS):
            middle = least.sqrt() * most.sqrt()  # the ratio of the two may be 1e30
            is_near = ratios.divergence(middle) <= self.bound
            least, most = torch.where(is_near, middle, least), torch.where(is_near, most, middle)
        low, high = ratios.low_of(least).to(p.dtype), least.to(p.dtype)
        law = torch.minimum(torch.maximum(q, low * p), high * p)
        return law / law.sum(dim=-1, keepdim=True)


@dataclass(frozen=True, slots=True)
class ByRatio:
    """Tokens sorted by q / p, with cumulative sums, to evaluate the clamped distributions of `Mentored`.

    Attributes:
        ratio: [..., vocab] q / p, ascending; 0 where p is 0, since a clamped distribution is 0 there.
        p_below: [..., vocab + 1] entry i is the sum of p over the first i tokens.
        p_above: [..., vocab + 1] the sum of p over the remaining tokens, added from the last one. 1 - p_below would
            lose small numbers to rounding.
        q_below: [..., vocab + 1] like `p_below`, of q.
        log_below: [..., vocab + 1] like `p_below`, of q log(q / p).
        low_mass: [..., vocab] the mass that max(q, low p) adds to q, if `low` is this token's ratio.
    """

    ratio: torch.Tensor
    p_below: torch.Tensor
    p_above: torch.Tensor
    q_below: torch.Tensor
    log_below: torch.Tensor
    low_mass: torch.Tensor

    @classmethod
    def of(cls, p: torch.Tensor, q: torch.Tensor) -> ByRatio:
        """Sort the tokens of p and q, both [..., vocab]."""
        p = p.double()
        q = torch.where(p > 0, q.double(), 0)
        ratio, order = torch.where(p > 0, q / p, 0).sort(dim=-1)
        p_below, q_below, log_below = (
            torch.nn.functional.pad(values.gather(-1, order).cumsum(dim=-1), (1, 0))
            for values in (p, q, torch.special.xlogy(q, torch.where(q > 0, q / p, 1)))
        )
        from_last = p.gather(-1, order).flip(-1).cumsum(dim=-1).flip(-1)
        p_above = torch.nn.functional.pad(from_last, (0, 1))
        return cls(ratio, p_below, p_above, q_below, log_below, ratio * p_below[..., :-1] - q_below[..., :-1])

    def low_of(self, high: torch.Tensor) -> torch.Tensor:
        """Return the `low` [..., 1] for which v sums to 1, given `high` [..., 1]."""
        above = torch.searchsorted(self.ratio, high, right=True)
        missing = 1 - _at(self.q_below, above) - high * _at(self.p_above, above)
        place = torch.searchsorted(self.low_mass, missing, right=True)
        p_below = _at(self.p_below, place)
        low = torch.where(p_below > 0, (missing + _at(self.q_below, place)) / p_below, 0)
        return low.clamp(0, 1)

    def divergence(self, high: torch.Tensor) -> torch.Tensor:
        """Return KL(v || p) in nats, [..., 1], of the v that `high` [..., 1] determines."""
        low = self.low_of(high)
        below, above = torch.searchsorted(self.ratio, low), torch.searchsorted(self.ratio, high, right=True)
        lifted = torch.special.xlogy(low, low) * _at(self.p_below, below)
        capped = torch.special.xlogy(high, high) * _at(self.p_above, above)
        return lifted + _at(self.log_below, above) - _at(self.log_below, below) + capped


def _at(sums: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return sums.gather(-1, place)


@dataclass(frozen=True, slots=True)
class Cascade:
    """The test of speculative cascades' TokenV3 (arXiv 2405.19261): a draft with p >= (1 - alpha) max p is accepted.

    All others are judged as in lossless sampling, as MTPLX #485 proposes. The paper aims at another law: q on the
    tokens that pass, plus p times the mass of q on all others.
    """

    alpha: float

    def accepts(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        is_near = p >= (1 - self.alpha) * p.amax(dim=-1, keepdim=True)
        return torch.where(is_near, 1, clipped_ratio(p, q))

    def spread(self, p: torch.Tensor, q: torch.Tensor, failed: torch.Tensor) -> torch.Tensor:
        return mass_of(failed) * normalised_residual(p, q, p)


@dataclass(frozen=True, slots=True)
class Typical:
    """Typical acceptance of Medusa (arXiv 2401.10774): a draft is accepted iff p(x) > min(epsilon, delta exp(-H(p))).

    A rejected draft is replaced by a token drawn from p, as in vLLM's first engine (#5131).
    """

    epsilon: float
    delta: float

    def accepts(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        least = (self.delta * torch.exp(-entropy(p))).clamp(max=self.epsilon)
        return (p > least).to(p.dtype)

    def spread(self, p: torch.Tensor, q: torch.Tensor, failed: torch.Tensor) -> torch.Tensor:
        return mass_of(failed) * p


@dataclass(frozen=True, slots=True)
class Thresholds:
    """SGLang's two thresholds: a draft is accepted if p(x) >= single, else with probability min(1, p(x) / acc).

    A rejected draft is replaced by a token drawn from p without x. If both thresholds are 1, a draft is accepted with
    probability p(x), which is lossless. q is not read.
    """

    single: float
    acc: float

    def accepts(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return torch.where(p >= self.single, 1, (p / self.acc).clamp(max=1))

    def spread(self, p: torch.Tensor, q: torch.Tensor, failed: torch.Tensor) -> torch.Tensor:
        # Sum over x of failed(x) p(y) / (1 - p(x)), x other than y. A token of probability 1 never fails.
        shares = torch.where(p < 1, failed / (1 - p), 0)
        return p * (mass_of(shares) - shares).clamp(min=0)


Divergence = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Turns two distributions [..., vocab] into a number [..., 1]."""


@dataclass(frozen=True, slots=True)
class Fuzzy:
    """Fuzzy speculative decoding (arXiv 2502.20704): a draft is accepted iff the divergence of p and q is at most
    `most`.

    A rejected draft is replaced by a token drawn from p.
    """

    divergence: Divergence
    most: float

    def accepts(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return (self.divergence(p, q) <= self.most).to(p.dtype).expand_as(p)

    def spread(self, p: torch.Tensor, q: torch.Tensor, failed: torch.Tensor) -> torch.Tensor:
        return mass_of(failed) * p


def total_variation(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return half the sum of |p - q|, [..., 1]."""
    return (p - q).abs().sum(dim=-1, keepdim=True) / 2


def reverse_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return KL(q || p) in nats, [..., 1]; infinite if some token has q > 0 and p = 0."""
    return _divergence_of(q, p)


def jensen_shannon(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the Jensen-Shannon divergence in nats, [..., 1]; it is at most log 2."""
    middle = (p + q) / 2
    return (_divergence_of(p, middle) + _divergence_of(q, middle)) / 2


def entropy(p: torch.Tensor) -> torch.Tensor:
    """Return the entropy in nats, [..., 1]."""
    return -torch.special.xlogy(p, p).sum(dim=-1, keepdim=True)


def _divergence_of(law: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return KL(law || p) in nats, [..., 1]."""
    ratio = torch.where(law > 0, law / p, 1)
    return torch.special.xlogy(law, ratio).sum(dim=-1, keepdim=True).clamp(min=0)
