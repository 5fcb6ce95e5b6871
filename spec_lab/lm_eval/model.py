"""`--model spec_lab`: answers the harness's requests with the engine, and reports acceptance length and speed.

Only this module and `__main__` import the harness.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
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


@register_model("spec_lab")
class SpecLabModel(LM):  # type: ignore[misc]  # mypy does not follow the harness
    """A target with its drafter and rule, as composed from the overrides in `--model_args`."""

    def __init__(self, batch_size: Any = 1, max_batch_size: Any = None, device: Any = None, **overrides: Any) -> None:
        super().__init__()
        sizes = {"batch_size": batch_size, "device": device}
        typed = {key: value for key, value in sizes.items() if value is not None} | overrides
        self._run = config = with_auto_chosen(admit(compose(overrides_of(typed)).config))
        self._tokenizer = TargetTokenizer(config.target.folder, config.workload.thinking)
        markers = thinking_markers(self._tokenizer, config.target)
        self._models = load_models(config, longest_sequence(config), markers)
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
        prompts = [self._request(place, *request.args) for place, request in enumerate(requests, len(self.records))]
        engine = build_engine(self._run, self._models, engine_limits(self._run, prompts))
        engine.prepare()
        result = engine.generate(prompts)
        self.records += result.requests
        self.rounds += result.rounds
        drafts = self._run.drafter.num_draft_tokens
        length = acceptance_length(self.records, drafts) if drafts else None
        print(
            f"spec_lab: {len(self.records)} answers, {sum(len(each.output_ids) for each in self.records):,} tokens, "
            f"acceptance length {number(length)}, {number(decode_rate(self.rounds), 1)} tokens a second while decoding",
            file=sys.stderr,
        )
        return [
            self._answer(record, request.args[1].get("until") or [])
            for record, request in zip(result.requests, requests, strict=True)
        ]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Refuse, since without generation nothing is drafted."""
        raise NotImplementedError("a task that scores given texts decodes nothing; take one of type generate_until")

    loglikelihood_rolling = loglikelihood

    def _request(self, index: int, text: str, wanted: Mapping[str, Any]) -> Request:
        """Make a request, with the ids that a run gives its prompts."""
        require_sampling(wanted, self._run.sampling)
        rendered = self._rendered.get(text)
        ids = (
            self._tokenizer.encode_prompt("continue", text)
            if rendered is None
            else self._tokenizer.encode_rendered(rendered)
        )
        longest = most_new_tokens(wanted, self._run.max_new_tokens)
        return Request(f"harness-{index:06d}", "harness", tuple(ids), longest)

    def _answer(self, record: RequestRecord, until: str | Sequence[str]) -> str:
        eos, markers = self._models.target.eos_token_ids, self._models.markers
        text = self._tokenizer.decode(before_end(record.output_ids, eos))
        is_open = markers is not None and markers.hide_answer(record.prompt_ids, eos)
        stops = [until] if isinstance(until, str) else until
        return answer_in(text, stops, is_open, thinking_pairs(self._tokenizer, markers))
