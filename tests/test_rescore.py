"""Re-scoring recorded verify rows: exact for the rule that ran, and monotone for the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from spec_lab.acceptance.distribution import SamplingParams
from spec_lab.acceptance.lossy import LossyAcceptance, Window
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.acceptance.phase import ThinkingMarkers
from spec_lab.acceptance.token_laws import OverlapLaw, exact
from spec_lab.config.groups import AcceptanceConfig
from spec_lab.core.errors import UserError
from spec_lab.core.results import GenerationResult
from spec_lab.core.types import Request
from spec_lab.drafters.random import RandomDrafter
from spec_lab.engine.engine import Engine
from spec_lab.measure import trajectory
from spec_lab.measure.trajectory import fitting, record_verify_rows
from spec_lab.options.acceptance.lossless import Strict
from spec_lab.options.acceptance.lossy import Fly, RelaxedThinking
from spec_lab.record.recorder import request_row
from spec_lab.record.verify_rows import RowsOrigin, load_verify_rows, num_bytes_per_round, save_verify_rows
from spec_lab.study.rescore import rescore, rules_in
from tests.fake_target import FakeTarget, PaddedGraph, make_fake_engine

VOCAB, SLOTS, CHUNK, RECORDED = 11, 3, 4, 6
CPU = torch.device("cpu")
MARKERS = ThinkingMarkers(begin=3, end=4)
STRICT = Strict()
RULES: dict[str, AcceptanceConfig] = {
    "strict": STRICT,
    "delta": RelaxedThinking(topk=3, delta=0.1),
    "wide delta": RelaxedThinking(topk=6, delta=1.0),
    "ratio": RelaxedThinking(topk=6, form="ratio", ratio=0.7),
    "by round": RelaxedThinking(topk=3, delta=0.1, phase="round"),
}


class SpreadTarget(FakeTarget):
    """A target whose logits come in coarse steps, so that ties are common and no token is far ahead; markers are common
    too.
    """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        seeds = super().logits(hidden).argmax(dim=-1, keepdim=True)
        steps = (seeds * 31 + torch.arange(VOCAB) * 17 + seeds * torch.arange(VOCAB) * 7) % 5
        steps[:, MARKERS.begin] += 4 * (seeds[:, 0] % 4 == 0)
        steps[:, MARKERS.end] += 4 * (seeds[:, 0] % 4 == 1)
        return steps.float() / 2


def make_requests() -> list[Request]:
    """Make requests of which some begin inside thinking; they are more than there are slots, and longer than a
    chunk.
    """
    prompts = [(5, 3, 6), (5, 6), (3, 4, 5, 6, 7, 8), (3, 5, 6, 7, 8, 9, 10), (7,), (4, 3), (9, 9, 9, 9, 3)]
    return [Request(f"r{i}", "test", prompt, 40, ignore_eos=True) for i, prompt in enumerate(prompts)]


def make_engine(options: AcceptanceConfig, num_draft_tokens: int = 3) -> Engine:
    engine, target = make_fake_engine(
        lambda target: RandomDrafter(num_draft_tokens, VOCAB, SlotSeeds(SLOTS, 0, CPU)),
        num_slots=SLOTS,
        prefill_chunk=CHUNK,
        graph=PaddedGraph(2),
        vocab_size=VOCAB,
    )
    engine.parts.target = SpreadTarget(engine.parts.backend, vocab_size=VOCAB)
    origin = RowsOrigin(
        request_ids=[str(slot) for slot in range(SLOTS)],
        markers=(MARKERS.begin, MARKERS.end),
        eos_token_ids=sorted(target.eos_token_ids),
        prefill_chunk=CHUNK,
    )
    engine.parts.rule = options.judge(origin)
    return engine


def record(folder: Path, engine: Engine) -> GenerationResult:
    """A timed pass, then one that keeps its rows, as the runner does."""
    requests = make_requests()
    result = engine.generate(requests)
    save_verify_rows(folder, record_verify_rows(engine, requests, RECORDED, MARKERS, CHUNK))
    lines = [request_row(request).model_dump_json() for request in result.requests]
    (folder / "requests.jsonl").write_text("\n".join(lines) + "\n")
    return result


@dataclass(frozen=True)
class Recordings:
    """Folders with the rows of a rule of RULES and their results, each made once and only read."""

    root: Path
    made: dict[str, tuple[Path, GenerationResult]] = field(default_factory=dict)

    def of(self, name: str) -> tuple[Path, GenerationResult]:
        if name not in self.made:
            folder = self.root / name
            folder.mkdir()
            self.made[name] = folder, record(folder, make_engine(RULES[name]))
        return self.made[name]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    return Recordings(tmp_path_factory.mktemp("recordings"))


@pytest.mark.parametrize("name", RULES)
def test_the_rule_that_ran_is_reproduced_exactly(name: str, recordings: Recordings) -> None:
    folder, result = recordings.of(name)
    accepted = {request.request_id: request.accepted_per_round for request in result.requests}
    assert rescore(folder, RULES[name]) == accepted
    hits = [count for entry in result.rounds for count in entry.relaxed or []]
    assert bool(hits) == (name != "strict")
    assert name == "strict" or sum(hits) > 5
    first_ids = load_verify_rows(folder).first_ids
    assert {MARKERS.begin, MARKERS.end} <= set(first_ids.tolist()), "the prompt pass's token may set the phase"


@pytest.mark.parametrize("entropy", [1.0, 9.0])
def test_what_was_forgiven_is_forgiven_again(entropy: float, tmp_path: Path) -> None:
    """At temperature 0 `fly` draws nothing, so its recorded rows say what it accepted."""
    engine, options = make_engine(STRICT), Fly(window=1, entropy=entropy)
    window = Window(options.window, options.entropy, options.topk)
    seeds = SlotSeeds(SLOTS, 0, CPU)
    engine.parts.rule = LossyAcceptance(OverlapLaw(exact), SamplingParams(0.0), seeds, window)
    result = record(tmp_path, engine)
    accepted = {request.request_id: request.accepted_per_round for request in result.requests}
    assert rescore(tmp_path, options) == accepted
    assert (rescore(tmp_path, STRICT) == accepted) == (entropy == 9.0), "unless the target is sure, some are forgiven"


@pytest.mark.parametrize("name", [name for name in RULES if name != "strict"])
def test_other_rules_on_a_strict_trajectory(name: str, recordings: Recordings) -> None:
    """Where the text is strict's own, a relaxed rule accepts no less in any round; topk=1 is strict."""
    folder, _ = recordings.of("strict")
    strict, relaxed = rescore(folder, STRICT), rescore(folder, RULES[name])
    pairs = [(a, b) for key in strict for a, b in zip(strict[key], relaxed[key], strict=True)]
    assert all(more >= few for few, more in pairs)
    assert any(more > few for few, more in pairs)
    if getattr(RULES[name], "phase", "") == "token":
        assert rescore(folder, RelaxedThinking(topk=1, delta=1.0)) == strict


