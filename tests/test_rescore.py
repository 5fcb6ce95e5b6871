"""Re-scoring recorded verify rows: exact for the rule that ran, and monotone for the others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.acceptance.phase import ThinkingMarkers
from spec_lab.assembly.rules import RejectionConfig, RelaxedThinkingConfig, StrictAcceptanceConfig
from spec_lab.assembly.rules_loader import RuleContext, build_deterministic_rule
from spec_lab.config import AcceptanceConfig
from spec_lab.core.types import GenerationResult, Request
from spec_lab.drafters.random import RandomDrafter
from spec_lab.engine.engine import Engine
from spec_lab.rescore import trajectory
from spec_lab.rescore.judge import rescore
from spec_lab.rescore.trajectory import fitting, likeliest, record_verify_rows
from spec_lab.rescore.verify_rows import load_verify_rows, num_bytes_per_round, save_verify_rows
from tests.fake_target import FakeTarget, PaddedGraph, make_fake_engine

VOCAB, SLOTS, CHUNK, RECORDED = 11, 3, 4, 6
CPU = torch.device("cpu")
MARKERS = ThinkingMarkers(begin=3, end=4)
STRICT = StrictAcceptanceConfig()
RULES: dict[str, AcceptanceConfig] = {
    "strict": STRICT,
    "delta": RelaxedThinkingConfig(topk=3, delta=0.1),
    "wide delta": RelaxedThinkingConfig(topk=6, delta=1.0),
    "ratio": RelaxedThinkingConfig(topk=6, form="ratio", ratio=0.7),
    "by round": RelaxedThinkingConfig(topk=3, delta=0.1, phase="round"),
}


class SpreadTarget(FakeTarget):
    """Logits in coarse steps, so that ties are common and no token is far ahead; markers are common too."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        seeds = super().logits(hidden).argmax(dim=-1, keepdim=True)
        steps = (seeds * 31 + torch.arange(VOCAB) * 17 + seeds * torch.arange(VOCAB) * 7) % 5
        steps[:, MARKERS.begin] += 4 * (seeds[:, 0] % 4 == 0)
        steps[:, MARKERS.end] += 4 * (seeds[:, 0] % 4 == 1)
        return steps.float() / 2


def make_requests() -> list[Request]:
    """Some begin inside thinking, some do not; more than there are slots, and longer than a chunk."""
    prompts = [(5, 3, 6), (5, 6), (3, 4, 5, 6, 7, 8), (3, 5, 6, 7, 8, 9, 10), (7,), (4, 3), (9, 9, 9, 9, 3)]
    return [Request(f"r{i}", "test", prompt, 50, ignore_eos=True) for i, prompt in enumerate(prompts)]


def make_engine(options: AcceptanceConfig, num_draft_tokens: int = 3) -> Engine:
    engine, target = make_fake_engine(
        lambda target: RandomDrafter(num_draft_tokens, VOCAB, SlotSeeds(SLOTS, 0, CPU)),
        num_slots=SLOTS,
        prefill_chunk=CHUNK,
        graph=PaddedGraph(2),
        vocab_size=VOCAB,
    )
    engine.parts.target = SpreadTarget(engine.parts.backend, vocab_size=VOCAB)
    context = RuleContext(SLOTS, MARKERS, target.eos_token_ids, CHUNK, CPU)
    engine.parts.rule = build_deterministic_rule(options, context)
    return engine


def record(folder: Path, engine: Engine) -> GenerationResult:
    """A timed pass, then one that keeps its rows, as the runner does."""
    requests = make_requests()
    result = engine.generate(requests)
    save_verify_rows(folder, record_verify_rows(engine, requests, RECORDED, MARKERS, CHUNK))
    lines = [json.dumps({"id": r.request_id, "prompt_ids": r.prompt_ids}) for r in requests]
    (folder / "requests.jsonl").write_text("\n".join(lines))
    return result


@pytest.mark.parametrize("name", RULES)
def test_the_rule_that_ran_is_reproduced_exactly(name: str, tmp_path: Path) -> None:
    result = record(tmp_path, make_engine(RULES[name]))
    accepted = {request.request_id: request.accepted_per_round for request in result.requests}
    assert rescore(tmp_path, RULES[name]) == accepted
    hits = [count for entry in result.rounds for count in entry.relaxed or []]
    assert bool(hits) == (name != "strict")
    assert name == "strict" or sum(hits) > 5
    first_ids = load_verify_rows(tmp_path).first_ids
    assert {MARKERS.begin, MARKERS.end} <= set(first_ids.tolist()), "the prompt pass's token may set the phase"


