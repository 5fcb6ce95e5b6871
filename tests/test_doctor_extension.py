"""What an extension's drafter brings for the doctor is reported beside the built-in aspects. No model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from spec_lab.cli.compose import compose_run
from spec_lab.doctor import examine
from spec_lab.doctor.evidence import Evidence
from spec_lab.doctor.findings import Verdict, does_not_apply
from spec_lab.doctor.readings import ALL_ASPECTS, aspects_of, check_readings
from spec_lab.doctor.subject import Subject
from spec_lab.doctor.teacher_forced import Drafted
from spec_lab.menu import registry
from spec_lab.menu.chosen import choose
from spec_lab.menu.config import RunConfig
from spec_lab.menu.option import DrafterOption
from spec_lab.wiring.drafting import DrafterFactory

NUM_ROUNDS = 40
MINE_LAB = """
from dataclasses import replace
from spec_lab.options.drafters import eagle3, none

def aspects(chosen, options, build):
    from spec_lab.extend import Aspect, Reading
    return [
        Aspect("my aspect", "as it is", [Reading("the other way", lambda: None)]),
        Aspect("concat order", "as it is", [Reading("swapped", lambda: None)]),
        Aspect("my fixed aspect", "all keys", []),
    ]

def register(registry):
    registry.add(replace(eagle3.ROW, name="mine", aspects=aspects))
    registry.add(replace(none.ROW, name="weightless", folder=None, aspects=aspects))
"""


@dataclass
class EveryDraftIsRight:
    """Stands for teacher forcing: another reading than the configured one has every draft accepted."""

    def draft(self, make_drafter: DrafterFactory) -> Drafted:
        return Drafted(torch.zeros(NUM_ROUNDS, 3), torch.full((NUM_ROUNDS,), 3))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run with the extension's drafter `mine`."""
    (tmp_path / "mine_lab.py").write_text(MINE_LAB)
    monkeypatch.syspath_prepend(str(tmp_path))
    config, _ = compose_run(["drafter=eagle3"])
    config.extensions = ["mine_lab"]
    config.drafter.name = registry.load(config.extensions).find(DrafterOption, "mine").name
    return config


def test_every_aspect_of_the_row_is_reported(config: RunConfig) -> None:
    configured = Drafted(torch.zeros(NUM_ROUNDS, 3), torch.arange(NUM_ROUNDS) % 2)
    subject = SimpleNamespace(config=config, num_draft_tokens=3)
    evidence = SimpleNamespace(subject=subject, forced=EveryDraftIsRight(), as_configured=configured)
    found = check_readings(cast("Evidence", evidence), aspects_of(choose(config), cast("Any", None)))
    assert [finding.check for finding in found] == [*ALL_ASPECTS, "my aspect", "my fixed aspect"]
    verdicts = {finding.check: finding.verdict for finding in found if finding.verdict != Verdict.DOES_NOT_APPLY}
    assert verdicts == {"concat order": Verdict.FAULT, "my aspect": Verdict.FAULT}
    assert found[-1].measured == "there is no other way to read all keys"


@pytest.mark.parametrize("drafter", ["mine", "weightless"])
def test_what_is_skipped_names_the_aspects_of_the_row_too(
    config: RunConfig, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too few rounds, or no weights."""
    config.drafter.name = drafter
    for name in ("check_tokenizer", "check_vocabulary", "check_dtype"):
        monkeypatch.setattr(examine, name, lambda subject: does_not_apply("", ""))
    monkeypatch.setattr(examine, "check_bounds", lambda subject: [])
    monkeypatch.setattr(examine, "check_states", lambda subject: does_not_apply("", ""))
    monkeypatch.setattr(examine, "run_loop", lambda subject: SimpleNamespace(records=[]))
    monkeypatch.setattr(examine, "check_output", lambda subject, records: does_not_apply("output", ""))
    monkeypatch.setattr(examine, "gather", lambda subject, loop: None)
    chosen = choose(config)
    subject = SimpleNamespace(config=config, chosen=chosen, of_spine=chosen, reference_build=None)
    checks = [finding.check for finding in examine.examine(cast("Subject", subject))]
    wanted = [*ALL_ASPECTS, "my aspect", "my fixed aspect", "loop against teacher forcing", "teacher forcing"]
    assert checks[-len(wanted) :] == wanted
