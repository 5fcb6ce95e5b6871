"""Files of block drafters: what is written is read back, and what does not fit is refused in a line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.build.limits import rows_behind
from spec_lab.checkpoints.block_checkpoint import load_block
from spec_lab.checkpoints.block_config import HeadKind, MarkovForm, Slots
from spec_lab.checkpoints.block_layouts import DEEPSPEC, SPECULATORS, ZLAB, read_block_config
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.random_weights import BlockParts, random_block
from spec_lab.checkpoints.taps import Tap
from spec_lab.config.choices import Weights
from spec_lab.config.option import get
from spec_lab.export.block_json import TABLES, block_json
from spec_lab.export.folders import save_folder
from tests.lab import make_config, make_engine, random_requests
from tests.tiny_blocks import TinyBlock, write_block
from tests.tiny_checkpoints import make_tiny_target, refused, rewrite_config

BLOCKS = {
    "dflash": TinyBlock(),
    "dspark": TinyBlock("speculators", "markov", True, "gated", confidence=True, draft_vocab_size=90),
    "domino": TinyBlock(head="gru", shift_label=True),
    "dflash2": TinyBlock(head="selector", conv=True, window=5),
    "lilicorr": TinyBlock(head="lattice"),
    "deepspec": TinyBlock(layout="deepspec", head="markov", anchor_first=True, confidence=True),
    "pure": TinyBlock(layout="deepspec", anchor_first=True, confidence=True),
    "windows": TinyBlock(anchor_first=True, window=5),
    "speculators": TinyBlock(layout="speculators", window=4, non_causal=False),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    make_tiny_target(path, "qwen3")
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> ModelConfig:
    return read_model_config(folder)


NO_PLACE = {
    ("domino", SPECULATORS): "head",
    ("lilicorr", SPECULATORS): "head",
    ("dflash", DEEPSPEC): "slots",
    ("dspark", DEEPSPEC): "draft_vocab_size",
    ("domino", DEEPSPEC): "head",
    ("dflash2", DEEPSPEC): "head",
    ("lilicorr", DEEPSPEC): "head",
    ("speculators", DEEPSPEC): "slots",
    ("windows", DEEPSPEC): "window",
}
"""Blocks with a part that a layout cannot hold."""


@pytest.mark.parametrize("layout", [ZLAB, SPECULATORS, DEEPSPEC], ids=lambda layout: layout.name)
@pytest.mark.parametrize("name", BLOCKS)
def test_what_is_written_is_read_back(target: ModelConfig, tmp_path: Path, name: str, layout: Any) -> None:
    write_block(tmp_path / "theirs", BLOCKS[name], target)
    config, tensors = load_block(tmp_path / "theirs", target, torch.float32, "cpu")
    if (name, layout) in NO_PLACE:
        with refused(f"the layout {layout.name} cannot hold this drafter's {NO_PLACE[name, layout]}"):
            block_json(config, target.num_layers, layout)
        return
    tables = torch.ones(target.vocab_size, target.hidden_size)
    copies = dict.fromkeys(TABLES, tables) if layout is DEEPSPEC else {}
    stored = {name: tensor.clone() for name, tensor in (copies | tensors).items()}
    save_folder(stored, block_json(config, target.num_layers, layout), tmp_path / "ours")
    again, same = load_block(tmp_path / "ours", target, torch.float32, "cpu")
    assert again == config
    assert tensors.keys() == same.keys() and all(torch.equal(same[key], tensors[key]) for key in tensors)


@pytest.mark.parametrize("head", HeadKind)
@pytest.mark.parametrize("slots", Slots)
def test_a_new_drafter_has_the_drafts_that_its_file_will_have(
    target: ModelConfig, tmp_path: Path, head: HeadKind, slots: Slots
) -> None:
    """What random weights draft is no more than what is read of a file with these parts."""
    parts = BlockParts(head=head, slots=slots, head_rank=4, block_size=6)
    config, tensors = random_block(target, parts, torch.float32, torch.device("cpu"), seed=0)
    save_folder(tensors, block_json(config, target.num_layers, ZLAB), tmp_path)
    read, _ = load_block(tmp_path, target, torch.float32, "cpu")
    assert read.slots == config.slots


def test_layouts_count_the_layers_of_the_target_in_their_own_way(target: ModelConfig, tmp_path: Path) -> None:
    """The number 1 is the output of layer 1 in z-lab's files, and of layer 0 in those of speculators."""
    for layout, first in (("zlab", 1), ("speculators", 0)):
        write_block(tmp_path / layout, TinyBlock(layout=layout, outputs=(first, 4)), target)
        config, _ = read_block_config(tmp_path / layout, target)
        assert config.taps == (Tap(first), Tap(4))


