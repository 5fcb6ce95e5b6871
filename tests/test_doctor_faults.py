"""Heads broken on purpose: the doctor names each fault, and finds none on the healthy head."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_lab.acceptance.strict import StrictAcceptance
from spec_lab.app.compose import compose
from spec_lab.build.auto import with_auto_chosen
from spec_lab.build.lab import Lab
from spec_lab.build.models import Last
from spec_lab.checkpoints.packaged import ZOO
from spec_lab.core.kv_cache import LayerCache
from spec_lab.core.layer_protocols import AttentionBackend
from spec_lab.core.protocols import Drafter
from spec_lab.core.types import AcceptanceInputs, AttentionMetadata, FeatureSpec, TargetOutput, Verification
from spec_lab.doctor.aspects import Aspect, aspects_of
from spec_lab.doctor.examine import examine
from spec_lab.doctor.findings import Finding, Verdict, faults, summarize
from spec_lab.doctor.loop import check_bounds
from spec_lab.doctor.subject import Subject, load_subject, strict_greedy

QUICK = ("max_new_tokens=16", "device=cpu", "batch_size=9", "kernels=torch")
"""With kernels=native the write that some faults break is inside a layer."""
FEW_ROUNDS = 24
"""As many as are judged (`MIN_ROUNDS`)."""
KeepReadings = Callable[..., None]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def no_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds are the target's alone, and have a test of their own."""
    monkeypatch.setattr("spec_lab.doctor.examine.check_bounds", lambda subject: [])


@pytest.fixture
def keep_readings(monkeypatch: pytest.MonkeyPatch) -> KeepReadings:
    """The readings take most of an examination's time, and most of them are not what tells a fault."""

    def keep(*names: str) -> None:
        def kept(lab: Lab) -> list[Aspect]:
            return [aspect for aspect in aspects_of(lab) if aspect.name in names]

        monkeypatch.setattr("spec_lab.doctor.examine.aspects_of", kept)

    return keep


@pytest.fixture(scope="module")
def healthy() -> Subject:
    """The shipped pair, as the doctor loads it."""
    return load_subject(compose(QUICK).config)


def examined(healthy: Subject, *overrides: str) -> Subject:
    """Another drafter of the same target, whose texts are written already; a few rounds tell most faults."""
    config = strict_greedy(compose([*QUICK, *overrides]).config)
    return replace(healthy, config=with_auto_chosen(config), max_rounds=FEW_ROUNDS)


def copy_of(drafter: str, folder: Path) -> Path:
    """Copy the shipped head, to be broken."""
    shipped = ZOO / f"pocket-{drafter}"
    if not (shipped / "model.safetensors").is_file():
        pytest.skip(f"no weights of drafter={drafter} are shipped yet: {shipped} is not there")
    return Path(shutil.copytree(shipped, folder / drafter))


