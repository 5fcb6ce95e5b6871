"""A refusal, and a function that makes rules, which the lossy rules with a token distribution share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spec_lab.acceptance.lossy import LossyAcceptance, Window
    from spec_lab.acceptance.token_laws import TokenLaw
    from spec_lab.menu.chosen import Chosen
    from spec_lab.menu.config import RunConfig
    from spec_lab.wiring.rules import RuleBuild


def strict_at_temperature_0(config: RunConfig) -> str | None:
    """The temperature must be above 0: the rule compares the distributions of target and drafter."""
    if config.sampling.temperature > 0:
        return None
    return (
        f"acceptance={config.acceptance.name} compares distributions, and sampling.temperature=0 has none; use "
        "sampling=sampled or acceptance=strict"
    )


def make_lossy(chosen: Chosen, build: RuleBuild, law: TokenLaw, window: Window | None = None) -> LossyAcceptance:
    """Make the rule for a token distribution `law`, with the run's sampling."""
    from spec_lab.acceptance.distribution import SamplingParams
    from spec_lab.acceptance.lossy import LossyAcceptance

    sampling = chosen.config.sampling
    params = SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p)
    return LossyAcceptance(law, params, build.seeds, window)