@pytest.mark.parametrize("name", [name for name in RULES if name != "strict"])
def test_other_rules_on_a_strict_trajectory(name: str, tmp_path: Path) -> None:
    """Where the text is strict's own, a relaxed rule accepts no less in any round; topk=1 is strict."""
    record(tmp_path, make_engine(STRICT))
    strict, relaxed = rescore(tmp_path, STRICT), rescore(tmp_path, RULES[name])
    pairs = [(a, b) for key in strict for a, b in zip(strict[key], relaxed[key], strict=True)]
    assert all(more >= few for few, more in pairs)
    assert any(more > few for few, more in pairs)
    if getattr(RULES[name], "phase", "") == "token":
        assert rescore(tmp_path, RelaxedThinkingConfig(topk=1, delta=1.0)) == strict


def test_strict_on_a_relaxed_trajectory_is_the_leading_argmaxes(tmp_path: Path) -> None:
    record(tmp_path, make_engine(RULES["wide delta"]))
    rows = load_verify_rows(tmp_path)
    is_top = rows.draft_ids == rows.top_ids[:, :-1, 0]
    expected = np.cumprod(is_top, axis=1).sum(axis=1)
    assert np.concatenate(list(rescore(tmp_path, STRICT).values())).tolist() == expected.tolist()


def test_recording_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    engine = make_engine(RULES["delta"])
    rule = engine.parts.rule
    first = record(tmp_path, engine)
    assert engine.parts.rule is rule
    again = engine.generate(make_requests())
    assert [r.output_ids for r in again.requests] == [r.output_ids for r in first.requests]


def test_rows_are_what_the_file_says(tmp_path: Path) -> None:
    result = record(tmp_path, make_engine(STRICT))
    rows = load_verify_rows(tmp_path)
    assert rows.origin.request_ids == [f"r{i}" for i in range(7)]
    assert (rows.origin.markers, rows.origin.prefill_chunk) == ((3, 4), CHUNK)
    assert rows.num_rounds.tolist() == [len(r.emitted_per_round) for r in result.requests]
    assert rows.first_ids.tolist() == [r.output_ids[0] for r in result.requests]
    assert rows.accepted.tolist() == [m for r in result.requests for m in r.accepted_per_round]
    assert rows.top_ids.shape == rows.top_probabilities.shape == (rows.num_rounds.sum(), 4, RECORDED)
    size = (tmp_path / "verify_rows.safetensors").stat().st_size
    assert 0 < size - len(rows.accepted) * num_bytes_per_round(3, RECORDED) < 2000


def test_likeliest_ranks_by_logit_and_ties_by_id() -> None:
    ids, probabilities = likeliest(torch.tensor([[1.0, 3.0, 1.0, 3.0, 2.0]]), 4)
    assert ids.tolist() == [[1, 3, 4, 0]]
    assert probabilities[0, 0] == probabilities[0, 1] > probabilities[0, 2] > probabilities[0, 3]


def test_no_drafts_no_rows_beyond_the_first(tmp_path: Path) -> None:
    record(tmp_path, make_engine(STRICT, num_draft_tokens=0))
    assert set(np.concatenate(list(rescore(tmp_path, STRICT).values()))) == {0}


def test_the_file_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole requests are left out at the end, so that what is there can be re-scored."""
    requests = make_requests()
    records = make_engine(STRICT).generate(requests).requests
    room = sum(len(r.emitted_per_round) for r in records[:2]) * num_bytes_per_round(3, RECORDED)
    monkeypatch.setattr(trajectory, "MAX_BYTES", room)
    assert fitting(requests, records, 3, RECORDED) == requests[:2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RelaxedThinkingConfig(topk=7), "run again with record.topk=7"),
        (RejectionConfig(), "acceptance=rejection draws"),
    ],
)
def test_what_cannot_be_rescored_is_refused(options: AcceptanceConfig, message: str, tmp_path: Path) -> None:
    record(tmp_path, make_engine(STRICT))
    with pytest.raises(ValueError, match=message):
        rescore(tmp_path, options)


def test_a_run_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run with record\.topk=16"):
        rescore(tmp_path, STRICT)
