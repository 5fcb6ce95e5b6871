"""Temperature, top-k and top-p for all sampling rules, and sums that do not depend on the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_FIXED_POINT = 2.0**52


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Temperature 0 is greedy; None turns `top_k` or `top_p` off."""

    temperature: float
    top_k: int | None = None
    top_p: float | None = None


def probabilities(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Return probabilities [..., vocab] after temperature, then top-k, then top-p; float32, or float64 for float64
    logits.

    At temperature 0 they are one-hot at the argmax; ties go to the lowest index.
    """
    logits, temperature = truncated(logits, sampling)
    return law_of(logits, temperature)


def truncated(logits: torch.Tensor, sampling: SamplingParams) -> tuple[torch.Tensor, float | None]:
    """Return logits after top-k and top-p, and the temperature that is still to be applied; None if it already was.

    At temperature 0 the logits are returned as they are.
    """
    if sampling.temperature == 0 or (sampling.top_k is None and sampling.top_p is None):
        return logits, sampling.temperature
    return truncate(_at_least_float32(logits) / sampling.temperature, sampling.top_k, sampling.top_p), None


def law_of(logits: torch.Tensor, temperature: float | None) -> torch.Tensor:
    """Return the probabilities [..., vocab] of logits at a temperature: 0 is one-hot, None does not scale."""
    scaled = _at_least_float32(logits)
    if temperature == 0:
        return one_hot(logits.argmax(dim=-1), logits.shape[-1], scaled.dtype)
    return torch.softmax(scaled if temperature is None else scaled / temperature, dim=-1)


def truncate(logits: torch.Tensor, top_k: int | None, top_p: float | None) -> torch.Tensor:
    """Set all tokens but the `top_k` likeliest to -inf, then all outside the smallest set of these with mass `top_p`.

    The sort is stable, so of equal logits the one with the lowest index stays. The cumulative mass is summed in
    integers, so a device's order of summation does not change it.
    """
    vocab_size = logits.shape[-1]
    cuts_k = top_k is not None and top_k < vocab_size
    cuts_p = top_p is not None and top_p < 1
    if not cuts_k and not cuts_p:
        return logits
    ranked, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    kept = torch.ones_like(ranked, dtype=torch.bool)
    if cuts_k:
        kept[..., top_k:] = False
    if cuts_p:
        assert top_p is not None
        mass = _fixed_point(torch.softmax(ranked.masked_fill(~kept, -torch.inf), dim=-1))
        # At least 1: a `top_p` that rounds to 0 would otherwise keep no token at all.
        kept &= mass.cumsum(dim=-1) - mass < max(1, round(top_p * _FIXED_POINT))
    return logits.masked_fill(~torch.zeros_like(kept).scatter(-1, order, kept), -torch.inf)


def total(values: torch.Tensor) -> torch.Tensor:
    """Sum values in [0, 1] over the last dimension, in float64. Each value is rounded to a multiple of 2^-52 before the
    sum. The sum must be below 2048.

    A floating-point sum is split over threads in a way that depends on the batch. This sum has only one result.
    """
    return _fixed_point(values).sum(dim=-1).double() / _FIXED_POINT


def one_hot(tokens: torch.Tensor, vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Turn ids [...] into one-hot rows [..., vocab]."""
    zeros = torch.zeros((*tokens.shape, vocab_size), dtype=dtype, device=tokens.device)
    return zeros.scatter_(-1, tokens.unsqueeze(-1), 1)


def at_tokens(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the entries of `values` [..., vocab] at `tokens` [...]."""
    return values.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _at_least_float32(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _fixed_point(values: torch.Tensor) -> torch.Tensor:
    return (values.double() * _FIXED_POINT).round().long()
