"""From `acceptance=` to a rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from spec_lab.acceptance.deterministic import DeterministicRule
from spec_lab.acceptance.distribution import SamplingParams
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.acceptance.phase import RelaxationPhase, RoundPhase, ThinkingMarkers, TokenPhase
from spec_lab.acceptance.rates import expand_mean_length
from spec_lab.acceptance.relaxed import DeltaForm, RatioForm, RelaxedThinkingAcceptance
from spec_lab.acceptance.synthetic import SyntheticAcceptance
from spec_lab.assembly.kernels import TORCH, Kernels
from spec_lab.assembly.models import Limits, Models
from spec_lab.config import AcceptanceConfig, RejectionConfig, RelaxedThinkingConfig, RunConfig, SyntheticConfig
from spec_lab.core.protocols import AcceptanceRule
from spec_lab.corpus.example import THINK_END, THINK_START
from spec_lab.errors import UserError


@dataclass(frozen=True, slots=True)
class RuleContext:
    """What a deterministic rule has to know of a run; also the part of it that a record keeps.

    Attributes:
        markers: of the thinking phase; None when the tokenizer has none.
        prefill_chunk: prompt rows a forward.
        kernels: what judges the drafts; of no interest for a record, which keeps the standing of the drafts itself.
    """

    num_slots: int
    markers: ThinkingMarkers | None
    eos_token_ids: frozenset[int]
    prefill_chunk: int
    device: torch.device
    kernels: Kernels = TORCH


def build_rule(config: RunConfig, models: Models, limits: Limits, seeds: SlotSeeds) -> AcceptanceRule:
    return ACCEPTANCE[config.acceptance.name](config, config.acceptance, models, limits, seeds)


def build_deterministic_rule(options: AcceptanceConfig, context: RuleContext) -> DeterministicRule:
    """A rule that decides without drawing; UserError for any other."""
    if options.name not in DETERMINISTIC:
        raise UserError(
            f"acceptance={options.name} draws, so it cannot be re-scored; use one of {', '.join(DETERMINISTIC)}"
        )
    return DETERMINISTIC[options.name](options, context)


def _deterministic(
    config: RunConfig, options: AcceptanceConfig, models: Models, limits: Limits, seeds: SlotSeeds
) -> AcceptanceRule:
    return build_deterministic_rule(options, _context(config, models, limits))


def _context(config: RunConfig, models: Models, limits: Limits) -> RuleContext:
    return RuleContext(
        limits.num_slots,
        models.markers,
        models.target.eos_token_ids,
        config.cache.prefill_chunk,
        models.device,
        models.kernels,
    )


def _strict_rule(options: AcceptanceConfig, context: RuleContext) -> DeterministicRule:
    return context.kernels.strict()


def _relaxed_thinking_rule(options: RelaxedThinkingConfig, context: RuleContext) -> DeterministicRule:
    markers = context.markers
    if markers is None:
        raise UserError(
            f"acceptance=relaxed_thinking needs {THINK_START} and {THINK_END} as tokens, and this target's tokenizer "
            "has none; use acceptance=strict"
        )
    form = DeltaForm(options.delta) if options.form == "delta" else RatioForm(options.ratio)
    phase: RelaxationPhase = (
        TokenPhase(context.num_slots, markers, context.eos_token_ids, context.device)
        if options.phase == "token"
        else RoundPhase(context.num_slots, markers, context.prefill_chunk, context.device)
    )
    return RelaxedThinkingAcceptance(form, options.topk, phase, context.kernels.standing)


def _rejection(
    config: RunConfig, options: RejectionConfig, models: Models, limits: Limits, seeds: SlotSeeds
) -> AcceptanceRule:
    sampling = SamplingParams(config.sampling.temperature, config.sampling.top_k, config.sampling.top_p)
    return models.kernels.rejection(options.method, sampling, seeds, not options.allow_lossy)


def _synthetic(
    config: RunConfig, options: SyntheticConfig, models: Models, limits: Limits, seeds: SlotSeeds
) -> AcceptanceRule:
    num_draft_tokens = config.drafter.num_draft_tokens
    rates = options.rates
    if rates is None:
        assert options.mean_length is not None
        rates = list(expand_mean_length(options.mean_length, num_draft_tokens))
    return SyntheticAcceptance(rates, seeds, models.device)


DETERMINISTIC: Mapping[str, Callable[..., DeterministicRule]] = {
    "strict": _strict_rule,
    "relaxed_thinking": _relaxed_thinking_rule,
}
ACCEPTANCE: Mapping[str, Callable[..., AcceptanceRule]] = {
    "strict": _deterministic,
    "relaxed_thinking": _deterministic,
    "rejection": _rejection,
    "synthetic": _synthetic,
}
