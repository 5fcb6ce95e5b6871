"""Thinking: its markers and its switch, in a run, the doctor and the harness, each beside what follows by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import spec_lab
from spec_lab.acceptance.phase import ThinkingMarkers
from spec_lab.config.checks import admit
from spec_lab.config.groups import TargetConfig
from spec_lab.core.errors import UserError
from spec_lab.doctor.subject import load_subject
from spec_lab.record.models import Request
from spec_lab.workloads.thinking import reply_of, thinking_markers
from spec_lab.workloads.tokenizer import TargetTokenizer
from tests.tiny_runs import make_runnable_pair, write_prompts, write_tokenizer

K = 3
TURN = "<|turn|>"
TEMPLATE = "{% for message in messages %}" + TURN + "{{ message.content }}{% endfor %}" + TURN
OPEN = TEMPLATE + "[THINK]"
SWITCHED = "{% if SWITCH %}+{% else %}-{% endif %}"
SHORT = ["repeats=1", "warmup_requests=0", "profile_rounds=0", "max_new_tokens=12", "num_threads=1", "references=[]"]


def write_template(folder: Path, template: str, special: Sequence[str]) -> None:
    """Write a chat template, and a tokenizer that has `TURN` and `special` as its last tokens."""
    write_tokenizer(folder, (TURN, *special))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return make_runnable_pair(tmp_path)


def overrides(pair: tuple[Path, Path], tmp_path: Path, *more: str) -> list[str]:
    prompts = write_prompts(tmp_path / "prompts.jsonl", [{"prompt": "abc", "answer": "x"}, {"prompt": "dcba"}])
    here = ["target=hf", f"target.path={pair[0]}", "drafter=eagle3", f"drafter.path={pair[1]}", "device=cpu"]
    where = ["workload=jsonl", f"workload.path={prompts}", f"output_dir={tmp_path / 'outputs'}"]
    return [*here, *where, *SHORT, f"drafter.num_draft_tokens={K}", *more]


@pytest.mark.parametrize(
    ("template", "special", "found"),
    [
        ("", ("[THINK]", "[/THINK]"), (158, 159)),
        ("", ("<think>", "</think>", "[THINK]", "[/THINK]"), (156, 157)),
        ("[THINK]", ("<think>", "</think>", "[THINK]", "[/THINK]"), (158, 159)),
        ("{{ message.content.split('</seed:think>')[1] }}", ("<seed:think>", "</seed:think>"), (158, 159)),
        ("<|START_THINKING|>", ("<|END_THINKING|>", "<|START_THINKING|>"), (159, 158)),
        ("{{ message['thinking'] }}<|think|>", ("<|think|>", "<|channel>", "<channel|>"), (158, 159)),
        ("[THINK]", ("[THINK]",), None),
        ("", (), None),
    ],
)
def test_markers_are_those_of_the_template_or_else_known_ones(
    template: str, special: tuple[str, ...], found: tuple[int, int] | None, tmp_path: Path
) -> None:
    write_template(tmp_path, "{# " + template + " #}" + TEMPLATE, special)
    markers = thinking_markers(TargetTokenizer(tmp_path), TargetConfig())
    assert markers == (None if found is None else ThinkingMarkers(*found))


@pytest.mark.parametrize(
    ("begin", "end", "found"),
    [("a", "b", (64, 65)), ("7", "159", (7, 159)), (None, "b", (158, 65)), ("a", None, (64, 159))],
)
def test_a_marker_is_given_by_its_text_or_its_id(
    begin: str | None, end: str | None, found: tuple[int, int], tmp_path: Path
) -> None:
    write_template(tmp_path, OPEN, ("[THINK]", "[/THINK]"))
    options = TargetConfig(thinking_begin=begin, thinking_end=end)
    assert thinking_markers(TargetTokenizer(tmp_path), options) == ThinkingMarkers(*found)


def test_an_answer_stands_behind_the_markers_of_the_run() -> None:
    assert reply_of("hm[/THINK]42", pairs=[("[THINK]", "[/THINK]")]) == "42"
    assert reply_of("[THINK]hm", pairs=[("[THINK]", "[/THINK]")]) is None
    assert reply_of("<think>hm", pairs=[("[THINK]", "[/THINK]")]) == "<think>hm"


def thinking_in(row: Request) -> int:
    """Number of output tokens inside thinking."""
    return sum(end - start for start, end in row.thinking_spans or ())


@pytest.mark.parametrize("phase", ["token", "round"])
@pytest.mark.parametrize(
    ("template", "knobs"),
    [
        (OPEN, ()),
        (TEMPLATE, (f"target.thinking_begin='{TURN}'", "target.thinking_end=159")),
    ],
    ids=["template", "knobs"],
)
def test_relaxed_acceptance_takes_every_draft_while_thinking_is_open(
    template: str, knobs: tuple[str, ...], phase: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """With every token among the candidates, at any distance, a round accepts all its drafts; the drafts of a random
    head are else hardly ever right."""
    write_template(pair[0], template, ("[THINK]", "[/THINK]") if template is OPEN else ())
    relaxed = [
        "acceptance=relaxed_thinking",
        "acceptance.topk=160",
        "acceptance.delta=1.0",
        f"acceptance.phase={phase}",
    ]
    result = spec_lab.run(spec_lab.compose(overrides(pair, tmp_path, *relaxed, *knobs)))
    accepted = [row.accepted_per_round[:-1] for row in result.requests]
    assert accepted == [[K, K], [K, K]]
    assert [thinking_in(row) for row in result.requests] == [12, 12]
    strict = spec_lab.run(spec_lab.compose(overrides(pair, tmp_path, *knobs)))
    assert sum(sum(row.accepted_per_round) for row in strict.requests) < K


@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
@pytest.mark.parametrize("thinks", [True, False])
def test_the_switch_reaches_a_run_and_the_doctor(
    switch: str, thinks: bool, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    write_template(pair[0], TEMPLATE + SWITCHED.replace("SWITCH", switch), ())
    tokenizer = TargetTokenizer(pair[0])
    expected = tokenizer.encode(f"{TURN}abc{TURN}{'+' if thinks else '-'}")
    composed = spec_lab.compose(overrides(pair, tmp_path, f"workload.thinking={thinks}"))
    assert list(load_subject(admit(composed.config)).requests[0].prompt_ids) == expected
    assert spec_lab.run(composed).requests[0].prompt_ids == expected


@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE + "{% set thinking = true %}{{ thinking }}"])
def test_a_template_without_the_switch_is_refused(template: str, tmp_path: Path) -> None:
    write_template(tmp_path, template, ())
    with pytest.raises(UserError, match=r"workload\.thinking"):
        TargetTokenizer(tmp_path, thinking=False)


class Harness:
    """The harness's model of a tiny target, and what is asked of it."""

    def __init__(self, pair: tuple[Path, Path], **more: Any) -> None:
        pytest.importorskip("lm_eval", reason="needs the extra `eval`: pip install -c constraints.txt -e '.[eval]'")
        from spec_lab.lm_eval.model import SpecLabModel

        paths = {"target": "hf", "target.path": pair[0], "drafter": "eagle3", "drafter.path": pair[1]}
        self.model = SpecLabModel(**paths, device="cpu", num_threads=1, max_new_tokens=12, **more)

    def answer(self, user: str, **settings: Any) -> str:
        from lm_eval.api.instance import Instance

        text = self.model.apply_chat_template([{"role": "user", "content": user}])
        (answer,) = self.model.generate_until([Instance("generate_until", {}, (text, settings), 0)])
        return str(answer)

    @property
    def last(self) -> Any:
        return self.model.records[-1]


