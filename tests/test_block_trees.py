"""Trees over a block: what hangs below a branch is what the head makes of its own path, and of no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.checkpoints.families import read_model_config
from spec_lab.config.choices import DraftSampling
from spec_lab.config.run import Run, SamplingConfig
from spec_lab.core.draft_paths import DraftPaths
from spec_lab.core.types import Request
from spec_lab.options.acceptance.imposed import Synthetic
from spec_lab.options.acceptance.lossless import Rejection
from spec_lab.options.trees import DynamicTreeConfig, StaticTreeConfig
from tests.lab import Reference, make_config, make_engine, with_depth_as_k
from tests.slow_block import SlowBlock
from tests.test_p_eagle import SlowPEagle
from tests.test_tree_growth import Path as DraftPath
from tests.test_tree_growth import paths_of, slow_eagle2
from tests.tiny_blocks import TinyBlock, make_tiny_p_eagle, write_block

BLOCKS: dict[str, TinyBlock] = {
    "none": TinyBlock(),
    "gated": TinyBlock(head="markov", form="gated", layout="speculators", draft_vocab_size=100),
    "rnn": TinyBlock(head="markov", form="rnn", anchor_first=True),
    "gru": TinyBlock(head="gru"),
    "selector": TinyBlock(head="selector", conv=True),
    "lattice": TinyBlock(head="lattice"),
}
PATHS = [[0], [1], [0, 0], [0, 1], [1, 0], [1, 0, 0], [1, 0, 1]]
Law = Callable[[list[int], DraftPath], torch.Tensor]


class Laws(dict[DraftPath, torch.Tensor]):
    """Logits [vocab] behind each path below a text."""

    def __init__(self, law: Law, text: list[int]) -> None:
        self._law, self._text = law, text

    def __missing__(self, path: DraftPath) -> torch.Tensor:
        self[path] = self._law(self._text, path)
        return self[path]


def drafter_of(name: str, target: tuple[Path, Reference], folder: Path) -> tuple[Run, Law]:
    """Write a drafter, and return a run with it and its laws written down slowly."""
    sizes = {"batch_size": 2, "cache": {"page_size": 4, "prefill_chunk": 5}}
    if name == "p_eagle":
        tensors = make_tiny_p_eagle(folder, read_model_config(target[0]), 2)
        head = SlowPEagle(tensors, {}, target[1], num_layers=2)
        return make_config((target[0], folder), name, **sizes), lambda text, path: head.draft(text, 3)[1][len(path)]
    slow = SlowBlock(write_block(folder, BLOCKS[name], read_model_config(target[0])), BLOCKS[name], target[1])
    config = make_config((target[0], folder), "dflash", options=BLOCKS[name].options, **sizes)
    return config, lambda text, path: slow.follow(text, [*path, None])[1][-1]


@dataclass(frozen=True)
class Round:
    """The text of a request, the paths of the tree behind it, and the logits that these were drawn from."""

    text: list[int]
    paths: list[DraftPath]
    kept: torch.Tensor | None


def rounds_of(config: Run) -> list[Round]:
    """Run two requests beside each other."""
    prompts = (17, 4, 90, 31, 8, 77, 120), (5, 66, 12, 140, 9, 23, 50)
    requests = [Request(str(prompt[0]), "x", prompt, 6, ignore_eos=True) for prompt in prompts]
    engine = make_engine(with_depth_as_k(config), requests)
    drafter: Any = engine.parts.drafter
    finish, found = drafter.finish, [[], []]

    def watched(state: Any) -> Any:
        tree, kept = finish(state), drafter.kept_logits(state.rows.slot_ids)
        for row, slot in enumerate(state.rows.slot_ids.tolist()):
            found[slot].append((paths_of(tree, row), None if kept is None else kept[row].clone()))
        return tree

    drafter.finish = watched
    rounds = []
    for record, drafts in zip(engine.generate(requests).requests, found, strict=True):
        end = 1
        for emitted, (paths, kept) in zip(record.emitted_per_round, drafts, strict=False):
            rounds.append(Round([*record.prompt_ids, *record.output_ids[:end]], paths, kept))
            end += emitted
    return rounds


@pytest.mark.parametrize("name", [*BLOCKS, "p_eagle"])
def test_a_dynamic_tree_is_eagle2s_over_the_laws_of_the_slots(
    target: tuple[Path, Reference], tmp_path: Path, name: str
) -> None:
    """Behind a prompt, and behind rounds that accepted a path."""
    config, law = drafter_of(name, target, tmp_path)
    imposed = Synthetic(rates=[0.7, 0.4, 0.2])
    rounds = rounds_of(replace(config, tree=DynamicTreeConfig(topk=2, depth=3, num_rows=8), acceptance=imposed))
    assert len({len(of_round.text) for of_round in rounds}) > 2, "paths of several lengths were moved"
    for of_round in rounds:
        assert set(of_round.paths) == slow_eagle2(Laws(law, of_round.text), 2, 3, 7)


@pytest.mark.parametrize("name", ["none", "rnn", "selector", "lattice"])
def test_drawn_siblings_are_recorded_with_the_law_behind_their_parent(
    target: tuple[Path, Reference], tmp_path: Path, name: str
) -> None:
    """What traversal reads (`test_traversal.py` has the proof) is what was drawn from, on every branch."""
    config, law = drafter_of(name, target, tmp_path)
    drawn = replace(config.drafter, draft_sampling=DraftSampling.distribution)
    config = replace(
        config, drafter=drawn, tree=StaticTreeConfig(paths=PATHS), sampling=SamplingConfig(temperature=2.0)
    )
    for of_round in rounds_of(replace(config, acceptance=Rejection(method="traversal"))):
        assert of_round.kept is not None
        for branch, logits in zip(DraftPaths(PATHS).branches, of_round.kept, strict=True):
            path = of_round.paths[branch - 1] if branch else ()
            expected = (law(of_round.text, path) / 2.0).softmax(-1)
            torch.testing.assert_close(logits.softmax(-1), expected, rtol=0, atol=1e-4)
