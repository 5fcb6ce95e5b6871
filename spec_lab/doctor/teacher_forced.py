"""Drafts under teacher forcing: for every round a drafter gets the target's own text and features in one pass.

A drafter gets each prefix as a whole prompt, with the features from one target pass over the text. It drafts as after
any prompt. The loop is not involved: there is no catch-up, captured graph or pruned row, and drafters do not use the
run's attention backend, which only the target's pass uses. One drafter is used for all rounds of a text, so its cache
is not empty, but each round overwrites everything that it reads there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.build.caches import build_cache
from spec_lab.build.engine import DrafterMaker
from spec_lab.build.lab import Lab
from spec_lab.config.run import PruneConfig
from spec_lab.core.kv_cache import NUM_RESERVED_PAGES, PagedKVCache
from spec_lab.core.passes import Pass
from spec_lab.core.protocols import Drafter
from spec_lab.core.ragged import whole_prompt
from spec_lab.core.types import FeatureSpec, Request
from spec_lab.doctor.rounds import LoopRound
from spec_lab.doctor.subject import Subject
from spec_lab.engine.drafts import collect_drafts
from spec_lab.engine.pages import PageTable
from spec_lab.engine.states import SlotStates

FeatureChange = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Drafted:
    """The tokens that a drafter proposed at the rounds of a `TeacherForcedDrafts`.

    Attributes:
        tokens: [rounds, num_draft_tokens].
        accepted: [rounds] number of leading drafts that equal the target's own text.
    """

    tokens: torch.Tensor
    accepted: torch.Tensor

    @property
    def mean_accepted(self) -> float:
        return float(self.accepted.double().mean())

    @property
    def positions(self) -> range:
        return range(1, self.tokens.shape[1] + 1)

    def agreement(self, position: int) -> float:
        """Return the share of rounds in which drafts 1 to `position` all agree."""
        return float((self.accepted >= position).double().mean())

    def num_judged(self, position: int) -> int:
        """Return the number of rounds whose drafts before `position` all agree, so that this draft follows the target's
        own text."""
        return int((self.accepted >= position - 1).sum())

    def conditional(self, position: int) -> float:
        """Return the share of the rounds of `num_judged` whose draft at `position` agrees too; 0 if there are none."""
        return int((self.accepted >= position).sum()) / max(self.num_judged(position), 1)


@dataclass(frozen=True, slots=True)
class TargetText:
    """A prompt and the target's output. `TeacherForcedDrafts.features` writes the target's KV to `cache`."""

    request: Request
    token_ids: torch.Tensor
    cache: PagedKVCache


class TeacherForcedDrafts:
    """Runs drafters over the texts of a subject. The target runs once for each text and set of features."""

    def __init__(self, subject: Subject, rounds: Sequence[LoopRound]) -> None:
        self.rounds = rounds
        self._subject, self._device = subject, subject.models.device
        self._limits = subject.limits.one_sequence()
        table = PageTable(1, self._limits.max_seq_len + self._limits.margin, self._limits.page_size, self._device)
        table.assign(0, list(range(NUM_RESERVED_PAGES, self._limits.num_pages)))
        self._page_table = table.pages[:1]
        self._texts = [self._text(index) for index in range(len(subject.requests))]
        self._features: dict[tuple[int, FeatureSpec], torch.Tensor | None] = {}

    @torch.inference_mode()
    def draft(self, make_drafter: DrafterMaker, change: FeatureChange | None = None) -> Drafted:
        """Return the drafts for every round. `change` is first applied to the features."""
        proposed = []
        by_text: dict[int, Drafter[Any]] = {}
        for loop_round in self.rounds:
            drafter = by_text.get(loop_round.text) or make_drafter(self.lab(loop_round.text))
            by_text = {loop_round.text: drafter}
            features = self.features(loop_round.text, drafter.requirements.features)
            if features is not None and change is not None:
                features = change(features)
            proposed.append(self._drafts(drafter, loop_round, features))
        return self.judged(torch.stack(proposed))

    def judged(self, tokens: torch.Tensor) -> Drafted:
        """Compare drafts [rounds, num_draft_tokens] with the target's own text."""
        num_drafts = tokens.shape[1]
        texts = [
            self._texts[loop_round.text].token_ids[loop_round.kv_len + 1 :][:num_drafts] for loop_round in self.rounds
        ]
        same = tokens.cpu() == torch.stack(texts).cpu()
        return Drafted(tokens.cpu(), same.long().cumprod(1).sum(1))

    @torch.inference_mode()
    def features(self, text: int, spec: FeatureSpec) -> torch.Tensor | None:
        """Return the features [positions, feature_size] of a text; None if `spec` asks for none. The target's KV is
        written to the text's cache."""
        if (text, spec) not in self._features:
            target, backend = self._subject.models.target, self._subject.models.backend
            token_ids, cache = self._texts[text].token_ids, self._texts[text].cache
            num_rows = len(token_ids)
            positions = torch.arange(num_rows, device=self._device).unsqueeze(0)
            seq_lens = torch.tensor([num_rows], device=self._device)
            attention = backend.build(positions, seq_lens, self._page_table, num_rows)
            states = SlotStates(cache.recurrent)
            states.clear(0)
            attention.recurrent = states.of_prompts(torch.zeros(1, dtype=torch.int64, device=self._device))
            output = target.forward(token_ids, Pass(cache, attention), spec)
            self._features[text, spec] = output.features
        return self._features[text, spec]

    def _text(self, index: int) -> TargetText:
        request, plain = self._subject.requests[index], self._subject.plain[index]
        token_ids = torch.tensor([*plain.prompt_ids, *plain.output_ids], device=self._device)
        config = self._subject.models.target.config
        cache = build_cache(config.layers, self._limits, self._subject.models, self._subject.of_spine.cache.dtype)
        return TargetText(request, token_ids, cache)

    def lab(self, text: int) -> Lab:
        """Return what a drafter for all rounds of a text is made from, with a cache of its own and no pruning."""
        subject = self._subject
        run = replace(subject.of_spine, prune=PruneConfig())
        seeds = SlotSeeds(1, run.seed, self._device)
        cache = self._texts[text].cache
        return Lab.of(subject.reference, run=run, limits=self._limits, seeds=seeds, target_cache=cache)

    def _drafts(self, drafter: Drafter[Any], loop_round: LoopRound, features: torch.Tensor | None) -> torch.Tensor:
        """Return the drafts [num_draft_tokens] after the first `kv_len` tokens and the pending token."""
        text, kv_len = self._texts[loop_round.text], loop_round.kv_len
        drafter.admit(0, text.request)
        pack = whole_prompt(
            self._subject.reference.backend,
            self._page_table,
            text.token_ids[: kv_len + 1],
            None if features is None else features[:kv_len],
            drafter.num_draft_tokens,
        )
        state = drafter.ingest(pack)
        assert state is not None
        return collect_drafts(drafter, self._subject.reference.backend, state)[0]