def change_tensors(head: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    tensors = load_file(head / "model.safetensors")
    changed = {name: tensor.contiguous() for name, tensor in change(tensors).items()}
    save_file(tensors | changed, head / "model.safetensors", metadata={"format": "pt"})


def first_fault(subject: Subject) -> Finding:
    findings = examine(subject)
    assert faults(findings), findings
    assert summarize(findings).startswith(f"most likely fault: {faults(findings)[0].check}: ")
    return faults(findings)[0]


@pytest.mark.parametrize("drafter", ["eagle3", "draft_model"])
def test_a_healthy_head_has_no_fault(
    healthy: Subject, keep_readings: KeepReadings, drafter: str, tmp_path: Path
) -> None:
    """test_doctor_readings.py has every reading of every head, on tiny ones; test_doctor_trees.py a frozen-KV one."""
    keep_readings("query position", "tap ids")
    findings = examine(examined(healthy, f"drafter={drafter}", f"drafter.path={copy_of(drafter, tmp_path)}"))
    assert faults(findings) == []
    assert re.fullmatch("no fault found; checks that do not apply: [0-9]+", summarize(findings))
    verdicts = {finding.check: finding.verdict for finding in findings}
    assert verdicts["loop against teacher forcing"] is Verdict.OK
    assert "query position" not in verdicts
    assert (verdicts.get("tap ids") is Verdict.OK) == (drafter == "eagle3")
    assert (verdicts["recycled path"] is Verdict.OK) == (drafter != "draft_model")


def unprojected(tensors: Tensors) -> Tensors:
    """Make what a step hands on zero."""
    return {"post_projection.weight": torch.zeros_like(tensors["post_projection.weight"])}


def test_later_drafts_alone_are_wrong(healthy: Subject, keep_readings: KeepReadings, tmp_path: Path) -> None:
    """The first drafts agree often enough. Of a third draft that is wrong alone: `test_doctor.py`."""
    keep_readings("recycled path")
    head = copy_of("frozen_kv", tmp_path)
    change_tensors(head, unprojected)
    fault = first_fault(examined(healthy, "drafter=frozen_kv", f"drafter.path={head}"))
    assert fault.check == "recycled path"
    assert fault.cause is not None and "draft 2 does not use the hidden state" in fault.cause


class ZeroFeatures:
    """A target that hands over zeros in place of hidden states."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(self, token_ids: torch.Tensor, *parts: Any) -> TargetOutput:
        output: TargetOutput = self._target.forward(token_ids, *parts)
        assert isinstance(parts[-1], FeatureSpec)
        if output.features is not None:
            output.features = torch.zeros_like(output.features)
        return output


def test_hidden_states_that_are_zero(healthy: Subject, keep_readings: KeepReadings, tmp_path: Path) -> None:
    keep_readings()
    subject = examined(healthy, f"drafter.path={copy_of('eagle3', tmp_path)}")
    target: Any = ZeroFeatures(subject.models.target)
    fault = first_fault(replace(subject, models=replace(subject.models, target=target)))
    assert fault.check == "hidden path"
    assert fault.cause is not None and "zero" in fault.cause


def test_the_bounds_of_a_healthy_engine(healthy: Subject) -> None:
    oracle, random = check_bounds(healthy)
    assert oracle.verdict is random.verdict is Verdict.OK
    assert oracle.measured.startswith("4.00 tokens a round of 4 over ")


def test_a_verify_that_gives_up_a_draft(healthy: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output stays right, only the upper bound shows it."""
    accept = StrictAcceptance.accept

    def cautious(rule: StrictAcceptance, inputs: AcceptanceInputs) -> Verification:
        verification = accept(rule, inputs)
        verification.num_emitted.clamp_(max=inputs.draft_tokens.shape[1])
        return verification

    monkeypatch.setattr(StrictAcceptance, "accept", cautious)
    oracle, random = check_bounds(healthy)
    assert oracle.verdict is Verdict.FAULT and oracle.measured.startswith("3.00 tokens a round of 4")
    assert random.verdict is Verdict.OK


class BrokenWrites:
    """A backend that writes rows of a round where `place` says; prompts are written right."""

    def __init__(self, backend: AttentionBackend, place: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        self._backend = backend
        self._place = place

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def write(self, cache: LayerCache, metadata: AttentionMetadata, keys: torch.Tensor, values: torch.Tensor) -> None:
        is_catchup = metadata.num_queries == 4
        place = self._place(metadata.slot_mapping) if is_catchup else metadata.slot_mapping
        if place is not None:
            self._backend.write(cache, replace(metadata, slot_mapping=place), keys, values)


def skipped(slot_mapping: torch.Tensor) -> None:
    """A place for broken writes: nothing is written, so the cache keeps what the draft steps left."""


def next_slots(slot_mapping: torch.Tensor) -> torch.Tensor:
    return slot_mapping + 1


def with_broken_writes(subject: Subject, place: Callable[[torch.Tensor], torch.Tensor | None]) -> Subject:
    """The loop's drafter writes wrongly; its weights and the target are as they were."""
    backend: Any = BrokenWrites(subject.models.backend, place)
    drafter = copy(subject.config.drafter)

    def build(lab: Lab) -> Drafter[Any]:
        is_loop = lab.backend is subject.models.backend
        broken = replace(lab, backend=backend, heads=Last()) if is_loop else lab
        return subject.config.drafter.build(broken)

    drafter.build = build  # type: ignore[method-assign]
    return replace(subject, config=replace(subject.config, drafter=drafter))


def test_a_stale_cache(healthy: Subject, keep_readings: KeepReadings) -> None:
    """Where nothing is written: `test_doctor_trees.py`."""
    keep_readings()
    subject = with_broken_writes(examined(healthy, "drafter=eagle3"), next_slots)
    fault = first_fault(subject)
    assert fault.check == "loop against teacher forcing"
    assert fault.cause is not None and fault.cause.startswith("cache or loop: draft 1 differs")


def test_metadata_that_does_not_move(healthy: Subject, keep_readings: KeepReadings, tmp_path: Path) -> None:
    """Only later drafts suffer, which tells this fault from a stale cache."""
    keep_readings()
    head = copy_of("eagle3", tmp_path)
    subject = examined(healthy, f"drafter.path={head}", "drafter.window=32", "graph=full_loop", "graph.metadata=stale")
    fault = first_fault(subject)
    assert fault.check == "loop against teacher forcing"
    assert fault.cause is not None and "draft 1 is correct" in fault.cause
