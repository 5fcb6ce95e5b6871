"""The rules run `spec_kernels` in place of torch's operators: same decisions, the vocabulary read once or twice.

Ties and strict acceptance are exact. A sampling rule draws with the same noise, but float32 sums round in another
order: a token differs only where two candidates, or a draw and its threshold, are that close.
"""

from __future__ import annotations

import torch

from spec_kernels.rejection import rejection_sample
from spec_kernels.relaxed import draft_standing
from spec_kernels.strict import strict_accept
from spec_kernels.synthetic import synthetic_accept
from spec_lab.acceptance.distribution import SamplingParams, truncate
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.acceptance.rejection import METHODS, RejectionAcceptance
from spec_lab.acceptance.standing import DraftStanding
from spec_lab.acceptance.strict import StrictAcceptance, verify_by
from spec_lab.acceptance.synthetic import SyntheticAcceptance
from spec_lab.core.types import AcceptanceInputs, Verification


def verify_strictly(inputs: AcceptanceInputs) -> Verification:
    """Give what `StrictAcceptance.accept` gives."""
    return verify_by(strict_accept, inputs)


class TritonStrictAcceptance(StrictAcceptance):
    """It accepts what `StrictAcceptance` does, in one kernel."""

    def accept(self, inputs: AcceptanceInputs) -> Verification:
        return verify_strictly(inputs)


class TritonSyntheticAcceptance(SyntheticAcceptance):
    """It accepts what `SyntheticAcceptance` does, in two kernels in place of some sixty."""

    def accept(self, inputs: AcceptanceInputs) -> Verification:
        tokens = torch.empty(inputs.logits.shape[:2], dtype=torch.int64, device=inputs.logits.device)
        num_emitted = torch.empty_like(tokens[:, 0])
        synthetic_accept(
            tokens,
            num_emitted,
            inputs.logits,
            inputs.draft_tokens,
            self._rates,
            inputs.active,
            inputs.slot_ids,
            self._seeds.values,
            inputs.kv_lens,
            inputs.num_drafts,
        )
        return Verification(tokens, num_emitted)


class TritonRejectionAcceptance(RejectionAcceptance):
    """It accepts what `RejectionAcceptance` does, in kernels. Truncation by top-k and top-p sorts, and is torch's."""

    def __init__(self, method: str, sampling: SamplingParams, seeds: SlotSeeds, lossless: bool = True) -> None:
        """`method`: standard or one_hot; block verification has no kernel."""
        assert method in ("standard", "one_hot")
        super().__init__(METHODS[method], sampling, seeds, lossless=lossless)

    def accept(self, inputs: AcceptanceInputs) -> Verification:
        sampling = self._sampling
        if sampling.temperature == 0:
            return verify_strictly(inputs)
        logits, temperature = inputs.logits, sampling.temperature
        if sampling.top_k is not None or sampling.top_p is not None:
            logits, temperature = truncate(logits.float() / temperature, sampling.top_k, sampling.top_p), 1.0
        tokens = torch.empty(logits.shape[:2], dtype=torch.int64, device=logits.device)
        num_emitted = torch.empty_like(tokens[:, 0])
        rejection_sample(
            tokens,
            num_emitted,
            logits,
            inputs.draft_tokens,
            inputs.draft_logits if self._method.reads_draft_logits else None,
            inputs.active,
            inputs.slot_ids,
            self._seeds.values,
            inputs.kv_lens,
            temperature,
            inputs.num_drafts,
        )
        return Verification(tokens, num_emitted)


def triton_standing(logits: torch.Tensor, draft_tokens: torch.Tensor) -> tuple[DraftStanding, torch.Tensor]:
    """Ranks the drafts of a round in one kernel, as `RoundStanding` says."""
    shape, device = draft_tokens.shape, logits.device
    standing = DraftStanding(
        is_top=torch.empty(shape, dtype=torch.bool, device=device),
        rank=torch.empty(shape, dtype=torch.int64, device=device),
        probability=torch.empty(shape, dtype=torch.float32, device=device),
        top=torch.empty(shape, dtype=torch.float32, device=device),
    )
    top_tokens = torch.empty(logits.shape[:2], dtype=torch.int64, device=device)
    draft_standing(standing.is_top, standing.rank, standing.probability, standing.top, top_tokens, logits, draft_tokens)
    return standing, top_tokens