@pytest.mark.parametrize(
    ("num_drafts", "slots"), [(5, Slots.mask_first), (6, Slots.anchor_first), (None, Slots.anchor_first)]
)
def test_an_old_file_of_speculators_tells_its_reading_by_its_number_of_drafts(
    target: ModelConfig, tmp_path: Path, num_drafts: int | None, slots: Slots
) -> None:
    """Its key for the reading is of version 0.7. A wrong reading costs acceptance and raises no error."""
    write_block(tmp_path, TinyBlock("speculators", "markov", block_size=6), target)
    proposal = {"proposal_methods": [{"speculative_tokens": num_drafts}]} if num_drafts else {}
    rewrite_config(tmp_path, drop=("sample_from_anchor",), speculators_config=proposal)
    assert read_block_config(tmp_path, target)[0].slots.name == slots


def test_the_mask_token_has_several_names(target: ModelConfig, tmp_path: Path) -> None:
    write_block(tmp_path, TinyBlock(layout="speculators"), target)
    rewrite_config(tmp_path, drop=("mask_token_id",), ptd_token_id=7, pard_token=9)
    assert read_block_config(tmp_path, target)[0].mask_token_id == 9


@pytest.mark.parametrize(
    ("changes", "asked", "named"),
    [
        ({"anchor_first": True}, {}, "use drafter.slots=anchor_first"),
        ({"head": "gru"}, {"head": HeadKind.markov}, "use drafter.head=gru"),
        ({"head": "gru", "anchor_first": True}, {}, "use drafter.slots=anchor_first"),
        (
            {"head": "gru", "anchor_first": True},
            {"head": HeadKind.markov},
            "use drafter.slots=anchor_first drafter.head=gru",
        ),
        ({"head": "markov", "confidence": True}, {"confidence": True}, "drafter.confidence=false"),
        ({"conv": True}, {}, "use drafter.conv=true"),
        ({}, {"confidence": True}, "use drafter.confidence=false"),
        (
            {"head": "markov"},
            {"head": HeadKind.markov, "markov_form": MarkovForm.rnn},
            "use drafter.markov_form=vanilla",
        ),
    ],
)
def test_another_reading_than_the_files_is_refused(
    folder: Path, target: ModelConfig, tmp_path: Path, changes: dict[str, Any], asked: dict[str, Any], named: str
) -> None:
    """A wrong reading would cost acceptance, and raise no error."""
    write_block(tmp_path, replace(TinyBlock(), **changes), target)
    config = make_config((folder, tmp_path), "dflash", 3)
    with refused(tmp_path, named):
        make_engine(replace(config, drafter=replace(config.drafter, **asked)), random_requests(1))


def test_more_drafts_than_a_block_has_are_refused_before_weights_are_read(
    folder: Path, target: ModelConfig, tmp_path: Path
) -> None:
    write_block(tmp_path, TinyBlock(block_size=3), target)
    (tmp_path / "model.safetensors").unlink()
    run = make_config((folder, tmp_path), "dflash", 3)
    for drafter in (run.drafter, get("drafter", "dflash")(weights=Weights.random, block_size=3)):
        with refused("more than the 2 drafts of a block of 3 rows"):
            rows_behind(replace(run, drafter=drafter))
