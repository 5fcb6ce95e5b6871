"""`--model spec_lab`: answers the harness's requests with the engine, and reports acceptance length and speed.

Only this module and `__main__` import the harness.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from spec_lab.app.compose import compose
from spec_lab.core.errors import UserError
from spec_lab.core.results import RequestRecord, RoundRecord
from spec_lab.core.types import Request
from spec_lab.lm_eval.reading import cut_at, overrides_of, require_sampling
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.refusals.run import admit
from spec_lab.record.draft_counts import acceptance_length
from spec_lab.record.times import decode_rate
from spec_lab.record.wording import number
from spec_lab.wiring.drafting import load_drafter
from spec_lab.wiring.engine import build_engine
from spec_lab.wiring.limits import engine_limits
from spec_lab.wiring.models import load_models, thinking_markers
from spec_lab.wiring.workloads import longest_sequence
from spec_lab.workloads.conversations import before_end
from spec_lab.workloads.tokenizer import TargetTokenizer

MOST_NEW_TOKENS = "max_gen_toks"
SYSTEM = "system"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of the harness: its text, where its answer is cut, and how long it may be."""

    text: str
    until: Sequence[str]
    most_new_tokens: int


@register_model("spec_lab")
class SpecLabModel(LM):  # type: ignore[misc]  # mypy does not follow the harness
    """A target with its drafter and rule, as composed from the overrides in `--model_args`."""

    def __init__(self, batch_size: Any = 1, max_batch_size: Any = None, device: Any = None, **overrides: Any) -> None:
        super().__init__()
        sizes = {"batch_size": batch_size, "device": device}
        typed = {key: value for key, value in sizes.items() if value is not None} | overrides
        config = compose(overrides_of(typed)).config
        self._chosen: Chosen = admit(config)
        self._tokenizer = TargetTokenizer(self._chosen.target_folder)
        longest = longest_sequence(self._chosen)
        self._models = load_models(self._chosen, longest, thinking_markers(self._tokenizer))
        self._make_drafter = load_drafter(self._chosen, self._models.of_drafters)
        self._is_templated = False
        self.records: list[RequestRecord] = []
        self.rounds: list[RoundRecord] = []

    @property
    def tokenizer_name(self) -> str:
        """Return a name by which the harness distinguishes cached requests."""
        return self._chosen.target_folder.name

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return no template, since the target uses its own one."""
        return ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Write a chat as the target's template does."""
        told = [turn["content"] for turn in chat_history if turn["role"] == SYSTEM]
        turns = [turn["content"] for turn in chat_history if turn["role"] != SYSTEM]
        if not add_generation_prompt or len(turns) % 2 == 0:
            raise UserError(
                "a chat must end with the user; leave out the text with which the task lets the assistant begin"
            )
        self._is_templated = True
        return self._tokenizer.decode(self._tokenizer.encode_conversation(turns, told[0] if told else None))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answer all requests together, in batches of `batch_size`. An answer is cut at the first of its stops."""
        asked = [self._read(*request.args) for request in requests]
        answers = self._answer(asked)
        print(self.describe(), file=sys.stderr)
        return [cut_at(text, each.until) for text, each in zip(answers, asked, strict=True)]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Refuse, since without generation nothing is drafted."""
        raise UserError("--tasks: a task that scores given texts decodes nothing; use a task of type generate_until")

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Refuse, like `loglikelihood`."""
        self.loglikelihood(requests)
        return []

    def describe(self) -> str:
        """Return a line with the amount generated so far, acceptance length and speed."""
        drafts = self._chosen.config.drafter.num_draft_tokens
        length = acceptance_length(self.records, drafts) if drafts else None
        rate = decode_rate(self.rounds)
        tokens = sum(len(record.output_ids) for record in self.records)
        return (
            f"spec_lab: {len(self.records)} answers, {tokens:,} tokens, acceptance length {number(length)}, "
            f"{number(rate, 1)} tokens a second while decoding"
        )

    def _read(self, text: str, wanted: Mapping[str, Any]) -> Asked:
        require_sampling(wanted, self._chosen.config.sampling)
        until = wanted.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        return Asked(text, stops, int(wanted.get(MOST_NEW_TOKENS, self._chosen.config.max_new_tokens)))

    def _answer(self, asked: Sequence[Asked]) -> list[str]:
        prompts = [self._request(place, each) for place, each in enumerate(asked)]
        if not prompts:
            return []
        config = self._chosen.config
        limits = engine_limits(self._chosen, prompts, config.drafter.num_draft_tokens)
        engine = build_engine(self._chosen, self._models, self._make_drafter, limits)
        engine.prepare()
        result = engine.generate(prompts)
        self.records += result.requests
        self.rounds += result.rounds
        eos = self._models.target.eos_token_ids
        return [self._tokenizer.decode(before_end(record.output_ids, eos)) for record in result.requests]

    def _request(self, place: int, asked: Asked) -> Request:
        """Make a request. A text from a template already has its BOS."""
        ids = (
            self._tokenizer.encode(asked.text)
            if self._is_templated
            else self._tokenizer.encode_prompt("continue", asked.text)
        )
        return Request(f"harness-{len(self.records) + place:06d}", "harness", tuple(ids), asked.most_new_tokens)
