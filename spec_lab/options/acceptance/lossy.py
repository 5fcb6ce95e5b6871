"""The lossy rules: relaxed_thinking, and those with a token law."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from spec_lab.config.choices import Choice, RelaxedPhase
from spec_lab.config.groups import AcceptanceConfig
from spec_lab.config.option import knob, option
from spec_lab.config.run import Run
from spec_lab.core.errors import UserError

if TYPE_CHECKING:
    import torch

    from spec_lab.acceptance.deterministic import DraftJudge
    from spec_lab.acceptance.lossy import Window
    from spec_lab.acceptance.phase import RelaxationPhase, ThinkingMarkers
    from spec_lab.acceptance.relaxed import RelaxedForm, RelaxedThinkingAcceptance
    from spec_lab.acceptance.token_laws import TokenLaw
    from spec_lab.build.lab import Lab
    from spec_lab.core.protocols import AcceptanceRule
    from spec_lab.record.verify_rows import RowsOrigin


class LossyConfig(AcceptanceConfig):
    """The base of the rules with a law of the token that a row emits."""

    takes_fewer_drafts = True
    needs_probabilities: ClassVar[bool] = True
    """Whether it judges by probabilities of sampling, of which temperature 0 has none."""

    def law(self, laws: Any) -> TokenLaw:
        """Make the law from the module of laws, which imports torch."""
        raise NotImplementedError

    def check(self, run: Run) -> Iterator[str]:
        if self.needs_probabilities and run.sampling.temperature <= 0:
            yield (
                f"acceptance={self.name} judges by probabilities, and sampling.temperature=0 has none; use "
                "sampling=sampled or acceptance=strict"
            )

    def build(self, lab: Lab) -> AcceptanceRule:
        from spec_lab.acceptance import token_laws
        from spec_lab.acceptance.lossy import LossyAcceptance

        return LossyAcceptance(self.law(token_laws), lab.sampling, lab.seeds, self.window_of_law())

    def window_of_law(self) -> Window | None:
        """Make the window of drafts after a forgiven one; None if the rule has none."""
        return None


@option("acceptance", "typical")
class Typical(LossyConfig):
    """Accepts a draft with a probability above a bound that falls with the target's entropy (Medusa)."""

    epsilon: float = knob(0.3, "a draft with a probability above this always passes", least=0, most=1)
    delta: float = knob(0.09, "a draft with a probability above delta * exp(-entropy) passes too", least=0)

    def law(self, laws: Any) -> TokenLaw:
        return laws.Typical(self.epsilon, self.delta)


@option("acceptance", "threshold")
class Threshold(LossyConfig):
    """Two thresholds of probability (SGLang). Lossy below 1."""

    single: float = knob(1.0, "a draft of this probability or more always passes", above=0, most=1)
    acc: float = knob(0.7, "others pass with probability p / acc; 1 is lossless", above=0, most=1)

    def law(self, laws: Any) -> TokenLaw:
        return laws.Thresholds(self.single, self.acc)


@option("acceptance", "cascade")
class Cascade(LossyConfig):
    """Drafts nearly as likely as the likeliest token pass, others are judged exactly."""

    alpha: float = knob(
        0.5, "a draft passes if its probability is at least (1 - alpha) times the largest", least=0, most=1
    )

    def law(self, laws: Any) -> TokenLaw:
        return laws.Cascade(self.alpha)


@option("acceptance", "ensemble")
class Ensemble(LossyConfig):
    """Exact verification against a mixture of target and drafter (transformers)."""

    needs_probabilities = False

    weight: float = knob(0.8, "weight of the target in the mixture; 1 is lossless", least=0, most=1)

    def law(self, laws: Any) -> TokenLaw:
        return laws.OverlapLaw(laws.Ensemble(self.weight))


@option("acceptance", "mentored")
class Mentored(LossyConfig):
    """Accepts as many drafts as a bound on the KL divergence from the target allows."""

    bound: float = knob(
        0.1, "largest KL of the emitted distribution from the target's, in nats a token; 0 is lossless", least=0
    )

    def law(self, laws: Any) -> TokenLaw:
        return laws.OverlapLaw(laws.Mentored(self.bound))


class FuzzyDivergence(Choice):
    """The measures of the distance between the drafter's distribution and the target's."""

    tv = "tv", "total variation"
    kl = "kl", "KL of the drafter's distribution from the target's, in nats"
    js = "js", "Jensen-Shannon divergence, in nats"


@option("acceptance", "fuzzy")
class Fuzzy(LossyConfig):
    """Accepts a draft if the distributions of drafter and target are near each other (FSD)."""

    divergence: FuzzyDivergence = knob(FuzzyDivergence.js, "how the distance of target and drafter is measured")
    most: float = knob(0.2, "the largest divergence at which a draft is accepted; 0 is lossless", least=0)

    def law(self, laws: Any) -> TokenLaw:
        divergences = {
            FuzzyDivergence.tv: laws.total_variation,
            FuzzyDivergence.kl: laws.reverse_kl,
            FuzzyDivergence.js: laws.jensen_shannon,
        }
        return laws.Fuzzy(divergences[self.divergence], self.most)


