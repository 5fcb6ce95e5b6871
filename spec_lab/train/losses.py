"""Losses of drafted rows, from the drafter's logits and the target's log-probabilities over the draft vocabulary.

All take `draft_logits` and `log_p` `[..., draft_vocab_size]`, and return `[...]` in float32. Probability outside the
draft vocabulary is dropped without renormalising. So kl weighs a row by the target's probability inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from spec_lab.train.config import Loss

RowLoss = Callable[[Tensor, Tensor], Tensor]
LEAST_OVERLAP = 1e-6


def against_distribution(draft_logits: Tensor, log_p: Tensor) -> Tensor:
    """Return the cross-entropy of the drafter's distribution against the target's (kl)."""
    return -(log_p.exp() * draft_logits.float().log_softmax(-1)).sum(-1)


def against_likeliest(draft_logits: Tensor, log_p: Tensor) -> Tensor:
    """Return the cross-entropy against the target's likeliest token; 0 if that token may be outside the draft
    vocabulary."""
    best, label = log_p.max(-1)
    is_drafted = best.exp() >= 1 - log_p.exp().sum(-1)
    log_q = draft_logits.float().log_softmax(-1).gather(-1, label[..., None])[..., 0]
    return torch.where(is_drafted, -log_q, 0.0)


def overlap(draft_logits: Tensor, log_p: Tensor) -> Tensor:
    """Return sum min(p, q): the probability that a draft sampled from q is accepted."""
    return torch.minimum(log_p.exp(), draft_logits.float().softmax(-1)).sum(-1)


def total_variation(draft_logits: Tensor, log_p: Tensor) -> Tensor:
    return 1 - overlap(draft_logits, log_p)


def negative_log_overlap(draft_logits: Tensor, log_p: Tensor) -> Tensor:
    return -overlap(draft_logits, log_p).clamp(min=LEAST_OVERLAP).log()


def likelihood_of_acceptance(draft_logits: Tensor, log_p: Tensor) -> Tensor:
    """Return the hybrid of "LK losses" (arXiv 2602.23881)."""
    shared = overlap(draft_logits, log_p)
    weight = torch.exp(-3 * shared.detach())
    return weight * against_distribution(draft_logits, log_p) + (1 - weight) * (1 - shared)


MOST_LOGITS = 2**28
"""The most logits of a chunk of rows, for the target and for each step of the head: a gigabyte each in float32."""


def chunks(num_rows: int, vocab_size: int) -> list[slice]:
    """Divide rows into parts with about `MOST_LOGITS` logits each at most; without rows there is one empty part.

    All parts have the same size if that takes at most twice as many parts. With two sizes torch.compile would make two
    functions. The recomputation for gradients might then use the other function, which PyTorch refuses.
    """
    needed = max(1, -(-num_rows * vocab_size // MOST_LOGITS))
    num_chunks = next((parts for parts in range(needed, 2 * needed + 1) if num_rows % parts == 0), needed)
    size = max(1, -(-num_rows // num_chunks))
    return [slice(start, min(start + size, num_rows)) for start in range(0, max(1, num_rows), size)]


LOSSES: Mapping[Loss, RowLoss] = {
    Loss.kl: against_distribution,
    Loss.ce: against_likeliest,
    Loss.tv: total_variation,
    Loss.nla: negative_log_overlap,
    Loss.lk: likelihood_of_acceptance,
}
