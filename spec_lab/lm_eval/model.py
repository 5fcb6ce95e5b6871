"""`--model spec_lab`: answers the harness's requests with the engine, and reports acceptance length and speed.

Only this module and `__main__` import the harness.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from spec_lab.app.compose import compose
from spec_lab.build.auto import with_auto_chosen
from spec_lab.build.engine import build_engine
from spec_lab.build.limits import engine_limits, longest_sequence
from spec_lab.build.models import load_models
from spec_lab.config.checks import admit
from spec_lab.core.results import RequestRecord, RoundRecord
from spec_lab.core.types import Request
from spec_lab.lm_eval.reading import answer_in, most_new_tokens, overrides_of, require_sampling
from spec_lab.record.draft_counts import acceptance_length
from spec_lab.record.times import decode_rate
from spec_lab.record.wording import number
from spec_lab.workloads.chat_template import Rendered
from spec_lab.workloads.conversations import before_end
from spec_lab.workloads.thinking import thinking_markers, thinking_pairs
from spec_lab.workloads.tokenizer import TargetTokenizer

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
        self._run = config = with_auto_chosen(admit(config))
        self._tokenizer = TargetTokenizer(self._run.target.folder, config.workload.thinking)
        longest = longest_sequence(self._run)
        markers = thinking_markers(self._tokenizer, config.target)
        self._models = load_models(self._run, longest, markers)
        self._rendered: dict[str, Rendered] = {}
        self.records: list[RequestRecord] = []
        self.rounds: list[RoundRecord] = []

    @property
    def tokenizer_name(self) -> str:
        """Return a name by which the harness distinguishes cached requests."""
        return self._run.target.folder.name

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return no template, since the target uses its own one."""
        return ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Write a chat as the target's template does, and then the assistant's first words, if the task has some."""
        told = [turn["content"] for turn in chat_history if turn["role"] == SYSTEM]
        system = told[0] if told else self._run.workload.system
        turns = [turn["content"] for turn in chat_history if turn["role"] != SYSTEM]
        begun = "" if add_generation_prompt else turns.pop()
        rendered = self._tokenizer.render_conversation(turns, system)
        rendered = replace(rendered, text=rendered.text + begun)
        self._rendered[rendered.text] = rendered
        return rendered.text

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answer all requests together, in batches of `batch_size`. An answer is what stands behind
        the thinking, cut at the first of its stops."""
        asked = [self._read(*request.args) for request in requests]
        answers = self._answer(asked)
        print(self.describe(), file=sys.stderr)
        return answers

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Refuse, since without generation nothing is drafted."""
        raise NotImplementedError("a task that scores given texts decodes nothing; take one of type generate_until")

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Refuse, like `loglikelihood`."""
        self.loglikelihood(requests)
        return []

    def describe(self) -> str:
        """Return a line with the amount generated so far, acceptance length and speed."""
        drafts = self._run.drafter.num_draft_tokens
        length = acceptance_length(self.records, drafts) if drafts else None
        rate = decode_rate(self.rounds)
        num_tokens = sum(len(record.output_ids) for record in self.records)
        return (
            f"spec_lab: {len(self.records)} answers, {num_tokens:,} tokens, acceptance length "
            f"{number(length)}, {number(rate, 1)} tokens a second while decoding"
        )

    def _read(self, text: str, wanted: Mapping[str, Any]) -> Asked:
        require_sampling(wanted, self._run.sampling)
        until = wanted.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        return Asked(text, stops, most_new_tokens(wanted, self._run.max_new_tokens))

    def _answer(self, asked: Sequence[Asked]) -> list[str]:
        prompts = [self._request(place, each) for place, each in enumerate(asked)]
        if not prompts:
            return []
        limits = engine_limits(self._run, prompts)
        engine = build_engine(self._run, self._models, limits)
        engine.prepare()
        result = engine.generate(prompts)
        self.records += result.requests
        self.rounds += result.rounds
        return [self._read_answer(record, each) for record, each in zip(result.requests, asked, strict=True)]

    def _read_answer(self, record: RequestRecord, asked: Asked) -> str:
        eos, markers = self._models.target.eos_token_ids, self._models.markers
        text = self._tokenizer.decode(before_end(record.output_ids, eos))
        pairs = thinking_pairs(self._tokenizer, markers)
        is_open = markers is not None and markers.hide_answer(record.prompt_ids, eos)
        return answer_in(text, asked.until, is_open, pairs)

    def _request(self, place: int, asked: Asked) -> Request:
        """Make a request, with the ids that a run gives its prompts."""
        rendered = self._rendered.get(asked.text)
        ids = (
            self._tokenizer.encode_prompt("continue", asked.text)
            if rendered is None
            else self._tokenizer.encode_rendered(rendered)
        )
        return Request(f"harness-{len(self.records) + place:06d}", "harness", tuple(ids), asked.most_new_tokens)