@option("acceptance", "fly")
class Fly(LossyConfig):
    """A miss passes if the target is unsure there and agrees with the drafts after it (FLy, vLLM 0.33)."""

    needs_probabilities = False

    window: int = knob(2, "number of drafts after a miss that must pass by themselves", least=1)
    entropy: float = knob(0.3, "least entropy of the likeliest tokens, in nats, for a miss to pass", least=0)
    topk: int = knob(3, "number of likeliest tokens for the entropy", least=2)

    def check(self, run: Run) -> Iterator[str]:
        least = min([run.drafter.num_draft_tokens, *run.fixed_k])
        if 0 < least <= self.window:
            more = f"drafter.num_draft_tokens={self.window + 1}"
            yield f"acceptance.window={self.window} forgives nothing with K={least}; use {more}"

    def law(self, laws: Any) -> TokenLaw:
        return laws.OverlapLaw(laws.exact)

    def window_of_law(self) -> Window:
        from spec_lab.acceptance.lossy import Window

        return Window(self.window, self.entropy, self.topk)

    def judge(self, origin: RowsOrigin) -> DraftJudge:
        from spec_lab.acceptance.forgiving import ForgivingJudge

        return ForgivingJudge(self.window_of_law())


class RelaxedFormChoice(Choice):
    """The ways to say how near to the likeliest token a draft must be."""

    delta = "delta", "p >= p_top1 - delta"
    ratio = "ratio", "p >= p_top1 * ratio"


@option("acceptance", "relaxed_thinking")
class RelaxedThinking(AcceptanceConfig):
    """Near misses count while the model thinks (TensorRT-LLM). Lossy."""

    greedy_only = "measures from the argmax of the raw logits"
    takes_fewer_drafts = True
    judges_trees = True

    form: RelaxedFormChoice = knob(RelaxedFormChoice.delta, "how near a draft must be to the likeliest token")
    topk: int = knob(10, "a draft must be among this many likeliest tokens; 1 is strict", least=1)
    delta: float = knob(0.6, "largest difference of probabilities; acceptance.form=delta only", least=0, most=1)
    ratio: float = knob(0.5, "least ratio of probabilities; acceptance.form=ratio only", above=0, most=1)
    phase: RelaxedPhase = knob(RelaxedPhase.token, "when it relaxes")

    def build(self, lab: Lab) -> AcceptanceRule:
        from spec_lab.acceptance.relaxed import RelaxedThinkingAcceptance
        from spec_lab.acceptance.relaxed_tree import RelaxedThinkingTreeAcceptance

        form, phase = self._relaxation(
            lab.limits.num_slots, lab.markers, lab.target.eos_token_ids, lab.run.cache.chunk_size, lab.device
        )
        if lab.run.sizes is None:
            return RelaxedThinkingAcceptance(form, self.topk, phase, lab.kernels)
        return RelaxedThinkingTreeAcceptance(form, self.topk, phase)

    def judge(self, origin: RowsOrigin) -> RelaxedThinkingAcceptance:
        import torch

        from spec_lab.acceptance.phase import ThinkingMarkers
        from spec_lab.acceptance.relaxed import RelaxedThinkingAcceptance

        markers = None if origin.markers is None else ThinkingMarkers(*origin.markers)
        form, phase = self._relaxation(
            len(origin.request_ids), markers, origin.eos_token_ids, origin.prefill_chunk, torch.device("cpu")
        )
        return RelaxedThinkingAcceptance(form, self.topk, phase)

    def _relaxation(
        self,
        num_slots: int,
        markers: ThinkingMarkers | None,
        eos_token_ids: Collection[int],
        prefill_chunk: int,
        device: torch.device,
    ) -> tuple[RelaxedForm, RelaxationPhase]:
        """Make the required closeness of a draft, and the phase of the text in which it applies."""
        from spec_lab.acceptance.phase import RoundPhase, TokenPhase
        from spec_lab.acceptance.relaxed import DeltaForm, RatioForm

        if markers is None:
            raise UserError(
                "acceptance=relaxed_thinking: this target has no known thinking markers; set target.thinking_begin and "
                "target.thinking_end"
            )
        form: RelaxedForm = DeltaForm(self.delta) if self.form == RelaxedFormChoice.delta else RatioForm(self.ratio)
        if self.phase == RelaxedPhase.token:
            return form, TokenPhase(num_slots, markers, eos_token_ids, device)
        return form, RoundPhase(num_slots, markers, prefill_chunk, device)