def test_the_harness_answers_behind_the_thinking_and_stops_there(pair: tuple[Path, Path]) -> None:
    """A stop that the thinking has too cuts the answer only."""
    write_template(pair[0], TEMPLATE, ())
    plain = Harness(pair)
    words = plain.answer("abc").split(" ")
    assert len(words) == 12
    last_turn = max((place for place, word in enumerate(words) if word == TURN), default=-1)
    # The last thought: it is not in the answer. The stop: it is in both, but does not begin the answer.
    end, stop = next(
        (end, stop)
        for end in range(last_turn + 1, 11)
        for stop in words[:end]
        if words[end] not in words[end + 1 :] and stop in words[end + 2 :] and stop != words[end + 1]
    )
    markers = {"target.thinking_begin": f"'{TURN}'", "target.thinking_end": str(plain.last.output_ids[end])}
    thinking, answer = Harness(pair, **markers), " ".join(words[end + 1 :])
    assert thinking.answer("abc") == answer
    assert thinking.answer("abc", until=[stop]) == answer.partition(stop)[0] != ""
    assert thinking.answer("abc", max_gen_toks=end) == "", "there is no answer before thinking ends"


@pytest.mark.parametrize(
    "setting",
    [{"repetition_penalty": 1.2}, {"min_p": 0.1}, {"typical_p": 0.5}, {"num_beams": 4}, {"stopping": ["x"]}],
)
def test_the_harness_refuses_what_it_does_not_read(setting: dict[str, Any], pair: tuple[Path, Path]) -> None:
    harness = Harness(pair)
    with pytest.raises(UserError, match=next(iter(setting))):
        harness.answer("abc", **setting)
    harness.answer("abc", repetition_penalty=1.0, num_beams=1, min_p=0, max_gen_toks=1)


@pytest.mark.parametrize("thinks", [True, False])
def test_the_harness_gives_a_chat_the_ids_that_a_run_gives_it(thinks: bool, pair: tuple[Path, Path]) -> None:
    """Also with a tokenizer that puts a space in front of each text, as Llama 2's does."""
    from tokenizers import Tokenizer, decoders, normalizers

    write_template(pair[0], TEMPLATE + SWITCHED.replace("SWITCH", "enable_thinking"), (" ",))
    path = pair[0] / "tokenizer.json"
    spaced = Tokenizer.from_file(str(path))
    spaced.normalizer, spaced.decoder = normalizers.Prepend("_"), decoders.Replace("_", " ")
    spaced.save(str(path))
    harness, tokenizer = Harness(pair, **{"workload.thinking": thinks}), TargetTokenizer(pair[0], thinks)
    harness.answer("abc", max_gen_toks=1)
    assert harness.last.prompt_ids == tokenizer.encode_conversation(["abc"])
    assert tokenizer.encode(tokenizer.decode(harness.last.prompt_ids)) != harness.last.prompt_ids
