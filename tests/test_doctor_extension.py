"""What an extension's drafter brings for the doctor is reported beside the built-in aspects. No model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from safetensors.torch import save_file

from spec_lab.app.compose import compose
from spec_lab.doctor import examine
from spec_lab.doctor.aspects import Aspect, Reading
from spec_lab.doctor.evidence import Evidence
from spec_lab.doctor.findings import Verdict
from spec_lab.doctor.readings import ALL_ASPECTS, check_readings
from spec_lab.doctor.subject import load_subject
from spec_lab.doctor.teacher_forced import Drafted
from tests.lab import part
from tests.tiny_runs import make_runnable_pair

NUM_ROUNDS = 40


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


OUTSIDE = """
from dataclasses import dataclass
from pathlib import Path
import torch

from spec_lab.config.option import option
from spec_lab.config.groups import DrafterConfig
from spec_lab.core.protocols import DrafterRequirements
from spec_lab.core.types import FeatureSpec, NormSide
from spec_lab.drafters.picking import GivenDrafts

FOLDER = Path(__file__).parent / "weights"

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

@option("drafter", NAME)
class HeadsOption(DrafterConfig):
    def folder(self, run):
        return FOLDER

    def build(self, lab):
        return Heads(self.num_draft_tokens, lab.target)
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
    (tmp_path / f"{name}.py").write_text(f"NAME = {name!r}\n{OUTSIDE}")
    (tmp_path / "weights").mkdir()
    WEIGHTS[weights](tmp_path / "weights")
    (tmp_path / "heads.jsonl").write_text("\n".join(f'{{"prompt": "{text}", "form": "continue"}}' for text in "abcd"))
    prompts = ["workload=jsonl", f"workload.path={tmp_path / 'heads.jsonl'}", "max_new_tokens=24", "num_threads=1"]
    chosen = [f"extensions=[{name}]", "target=hf", f"target.path={target}", "drafter=eagle3", *prompts]
    config = compose([*chosen, f"drafter.path={target}"]).config
    config.drafter = part("drafter", name, num_draft_tokens=3)
    findings = {finding.check: finding for finding in examine.examine(load_subject(config))}
    for check in ("recycled path", "vocabulary map (d2t)", *ALL_ASPECTS):
        assert findings[check].verdict is Verdict.DOES_NOT_APPLY, findings[check]
    assert findings["hidden path"].verdict is Verdict.OK
    assert findings["output against plain decoding"].verdict is Verdict.OK
    assert (findings["dtype of the weights"].verdict is Verdict.DOES_NOT_APPLY) == (weights != "safetensors")
