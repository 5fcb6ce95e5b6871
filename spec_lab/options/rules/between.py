"""For the lossy rules with a token law: the function that makes them, and a refusal that most of them have."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spec_lab.acceptance.lossy import LossyAcceptance, Window
    from spec_lab.acceptance.token_laws import TokenLaw
    from spec_lab.menu.chosen import Chosen
    from spec_lab.menu.config import RunConfig
    from spec_lab.wiring.rules import RuleBuild


def strict_at_temperature_0(config: RunConfig) -> str | None:
    """The temperature must be above 0, since the rule judges by probabilities of sampling."""
    if config.sampling.temperature > 0:
        return None
    return (
        f"acceptance={config.acceptance.name} judges by probabilities, and sampling.temperature=0 has none; use "
        "sampling=sampled or acceptance=strict"
    )


def make_lossy(chosen: Chosen, build: RuleBuild, law: TokenLaw, window: Window | None = None) -> LossyAcceptance:
    """Make the rule for a token law, with the run's sampling."""
    from spec_lab.acceptance.distribution import SamplingParams
    from spec_lab.acceptance.lossy import LossyAcceptance

    sampling = chosen.config.sampling
    params = SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p)
    return LossyAcceptance(law, params, build.seeds, window)
