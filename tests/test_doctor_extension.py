"""What an extension's drafter brings for the doctor is reported beside the built-in aspects. No model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from spec_lab.app.compose import compose
from spec_lab.doctor import examine
from spec_lab.doctor.evidence import Evidence
from spec_lab.doctor.findings import Verdict, does_not_apply
from spec_lab.doctor.readings import ALL_ASPECTS, aspects_of, check_readings
from spec_lab.doctor.subject import Subject, load_subject
from spec_lab.doctor.teacher_forced import Drafted
from spec_lab.menu import registry
from spec_lab.menu.chosen import choose
from spec_lab.menu.config import DrafterConfig, RunConfig
from spec_lab.menu.option import DrafterOption
from spec_lab.menu.readings import Aspect, Reading
from spec_lab.wiring.drafting import DrafterFactory
from tests.tiny_runs import make_runnable_pair

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
    config = compose(["drafter=eagle3"]).config
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


def test_a_clear_gain_is_a_fault_beside_a_larger_unclear_one() -> None:
    """An aspect without readings that fit K does not apply."""
    accepted = {"unclear": [3, 0] * 20, "clear": [2] * 12 + [1] * 28}

    def draft(name: str) -> Drafted:
        return Drafted(torch.zeros(NUM_ROUNDS, 3), torch.tensor(accepted[name]))

    subject = SimpleNamespace(config=SimpleNamespace(drafter=SimpleNamespace(name="mine")), num_draft_tokens=1)
    configured = Drafted(torch.zeros(NUM_ROUNDS, 3), torch.ones(NUM_ROUNDS))
    evidence = SimpleNamespace(subject=subject, forced=SimpleNamespace(draft=draft), as_configured=configured)
    readings = [Reading(name, lambda name=name: name) for name in accepted]  # type: ignore[misc]
    later = Reading("later", lambda: None, min_draft_tokens=2)
    aspects = [Aspect("two readings", "as it is", readings), Aspect("later drafts", "as it is", [later])]
    two, later_drafts = check_readings(cast("Evidence", evidence), aspects)[-2:]
    assert two.verdict == Verdict.FAULT
    assert two.cause == "read as as it is, but clear gives +0.30 drafts a round"
    assert later_drafts.verdict == Verdict.DOES_NOT_APPLY
    assert later_drafts.measured == "it only changes drafts after the first; drafter.num_draft_tokens=1 makes none"


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


OUTSIDE = """
from dataclasses import dataclass
from pathlib import Path
import torch
from spec_lab.menu.option import DrafterOption
from spec_lab.menu.config import DrafterConfig
from spec_lab.core.protocols import DrafterRequirements
from spec_lab.core.types import FeatureSpec, NormSide
from spec_lab.drafters.picking import GivenDrafts

FOLDER = Path(__file__).parent / "weights"

@dataclass
class HeadsConfig(DrafterConfig):
    name: str = "heads"

@dataclass(slots=True)
class Seen:
    tokens: torch.Tensor
    rows: torch.Tensor
    attention: None = None

class Heads(GivenDrafts):
    requirements = DrafterRequirements(features=FeatureSpec(final_hidden=NormSide.POST_NORM, last_prompt_row=True))

    def __init__(self, num_draft_tokens, target):
        self.num_draft_tokens, self.target = num_draft_tokens, target

    def admit(self, slot, request):
        pass

    def ingest(self, pack):
        return None if pack.ends is None else self.first(pack.ends.live.of(pack.features))

    def catch_up(self, verified):
        last = (verified.verification.num_emitted - 1).clamp(min=0)
        width = verified.verification.tokens.shape[1]
        return self.first(verified.features.unflatten(0, (-1, width))[torch.arange(len(last)), last])

    def first(self, rows):
        return Seen(self.target.logits(rows).argmax(-1), rows)

    def step(self, state, step):
        state.tokens = self.target.logits(state.rows.roll(step.index, -1)).argmax(-1)

def load(config, options, models):
    return lambda resources: Heads(options.num_draft_tokens, models.target)

def register(registry):
    registry.add(DrafterOption(name="heads", schema=HeadsConfig, load=load, folder=lambda config, options: FOLDER))
"""
"""Drafts with heads on one hidden state, as Medusa does: it recycles nothing, and its state has no `hidden`."""
WEIGHTS: dict[str, Callable[[Path], object]] = {
    "safetensors": lambda folder: save_file(
        {"d2t": torch.zeros(3, 3), "a": torch.ones(2)}, folder / "model.safetensors"
    ),
    "another form": lambda folder: (folder / "weights.json").write_text("{}"),
    "a file of its own name": lambda folder: save_file({"head": torch.ones(2, 2)}, folder / "mine.safetensors"),
}


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_drafter_that_recycles_nothing_has_no_fault_there(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No traceback, and what its row does not say exists is not looked for."""
    target, _ = make_runnable_pair(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"outside_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OUTSIDE)
    (tmp_path / "weights").mkdir()
    WEIGHTS[weights](tmp_path / "weights")
    (tmp_path / "heads.jsonl").write_text("\n".join(f'{{"prompt": "{text}", "form": "continue"}}' for text in "abcd"))
    prompts = ["workload=jsonl", f"workload.path={tmp_path / 'heads.jsonl'}", "max_new_tokens=24", "num_threads=1"]
    chosen = [f"extensions=[{name}]", "target=hf", f"target.path={target}", "drafter=eagle3", *prompts]
    config = compose([*chosen, f"drafter.path={target}"]).config
    config.drafter = DrafterConfig(name="heads", num_draft_tokens=3)
    findings = {finding.check: finding for finding in examine.examine(load_subject(choose(config)))}
    for check in ("recycled path", "vocabulary map (d2t)", *ALL_ASPECTS):
        assert findings[check].verdict is Verdict.DOES_NOT_APPLY, findings[check]
    assert findings["hidden path"].verdict is Verdict.OK
    assert findings["output against plain decoding"].verdict is Verdict.OK
    assert (findings["dtype of the weights"].verdict is Verdict.DOES_NOT_APPLY) == (weights != "safetensors")
