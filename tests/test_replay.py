"""acceptance=replay: the runs of a record, wherever rounds begin and however many drafts they offer."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spec_lab.acceptance.confidences import DraftConfidences
from spec_lab.acceptance.replay import RecordedRound, ReplayAcceptance, runs_of
from spec_lab.config.run import RecordConfig
from spec_lab.core.errors import UserError
from spec_lab.options.acceptance.imposed import Replay
from spec_lab.record.models import Request as RequestRow
from spec_lab.record.models import Run
from spec_lab.record.names import REQUESTS_FILE, SUMMARY_FILE
from tests import drawn_plan  # noqa: F401  registers a plan
from tests.acceptance_cases import CPU, make_inputs, request
from tests.graph_lab import MODES, RULES, Lab, Rule, lab, mixed_requests

__all__ = ["lab"]

ROUNDS = [RecordedRound(3, False, (0.8, 0.4, 0.1)), RecordedRound(1, False, (0.5, 0.25, 0.25))]


def test_every_position_of_a_run_accepts_what_is_left_of_it() -> None:
    left, survival = runs_of(ROUNDS, 3)
    assert left == [2, 1, 0, 0]
    assert [pytest.approx(row) for row in survival] == [
        [0.8, 0.4, 0.1],
        [0.5, 0.125, 0.03125],
        [0.25, 0.0625, 0.015625],
        [0.5, 0.25, 0.25],
    ]


def test_a_round_without_a_rejected_draft_goes_on_in_the_next() -> None:
    """It accepted all its drafts, or the text ended inside it; behind the last round the first begins anew."""
    left, survival = runs_of([RecordedRound(2, True, (0.8,)), *ROUNDS, RecordedRound(1, True, (0.9, 0.9, 0.9))], 3)
    assert left == [4, 3, 2, 1, 0, 0, 5]
    expected = {0: [0.8, 0.64, 0.512], 1: [0.8, 0.64, 0.32], 6: [0.9, 0.72, 0.576]}
    assert {place: survival[place] for place in expected} == {k: pytest.approx(row) for k, row in expected.items()}


@pytest.mark.parametrize("rate", [0.3, 0.7, 0.95])
def test_a_recording_of_seven_drafts_replays_every_smaller_number_exactly(rate: float) -> None:
    """A drafter that predicts a token or not, wherever it begins; it predicts those behind a round that accepts all."""
    draw, most = random.Random(0), 7
    predicts = [draw.random() < rate for _ in range(2000)]

    def accepted_by(num_offered: int) -> list[int]:
        counts, place = [], 0
        while place + most + 1 < len(predicts):
            count = next((i for i in range(num_offered) if not predicts[place + i]), num_offered)
            predicts[place + count] |= num_offered == most == count
            counts.append(count)
            place += count + 1
        return counts

    left, _ = runs_of([RecordedRound(count + 1, count == most) for count in accepted_by(most)], most)
    for num_offered in range(1, most + 1):
        place = 0
        for count in accepted_by(num_offered)[: -most - 1]:  # the last runs are longer than the recording
            assert min(left[place], num_offered) == count
            place += count + 1


@pytest.mark.parametrize("offers", [[3] * 4, [1, 0, 3, 2, 1, 3], [0] * 6])
def test_a_request_goes_through_the_recorded_runs(offers: list[int]) -> None:
    """By a walk over the positions; behind the record's end it begins anew."""
    confidences = DraftConfidences(1, 3, CPU)
    rule = ReplayAcceptance({"a": ROUNDS}, 1, 3, CPU, confidences)
    rule.admit(0, request((7, 7, 7), "b"))
    left, survival = runs_of(ROUNDS, 3)
    place = 0
    for offered in offers:
        torch.testing.assert_close(confidences.survival[0], torch.tensor(survival[place % 4]))
        confidences.note(torch.tensor([0]), torch.tensor([0.99]))  # what this run's drafter says is not kept
        inputs = make_inputs(torch.zeros(1, 4, 8), [[1, 2, 3]], kv_lens=torch.tensor([3 + place]))
        expected = min(left[place % 4], offered)
        verification = rule.accept(replace(inputs, num_drafts=torch.tensor([offered])))
        assert verification.num_emitted.tolist() == [expected + 1]
        place += expected + 1


