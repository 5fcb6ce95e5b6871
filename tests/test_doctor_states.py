"""The doctor names what is wrong with a hybrid's states, and finds nothing wrong with healthy ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from spec_lab.app.compose import compose
from spec_lab.core.recurrent_cache import ConvWindows, RecurrentRows
from spec_lab.doctor.findings import Verdict
from spec_lab.doctor.states import CHECK, check_states
from spec_lab.doctor.subject import Subject, load_subject
from spec_lab.engine.states import SlotStates
from spec_lab.models.delta_caches import ReplayedUpdates, StateCheckpoints
from tests.test_families_gpu import make_target

SHORT = (
    "workload=random_ids",
    "workload.prompt_tokens=9",
    "workload.num_requests=1",
    "max_new_tokens=16",
    "device=cpu",
)
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    folder = tmp_path_factory.mktemp("hybrid")
    make_target(folder, "qwen3_5")
    base = ["target=hf", f"target.path={folder}", "drafter=ngram", "drafter.num_draft_tokens=3", *SHORT]
    healthy = load_subject(compose([*base, "recurrent.rollback=checkpoints"]).config)
    replaying = replace(healthy.config, recurrent=compose([*base, "recurrent.rollback=replay"]).config.recurrent)
    return {"checkpoints": healthy, "replay": replace(healthy, config=replaying)}


@pytest.mark.parametrize("rollback", ["checkpoints", "replay"])
def test_healthy_states_are_no_fault(subjects: dict[str, Subject], rollback: str) -> None:
    finding = check_states(subjects[rollback])
    assert finding.check == CHECK and finding.verdict is Verdict.OK, finding
    assert "logits of " in finding.measured


def commits(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Patch], None]:
    """Plant another index, whatever the cache."""
    commit = SlotStates.commit

    def plant(patch: Patch) -> None:
        patch.setattr(SlotStates, "commit", lambda self, slots, rows: commit(self, slots, change(rows)))

    return plant


def moved(slots: RecurrentRows, change: Callable[[torch.Tensor], torch.Tensor]) -> RecurrentRows:
    """Move the row at which verify begins; prompts begin where they should."""
    return slots if slots.is_prompt else replace(slots, committed=change(slots.committed))


def states_at(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Patch], None]:
    """Plant another row at which the state is read."""
    verify: Any = StateCheckpoints.verify
    return lambda patch: patch.setattr(
        StateCheckpoints, "verify", lambda self, rows, slots: verify(self, rows, moved(slots, change))
    )


def inputs_at(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Patch], None]:
    """Plant another column at which the convolution's inputs are read."""
    read = ConvWindows.read
    return lambda patch: patch.setattr(
        ConvWindows, "read", lambda self, slots, history: read(self, moved(slots, change), history)
    )


def forgets_the_last_row(patch: Patch) -> None:
    """Plant a count of accepted rows that is clamped to what the convolution looks back (xLLM #2247)."""
    verify: Any = ReplayedUpdates.verify
    clamped = lambda slots: replace(slots, committed=slots.committed.clamp(max=2))  # noqa: E731
    patch.setattr(ReplayedUpdates, "verify", lambda self, rows, slots: verify(self, rows, clamped(slots)))


FAULTS: dict[str, tuple[str, Callable[[Patch], None], str]] = {
    "reads_n": ("checkpoints", commits(lambda rows: rows + 1), "rollback index: the index that commit sets"),
    "keeps_0": ("checkpoints", commits(torch.zeros_like), "rollback index: the index that commit sets"),
    "state_first": ("checkpoints", states_at(torch.zeros_like), "state after its first row, whatever was accepted"),
    "offset_skipped": ("replay", inputs_at(torch.zeros_like), "convolution offset: its inputs are read from the first"),
    "clamped": ("replay", forgets_the_last_row, "if all drafts of the round before were accepted"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(subjects: dict[str, Subject], monkeypatch: Patch, fault: str) -> None:
    rollback, plant, said = FAULTS[fault]
    plant(monkeypatch)
    finding = check_states(subjects[rollback])
    assert finding.verdict is Verdict.FAULT and finding.cause is not None and said in finding.cause, finding
