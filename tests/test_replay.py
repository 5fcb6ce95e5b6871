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
from spec_lab.record.names import REQUESTS_FILE
from tests import drawn_plan  # noqa: F401  registers a plan
from tests.acceptance_cases import CPU, make_inputs, request
from tests.graph_lab import MODES, RULES, Lab, lab, mixed_requests

__all__ = ["lab"]

ROUNDS = [RecordedRound(2, 3, (0.8, 0.4, 0.1)), RecordedRound(0, 3, (0.5, 0.25, 0.25))]


def test_every_position_of_a_run_accepts_what_is_left_of_it() -> None:
    left, survival = runs_of(ROUNDS, 3)
    assert left == [2, 1, 0, 0]
    assert [pytest.approx(row) for row in survival] == [
        [0.8, 0.4, 0.1],
        [0.5, 0.125, 0.03125],
        [0.25, 0.0625, 0.015625],
        [0.5, 0.25, 0.25],
    ]


def test_a_round_that_accepted_all_goes_on_in_the_next() -> None:
    assert runs_of([RecordedRound(0, 0)] * 2, 3)[0] == [0, 0], "nothing offered is nothing accepted"
    left, survival = runs_of([RecordedRound(1, 1, (0.8,)), *ROUNDS], 3)
    assert left == [4, 3, 2, 1, 0, 0]
    assert [pytest.approx(row) for row in survival[:2]] == [[0.8, 0.64, 0.512], [0.8, 0.64, 0.32]]


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

    left, _ = runs_of([RecordedRound(count, most) for count in accepted_by(most)], most)
    for num_offered in range(1, most + 1):
        place = 0
        for count in accepted_by(num_offered)[: -most - 1]:  # the last runs are longer than the recording
            assert min(left[place], num_offered) == count
            place += count + 1


@pytest.mark.parametrize("offers", [[3] * 4, [1, 0, 3, 2, 1, 3], [0] * 6])
def test_a_request_goes_through_the_recorded_runs(offers: list[int]) -> None:
    """By a walk over the positions; behind the record's end it begins anew."""
    confidences = DraftConfidences(1, 3, CPU)
    rule = ReplayAcceptance({"a": ROUNDS}, 1, 40, 3, CPU, confidences)
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


@pytest.mark.parametrize("plan", ["none", "drawn"])
def test_a_replayed_run_has_the_recorded_acceptance(lab: Lab, plan: str, tmp_path: Path) -> None:
    """At the recorded K round by round, captured too; with fewer drafts never more than is left of a run."""
    requests = [replace(each, ignore_eos=True, max_new_tokens=14) for each in mixed_requests(3, 14)]
    keeps = {"batch_size": 2, "record": RecordConfig(confidences=True)}
    recorded = lab.engine(requests, None, **keeps).generate(requests).requests
    rows = [
        RequestRow(
            id=each.request_id,
            prompt_ids=each.prompt_ids,
            output_ids=each.output_ids,
            offered_per_round=each.offered_per_round,
            accepted_per_round=each.accepted_per_round,
            confidence_per_round=each.confidence_per_round,
        )
        for each in recorded
    ]
    (tmp_path / REQUESTS_FILE).write_text("".join(f"{row.model_dump_json()}\n" for row in rows))
    rule = replace(RULES["strict"], acceptance=Replay(path=str(tmp_path)))
    for mode in (None, MODES["round"]):
        engine = lab.engine(requests, mode, "mtp_eagle", rule=rule, options={"plan": plan}, **keeps)
        for got, expected in zip(engine.generate(requests).requests, recorded, strict=True):
            left, _ = runs_of([RecordedRound(count, 3) for count in expected.accepted_per_round], 3)
            place = 0
            for accepted, offered in zip(got.accepted_per_round, got.offered_per_round, strict=True):
                assert accepted == min(left[place % len(left)], offered)
                place += accepted + 1
            if plan == "none":
                assert got.accepted_per_round == expected.accepted_per_round
                assert got.confidence_per_round == [pytest.approx(row) for row in expected.confidence_per_round]


def test_a_record_without_what_is_replayed_is_refused(lab: Lab, tmp_path: Path) -> None:
    requests = mixed_requests(1, 4)
    row = RequestRow(id="a", prompt_ids=[1], output_ids=[1, 2], accepted_per_round=[0], offered_per_round=[3])
    (tmp_path / REQUESTS_FILE).write_text(f"{row.model_dump_json()}\n")
    rule = replace(RULES["strict"], acceptance=Replay(path=str(tmp_path)))
    with pytest.raises(UserError, match=r"record\.confidences=true"):
        lab.engine(requests, None, rule=rule, record=RecordConfig(confidences=True))