def replay_of(folder: Path, rows: list[RequestRow], tree: str = "none") -> Rule:
    """The rule that replays the requests, in a record of a run with this tree."""
    (folder / REQUESTS_FILE).write_text("".join(f"{row.model_dump_json()}\n" for row in rows))
    (folder / SUMMARY_FILE).write_text(Run(status="finished", config={"tree": {"name": tree}}).model_dump_json())
    return replace(RULES["strict"], acceptance=Replay(path=str(folder)))


@pytest.mark.parametrize("plan", ["none", "drawn"])
def test_a_replayed_run_has_the_recorded_acceptance(lab: Lab, plan: str, tmp_path: Path) -> None:
    """At the recorded K round by round, captured too; with fewer drafts never more than is left of a run."""
    requests = [replace(each, ignore_eos=True, max_new_tokens=14) for each in mixed_requests(3, 14)]
    keeps = {"batch_size": 2, "record": RecordConfig(confidences=True), "max_new_tokens": 1}  # they have their own
    recorded = lab.engine(requests, None, **keeps).generate(requests).requests
    rows = [
        RequestRow(
            id=each.request_id,
            prompt_ids=each.prompt_ids,
            output_ids=each.output_ids,
            offered_per_round=each.offered_per_round,
            accepted_per_round=each.accepted_per_round,
            judged_per_round=each.judged_per_round,
            confidence_per_round=each.confidence_per_round,
        )
        for each in recorded
    ]
    rule = replay_of(tmp_path, rows)
    for mode in (None, MODES["round"]):
        engine = lab.engine(requests, mode, "mtp_eagle", rule=rule, options={"plan": plan}, **keeps)
        for got, expected in zip(engine.generate(requests).requests, recorded, strict=True):
            left, _ = runs_of([RecordedRound(n + 1, n == 3) for n in expected.accepted_per_round], 3)
            place = 0
            for accepted, offered in zip(got.accepted_per_round, got.offered_per_round, strict=True):
                assert accepted == min(left[place % len(left)], offered)
                place += accepted + 1
            if plan == "none":
                assert got.accepted_per_round == expected.accepted_per_round
                assert got.confidence_per_round == [pytest.approx(row) for row in expected.confidence_per_round]


@pytest.mark.parametrize(("num_judged", "num_accepted"), [(3, 2), (2, 3)])
def test_where_a_text_ended_nobody_knows_what_was_predicted(
    lab: Lab, tmp_path: Path, num_judged: int, num_accepted: int
) -> None:
    row = RequestRow(id="r0", prompt_ids=[1], output_ids=[1, 2, 3], offered_per_round=[3], accepted_per_round=[2])
    row.judged_per_round = [num_judged]
    requests = mixed_requests(1, 16)
    (got,) = lab.engine(requests, None, rule=replay_of(tmp_path, [row])).generate(requests).requests
    assert set(got.accepted_per_round) == {num_accepted}


@pytest.mark.parametrize(
    ("offered", "tree", "remedy"),
    [
        ([3, 2], "none", r"drafter\.num_draft_tokens=3 drafter\.plan=none"),
        ([3], "static", "tree=none"),
        ([3], "none", r"record\.confidences=true"),
    ],
)
def test_a_record_without_what_is_replayed_is_refused(
    lab: Lab, tmp_path: Path, offered: list[int], tree: str, remedy: str
) -> None:
    counts = {"accepted_per_round": [0] * len(offered), "judged_per_round": [1] * len(offered)}
    row = RequestRow(id="a", prompt_ids=[1], output_ids=[1, 2], offered_per_round=offered, **counts)
    with pytest.raises(UserError, match=remedy):
        lab.engine(
            mixed_requests(1, 4), None, rule=replay_of(tmp_path, [row], tree), record=RecordConfig(confidences=True)
        )