def test_strict_on_a_relaxed_trajectory_is_the_leading_argmaxes(recordings: Recordings) -> None:
    folder, _ = recordings.of("wide delta")
    rows = load_verify_rows(folder)
    is_top = rows.draft_ids == rows.top_ids[:, :-1, 0]
    expected = np.cumprod(is_top, axis=1).sum(axis=1)
    assert np.concatenate(list(rescore(folder, STRICT).values())).tolist() == expected.tolist()


def test_recording_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    engine = make_engine(RULES["delta"])
    rule = engine.parts.rule
    first = record(tmp_path, engine)
    assert engine.parts.rule is rule
    again = engine.generate(make_requests())
    assert [r.output_ids for r in again.requests] == [r.output_ids for r in first.requests]


def test_rows_are_what_the_file_says(recordings: Recordings) -> None:
    folder, result = recordings.of("strict")
    rows = load_verify_rows(folder)
    assert rows.origin.request_ids == [f"r{i}" for i in range(7)]
    assert (rows.origin.markers, rows.origin.prefill_chunk) == ((3, 4), CHUNK)
    assert rows.num_rounds.tolist() == [len(r.emitted_per_round) for r in result.requests]
    assert rows.first_ids.tolist() == [r.output_ids[0] for r in result.requests]
    assert rows.accepted.tolist() == [m for r in result.requests for m in r.accepted_per_round]
    assert rows.top_ids.shape == rows.top_probabilities.shape == (rows.num_rounds.sum(), 4, RECORDED)
    size = (folder / "verify_rows.safetensors").stat().st_size
    assert 0 < size - len(rows.accepted) * num_bytes_per_round(3, RECORDED) < 2000


def test_the_file_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole requests are left out at the end, so that what is there can be re-scored."""
    requests = make_requests()
    records = make_engine(STRICT).generate(requests).requests
    room = sum(len(r.emitted_per_round) for r in records[:2]) * num_bytes_per_round(3, RECORDED)
    monkeypatch.setattr(trajectory, "MAX_BYTES", room)
    assert fitting(requests, records, 3, RECORDED) == requests[:2]


def test_rules_are_read_from_arguments() -> None:
    typed = ["acceptance=strict", "acceptance=relaxed_thinking", "acceptance.topk=3,10", "acceptance.delta=0.2"]
    many = [["acceptance=relaxed_thinking", f"acceptance.topk={k}", "acceptance.delta=0.2"] for k in (3, 10)]
    assert rules_in(typed) == [["acceptance=strict"], *many]
    with pytest.raises(UserError, match=r"acceptance\.topk=3,10: a rule is acceptance=RULE"):
        rules_in(typed[2:])
