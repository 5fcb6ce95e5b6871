"""Laws by which a draft is accepted on its own: how likely each token is to pass, and what is drawn where one fails.

A law sees the target's distribution p, after temperature, top-k and top-p, and the distribution q that the draft came
from, which is one-hot for a greedy draft. Both are [..., vocab], and every row is judged by itself. With a(x) the
chance that a draft x passes, and r_x the law of the token in the place of a failed x, the row emits

    e(y) = q(y) a(y) + sum over x of q(x) (1 - a(x)) r_x(y).

`spread` is the second term, for any weights of failed drafts in the place of q (1 - a): one-hot weights give the law
that the last token of a round is drawn from. All are pure functions, in the dtype that they are given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from spec_lab.acceptance.tokenwise import clipped_ratio

BISECTIONS = 60
"""Halvings of an interval of scales: more than float64 can tell apart."""


class TokenLaw(Protocol):
    """Judges each draft by p and q of its own row."""

    def accepts(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Return a(x) of every token, [..., vocab]."""
        ...

    def spread(self, p: torch.Tensor, q: torch.Tensor, failed: torch.Tensor) -> torch.Tensor:
        """Return the law [..., vocab] of the last token, times the mass of `failed` [..., vocab], the drafts that did
        not pass."""
        ...


def normalised_residual(law: torch.Tensor, q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return max(law - q, 0) as a distribution; p where nothing is left, and a rejection is a rounding error."""
    left = (law - q).clamp(min=0)
    left = torch.where((left > 0).any(dim=-1, keepdim=True), left, p)
    return left / left.sum(dim=-1, keepdim=True)


def mass_of(failed: torch.Tensor) -> torch.Tensor:
    """Return the mass of failed drafts, [..., 1]."""
    return failed.sum(dim=-1, keepdim=True)


@dataclass(frozen=True, slots=True)
class OverlapLaw:
    """Speculative sampling towards a law v: a = min(1, v / q), and behind a failed draft max(v - q, 0).

    It emits v exactly (Leviathan et al., arXiv 2211.17192), so v = p is lossless. `towards` makes v of p and q.
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
    """Returns v = w p + (1 - w) q (static ensemble of transformers, #45865). The distance is (1 - w) TV(q, p)."""

    weight: float

    def __call__(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return self.weight * p + (1 - self.weight) * q


@dataclass(frozen=True, slots=True)
class Mentored:
    """Returns the law nearest to q of those with KL(v || p) <= bound: of all such laws it accepts most drafts.

    By Lagrange's conditions v is q, kept between two multiples of p: v = min(max(q, low p), high p), low <= 1 <= high.
    For a given `high` mass 1 fixes `low`. The divergence grows with `high`, which a bisection finds. The idea is
    mentored decoding (Hugging Face's blog, Vivien 2024). A bound of 0 leaves v = p.
    """

    bound: float

    def __call__(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        if self.bound == 0:  # the divergence is flat there: rounding would decide
            return p
        ratios = ByRatio.of(p, q)
        least = torch.ones_like(p[..., :1], dtype=torch.float64)
        most = ratios.ratio[..., -1:].clamp(min=1)  # beyond the largest ratio nothing changes
        for _ in range(BISECTIONS):
            middle = (least + most) / 2
            is_near = ratios.divergence(middle) <= self.bound
            least, most = torch.where(is_near, middle, least), torch.where(is_near, most, middle)
        low, high = ratios.low_of(least).to(p.dtype), least.to(p.dtype)
        law = torch.minimum(torch.maximum(q, low * p), high * p)
        return law / law.sum(dim=-1, keepdim=True)


@dataclass(frozen=True, slots=True)
class ByRatio:
    """Tokens in the order of q / p, with sums up to each: of laws kept between two multiples of p.

    Attributes:
        ratio: [..., vocab] q / p, ascending; 0 where p is 0, which no such law emits.
        p_below: [..., vocab + 1] the sum of p over the first tokens.
        p_above: [..., vocab + 1] over the others, summed from the last: 1 less the former would round a small p away.
        q_below: likewise of q.
        log_below: likewise of q log(q / p).
        low_mass: [..., vocab] the mass that a `low` at each ratio would add to q.
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
        """Return the `low` [..., 1] that leaves mass 1 under `high` [..., 1]."""
        above = torch.searchsorted(self.ratio, high, right=True)
        missing = 1 - _at(self.q_below, above) - high * _at(self.p_above, above)
        place = torch.searchsorted(self.low_mass, missing, right=True)
        p_below = _at(self.p_below, place)
        low = torch.where(p_below > 0, (missing + _at(self.q_below, place)) / p_below, 0)
        return low.clamp(0, 1)

    def divergence(self, high: torch.Tensor) -> torch.Tensor:
        """Return KL(v || p) in nats, [..., 1], of the law v under `high` [..., 1]."""
        low = self.low_of(high)
        below, above = torch.searchsorted(self.ratio, low), torch.searchsorted(self.ratio, high, right=True)
        lifted = torch.special.xlogy(low, low) * _at(self.p_below, below)
        capped = torch.special.xlogy(high, high) * _at(self.p_above, above)
        return lifted + _at(self.log_below, above) - _at(self.log_below, below) + capped


def _at(sums: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return sums.gather(-1, place)


@dataclass(frozen=True, slots=True)
class Cascade:
    """TokenV3 of speculative cascades (arXiv 2405.19261): a draft with p >= (1 - alpha) max p passes without a coin.

    The others are judged as in lossless sampling.
    """

    alpha: float

    def accepts(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        is_near = p >= (1 - self.alpha) * p.amax(dim=-1, keepdim=True)
        return torch.where(is_near, 1, clipped_ratio(p, q))

    def spread(self, p: torch.Tensor, q: torch.Tensor, failed: torch.Tensor) -> torch.Tensor:
        return mass_of(failed) * normalised_residual(p, q, p)


@dataclass(frozen=True, slots=True)
class Typical:
    """Typical acceptance of Medusa (arXiv 2401.10774): a draft passes where p(x) > min(epsilon, delta exp(-H(p))).

    No coin is tossed. Behind a failed draft the token is drawn from p, as in vLLM's first engine (#5131).
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
    """SGLang's two thresholds: a draft passes where p(x) >= single, else with probability p(x) / acc.

    The token in its place is drawn from p without it. With both at 1 a draft x passes with probability p(x): lossless.
    q is not read.
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
    """Fuzzy speculative decoding (arXiv 2502.20704): every draft passes where p and q are within `most` of each other.

    Elsewhere none does, and the token is drawn from p.
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
    """Return KL(q || p) in nats, [..., 1]; infinite where q has a token that p has not."""
    return _divergence_of(q, p)


def jensen_shannon(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the divergence of Jensen and Shannon in nats, [..., 1]: at most log 2."""
    middle = (p + q) / 2
    return (_divergence_of(p, middle) + _divergence_of(q, middle)) / 2


def entropy(p: torch.Tensor) -> torch.Tensor:
    """Return the entropy in nats, [..., 1]."""
    return -torch.special.xlogy(p, p).sum(dim=-1, keepdim=True)


def _divergence_of(law: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return KL(law || p) in nats, [..., 1]."""
    ratio = torch.where(law > 0, law / p, 1)
    return torch.special.xlogy(law, ratio).sum(dim=-1, keepdim=True).clamp(min=0)
