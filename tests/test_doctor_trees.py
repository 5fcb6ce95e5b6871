"""The doctor reads a tree by its spine: healthy ones have no fault, and faults of heads, caches and trees are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spec_kernels.tree_reference import move_path_reference
from spec_lab.app.compose import compose
from spec_lab.doctor.examine import examine
from spec_lab.doctor.findings import Finding, Verdict, faults
from spec_lab.doctor.subject import Subject, load_subject
from spec_lab.engine import drafts
from spec_lab.engine.drafts import spine
from tests.test_doctor_faults import QUICK, change_tensors, copy_of, examined, skipped, with_broken_writes

TREE = ("drafter=eagle3", "tree=dynamic", "tree.num_rows=8")


@pytest.fixture(scope="module")
def healthy() -> Subject:
    """The shipped pair, as the doctor loads it for a tree; other trees of its sizes may stand in its place."""
    return load_subject(compose([*QUICK, *TREE]).config)


@pytest.fixture(autouse=True)
def few_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the bounds, which are of chains, nor other readings, but for the order of the halves."""
    monkeypatch.setattr("spec_lab.doctor.examine.check_bounds", lambda subject: [])
    from spec_lab.doctor.aspects import aspects_of

    def kept(*arguments: Any) -> list[Any]:
        return [aspect for aspect in aspects_of(*arguments) if aspect.name == "concat order"]

    monkeypatch.setattr("spec_lab.doctor.examine.aspects_of", kept)


def faults_of(subject: Subject) -> list[Finding]:
    return faults(examine(subject))


@pytest.mark.parametrize(
    "overrides",
    [TREE, ("drafter=frozen_kv", "tree=static", "tree.paths=[[0],[1],[0,0],[1,0],[1,0,0]]", "graph=full_loop")],
)
def test_a_healthy_tree_has_no_fault(healthy: Subject, overrides: tuple[str, ...]) -> None:
    findings = examine(examined(healthy, *overrides))
    assert faults(findings) == []
    verdicts = {finding.check: finding.verdict for finding in findings}
    assert verdicts["loop against teacher forcing"] is verdicts["concat order"] is Verdict.OK


def test_a_head_is_misread_under_a_tree(healthy: Subject, tmp_path: Path) -> None:
    head = copy_of("frozen_kv", tmp_path)

    def swap(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = "pre_projection.weight"
        return {name: torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1)}

    change_tensors(head, swap)
    subject = examined(healthy, "drafter=frozen_kv", f"drafter.path={head}", "tree=dynamic", "tree.num_rows=8")
    assert faults_of(subject)[0].check == "concat order"


def test_a_catch_up_behind_a_tree_writes_nothing(healthy: Subject) -> None:
    fault = faults_of(with_broken_writes(examined(healthy, *TREE), skipped))[0]
    assert fault.check == "loop against teacher forcing"
    assert fault.cause is not None and "draft 1 differs in the loop" in fault.cause


def test_branches_that_see_the_keys_of_others(healthy: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft 1 is as it should be, since no branch stands behind it."""
    from spec_lab.drafters import branching

    exactly = branching.see_ancestors

    def blindly(backend: Any, state: Any, *arguments: Any) -> Any:
        attention = exactly(backend, state, *arguments)
        attention.tree.path_slots[:, :, :-1] = attention.tree.path_slots[:, :, -1:].roll(1, 1)
        return attention

    monkeypatch.setattr(branching, "see_ancestors", blindly)
    fault = faults_of(examined(healthy, *TREE))[0]
    assert fault.check == "loop against teacher forcing"
    assert fault.cause is not None and "draft 1 is correct" in fault.cause


def test_keys_of_the_path_are_left_where_they_were(healthy: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "move_path_reference", lambda caches, *rest: move_path_reference([], *rest))
    assert faults_of(examined(healthy, *TREE))[0].check == "output against plain decoding"


def test_the_spine_is_the_first_child_of_each() -> None:
    tokens = [9, 5, 6, 7, 8, 4]
    assert spine([0, 0, 0, 1, 3, 1], tokens, 3) == [5, 7, 8]
    assert spine([0, 0, 0, 2, 3, 3], tokens, 3) == [5, -1, -1]
    assert spine([0, 1, 2, 3, 4, 5], tokens, 2) == [-1, -1]
