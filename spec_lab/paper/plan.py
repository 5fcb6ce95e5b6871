"""Makes the list of a paper's runs, with the purpose and the command line of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from spec_lab.core.errors import UserError
from spec_lab.paper.file import AXES, SPEED_AXES, Line, PaperFile, key_of

Part = Literal["acceptance", "ablation", "speed"]
MOST_RUNS = 1000
MAY_BE_LEVELLED = ("references",)
"""Keys in which runs differ but that do not distinguish lines, so that the user may set them for all runs."""
DRAFT_TOKENS = "drafter.num_draft_tokens"
GREEDY = ("references=[plain]",)
SAMPLED = ("references=[]", "sampling=sampled")
"""Defaults of sampled runs. A sampled text cannot be compared with plain decoding's, so there are no references."""


@dataclass(frozen=True, slots=True)
class PlannedCell:
    """One run of a paper, and the place of its numbers in the tables.

    Attributes:
        batch_size: None if the part does not set it.
        draft_tokens: K; None if the part does not set it.
    """

    part: Part
    line: str
    task: str
    temperature: float
    batch_size: int | None
    draft_tokens: int | None
    overrides: tuple[str, ...]


def cells_of(paper: PaperFile, typed: Iterable[str] = ()) -> list[PlannedCell]:
    """Return the runs of a paper in order; the overrides `typed` after the file apply to every run.

    Raises:
        UserError: there are too many runs, or a typed override sets a key that distinguishes the tables' lines.
    """
    typed = tuple(typed)
    _refuse_levelling(paper, typed)
    cells = _cells(paper, typed)
    if len(cells) > MOST_RUNS:
        raise UserError(f"{paper.path}: it has {len(cells)} runs, and the most is {MOST_RUNS}; leave some out")
    return cells


def _cells(paper: PaperFile, typed: tuple[str, ...]) -> list[PlannedCell]:
    return [*_acceptance(paper, typed), *_ablations(paper, typed), *_speed(paper, typed)]


def _refuse_levelling(paper: PaperFile, typed: Iterable[str]) -> None:
    """Refuse overrides of a key that the paper has another key for, or in which its runs differ, such as drafter.

    With such an override, a table's row could have a name or a number that its run does not have.
    """
    axes = AXES | (SPEED_AXES if paper.speed is not None else {})
    cells = [{key_of(text): text for text in cell.overrides} | {"": cell.part} for cell in _cells(paper, ())]
    for text in typed:
        key = key_of(text)
        if key in axes:
            raise UserError(f"{text}: {key} belongs to {axes[key]} of {paper.path}; change it in the file")
        for parts in (("acceptance", "ablation"), ("speed",)):
            chosen = sorted({str(cell.get(key)) for cell in cells if cell[""] in parts})
            if len(chosen) > 1 and key not in MAY_BE_LEVELLED:
                raise UserError(f"{text}: runs of {paper.path} differ in {key}; change it in the file")


def merged(*parts: Iterable[str]) -> tuple[str, ...]:
    """Return overrides in which a later one replaces an earlier one of the same key, at the earlier one's place.

    The order of a group's option and the keys below it does not matter, since Hydra always applies the option first.
    """
    by_key: dict[str, str] = {}
    for text in (text for part in parts for text in part):
        by_key[key_of(text)] = text
    return tuple(by_key.values())


def _acceptance(paper: PaperFile, typed: tuple[str, ...]) -> Iterator[PlannedCell]:
    for temperature in paper.temperatures:
        for task, prompts in paper.tasks.items():
            for line in paper.lines:
                if temperature in (line.temperatures or paper.temperatures):
                    overrides = _overrides(paper, line, temperature, prompts, typed)
                    yield PlannedCell("acceptance", line.name, task, temperature, None, None, overrides)


def _ablations(paper: PaperFile, typed: tuple[str, ...]) -> Iterator[PlannedCell]:
    """Yield the ablations: the base's line with changes, over the same tasks, at the paper's first temperature unless
    they say otherwise."""
    base = paper.line(paper.base)
    for ablation in paper.ablations:
        line = Line(
            ablation.name,
            merged(base.always, ablation.always),
            _of_base(base.greedy, ablation) if ablation.greedy is None else ablation.greedy,
            _of_base(base.sampled, ablation) if ablation.sampled is None else ablation.sampled,
        )
        for temperature in ablation.temperatures or paper.temperatures[:1]:
            for task, prompts in paper.tasks.items():
                overrides = _overrides(paper, line, temperature, prompts, typed)
                yield PlannedCell("ablation", line.name, task, temperature, None, None, overrides)


def _of_base(overrides: tuple[str, ...] | None, ablation: Line) -> tuple[str, ...] | None:
    """Return the base's `greedy` or `sampled` overrides, replaced by the ablation's `always` where both set a key."""
    return overrides and merged(overrides, ablation.always)


def _speed(paper: PaperFile, typed: tuple[str, ...]) -> Iterator[PlannedCell]:
    """Yield the runs of the speed tables. They are greedy, so that acceptance does not depend on draws."""
    speed = paper.speed
    if speed is None:
        return
    for batch_size in speed.batch_sizes:
        for name in speed.lines:
            for draft_tokens in speed.draft_tokens:
                sizes = (f"batch_size={batch_size}", f"{DRAFT_TOKENS}={draft_tokens}")
                overrides = _overrides(paper, paper.line(name), 0.0, (*speed.always, *sizes), typed)
                yield PlannedCell("speed", name, "speed", 0.0, batch_size, draft_tokens, overrides)


def _overrides(
    paper: PaperFile, line: Line, temperature: float, prompts: tuple[str, ...], typed: tuple[str, ...]
) -> tuple[str, ...]:
    if temperature == 0:
        return merged(GREEDY, paper.always, paper.greedy, line.always, line.greedy or (), prompts, typed)
    heat = (f"sampling.temperature={temperature:g}",)
    shared = paper.sampled if line.sampled is None else ()
    return merged(SAMPLED, heat, paper.always, shared, line.always, line.sampled or (), prompts, typed)
