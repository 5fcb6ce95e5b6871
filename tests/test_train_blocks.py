"""Training block drafters: what is trained is what drafts, and its gradients say what the loss says."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spec_lab.checkpoints.block_checkpoint import load_block
from spec_lab.checkpoints.families import read_model_config
from spec_lab.core.types import Request
from spec_lab.train.anchored import (
    Anchored,
    AnchoredLoss,
    AnchoredRows,
    Normaliser,
    SlotWeights,
    counted_slots,
    drawn_anchors,
    still_reached,
)
from spec_lab.train.data import Text, Texts
from spec_lab.train.group import ALONE
from spec_lab.train.heads import Dflash, Dflash2, Domino, Dspark, Lilicorr, PEagle
from spec_lab.train.heads.block import BlockModule
from spec_lab.train.packed import PackedRows
from spec_lab.train.target import FrozenTarget
from tests.engine_state import poison
from tests.lab import make_config, make_engine
from tests.scripted_rule import install
from tests.test_block_drafter import BLOCKS
from tests.tiny_blocks import TINY_PRESETS, TinyBlock, write_block
from tests.tiny_checkpoints import make_tiny_target

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FrozenTarget]:
    folder = tmp_path_factory.mktemp("target")
    make_tiny_target(folder, "qwen3")
    return folder, FrozenTarget.load(folder, CPU, torch.float32, 64)


def one_text(tokens: list[int], before: int = 0) -> PackedRows:
    """A row of one text, behind as many tokens of another."""
    row = torch.tensor([[5] * before + tokens])
    segments = torch.tensor([[1] * before + [2] * len(tokens)])
    places = torch.tensor([[*range(before), *range(len(tokens))]])
    return PackedRows(row, segments, places, torch.ones_like(row, dtype=torch.bool))


@dataclass
class TrainedChain:
    """Drafts by the training forward, with a stranger's text in front of the row."""

    drafter: BlockModule
    target: FrozenTarget

    @torch.no_grad()
    def draft(self, text: list[int], num_draft_tokens: int) -> tuple[list[int], list[torch.Tensor]]:
        rows, anchor = one_text(text, before=7), torch.tensor([[6 + len(text)]])
        tapped = self.target.run(rows, self.drafter.config.taps).tapped
        anchored = AnchoredRows(rows.tokens, rows.segments, rows.positions, anchor)
        hidden, context = self.drafter.slots(anchored, tapped)
        joining, tokens, found = self.drafter.joining(), torch.zeros(1, hidden.shape[1] + 1, dtype=torch.long), []
        tokens[0, 0] = text[-1]
        for number, (law, _) in enumerate(joining.walked(joining.rows(hidden, context), tokens)):
            tokens[:, number + 1] = law.greedy(hidden)
            found.append(law.target_logits(hidden)[0])
        return tokens[0, 1 : num_draft_tokens + 1].tolist(), found[:num_draft_tokens]


@pytest.mark.parametrize("name", BLOCKS)
def test_training_and_serving_draft_the_same(target: tuple[Path, FrozenTarget], tmp_path: Path, name: str) -> None:
    """The law of every slot is compared, behind prompts and behind rounds of several n, with the runtime's caches."""
    folder, frozen = target
    block = BLOCKS[name]
    write_block(tmp_path, block, read_model_config(folder))
    config, tensors = load_block(tmp_path, frozen.config, torch.float32, CPU)
    requests = [Request(str(seed), "x", tuple(range(seed, seed + 9)), 8, ignore_eos=True) for seed in (3, 40)]
    options = {"page_size": 4, "prefill_chunk": 5}
    run = make_config((folder, tmp_path), "dflash", 3, "none", batch_size=2, cache=options, options=block.options)
    engine = make_engine(run, requests)
    rule = install(engine, TrainedChain(BlockModule(config, tensors, frozen), frozen))
    poison(engine)
    engine.generate(requests)
    assert rule.compared > 9


class OnTheDevice(TorchDispatchMode):
    """Refuses what a step that a GPU records cannot do: to read a number of the device, or to bring one there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        assert name not in {f"aten::{each}" for each in ("_local_scalar_dense", "nonzero", "lift_fresh")}, name
        indices = args[1] if name in ("aten::index", "aten::index_put_") else ()
        assert not any(index is not None and index.dtype == torch.bool for index in indices)
        return func(*args, **(kwargs or {}))


PRESETS = Dflash, Dspark, Domino, Dflash2, Lilicorr
SMALL: dict[str, Any] = {"block_size": 4, "head_rank": 8, "head_topk": 4, "draft_vocab_size": 60}


def counted(tokens: torch.Tensor) -> Texts:
    """Texts of these tokens, all written by the target."""
    return Texts([Text(tokens.flatten().numpy().astype(np.int32), 0, "x", b"")])


@pytest.mark.parametrize(
    "head", [*(kind(**SMALL) for kind in PRESETS), PEagle(num_drafts=4, draft_vocab_size=60)], ids=lambda it: it.name
)
def test_a_preset_learns_a_text(target: tuple[Path, FrozenTarget], tmp_path: Path, head: Anchored) -> None:
    """All of its weights move, the loss falls, and what is saved drafts as what was trained."""
    _, frozen = target
    texts = torch.randint(1, 50, (2, 24), generator=torch.Generator().manual_seed(0))
    module: Any = head.build(frozen, counted(texts), 0)
    rows = PackedRows(
        texts, torch.ones_like(texts), torch.arange(24).expand(2, -1), torch.ones_like(texts, dtype=torch.bool)
    )
    anchors = drawn_anchors(rows, 8, torch.Generator().manual_seed(0))
    loss, losses = AnchoredLoss(module, frozen, head, ALONE), []
    optimiser = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0)
    before = {name: tensor.clone() for name, tensor in module.tensors().items()}
    for step in range(6):
        optimiser.zero_grad()
        with OnTheDevice() if step else nullcontext():  # the first step makes what others find
            losses.append(loss(*head.inputs(module, frozen, rows, anchors)))
            losses[-1].backward()
        optimiser.step()
    assert losses[-1] < losses[0]
    still = {name for name, tensor in module.tensors().items() if torch.equal(tensor, before[name])}
    assert still <= {"d2t", "t2d"}
    head.save(module, frozen, tmp_path)
    again, row, pending = head.load(tmp_path, frozen), one_text(texts[0, :12].tolist()), torch.tensor([9])
    ours, its = (head.laws(each, frozen, row, pending, 3) for each in (module, again))
    torch.testing.assert_close(ours, its, rtol=0.05, atol=0.1)  # weights are stored in bfloat16


def test_a_head_on_a_trained_body_begins_as_that_body(target: tuple[Path, FrozenTarget], tmp_path: Path) -> None:
    _, frozen = target
    write_block(tmp_path, TinyBlock(), frozen.config)
    begun = Domino(body=str(tmp_path), head_rank=8).build(frozen, counted(torch.arange(40)), 0)
    config, tensors = load_block(tmp_path, frozen.config, torch.float32, CPU)
    body = BlockModule(config, tensors, frozen)
    text = list(range(10, 22))
    for ours, its in zip(*(TrainedChain(each, frozen).draft(text, 3)[1] for each in (begun, body)), strict=True):
        torch.testing.assert_close(ours, its)


@pytest.mark.parametrize("preset", sorted(TINY_PRESETS))
def test_a_head_on_the_body_of_any_preset_is_read_back(
    target: tuple[Path, FrozenTarget], tmp_path: Path, preset: str
) -> None:
    """What the other drafter's head, convolutions and confidence had stays behind."""
    _, frozen = target
    write_block(tmp_path / "body", TINY_PRESETS[preset], frozen.config)
    sizes = {"body": str(tmp_path / "body"), "head_rank": 8, "block_size": TINY_PRESETS[preset].block_size}
    for kind in PRESETS:
        head, folder = kind(**sizes), tmp_path / kind.name
        head.save(head.build(frozen, counted(torch.arange(40)), 0), frozen, folder)
        load_block(folder, frozen.config, torch.float32, CPU)


def test_slots_count_while_the_target_wrote_every_token_from_the_anchor_on() -> None:
    segments = torch.tensor([[1, 1, 1, 1, 1, 1, 2, 2, 2, 0]])
    supervised = torch.tensor([[0, 0, 1, 1, 0, 1, 0, 1, 1, 0]]).bool()  # a second turn begins at column 5
    places = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 0]])
    rows = PackedRows(torch.zeros_like(segments), segments, places, supervised)
    assert drawn_anchors(rows, 2, torch.Generator().manual_seed(0)).tolist() == [[2, 7]]
    counts = counted_slots(rows, torch.tensor([[1, 2, 3, 5, 7, 8]]), 3)[0]
    assert counts.sum(1).tolist() == [0, 1, 0, 0, 1, 0] and counts[1].tolist() == [True, False, False]


def test_a_slot_behind_a_token_that_cannot_be_drafted_counts_for_nothing(target: tuple[Path, FrozenTarget]) -> None:
    _, frozen = target
    rows = one_text(list(range(3, 30)))
    losses = []
    for last in (3, 40):  # of the block [5, 60, last]: 60 cannot be drafted
        rows.tokens[0, 9:13] = torch.tensor([5, 60, last, last])
        head = Dflash(block_size=4, draft_vocab_size=50)
        module = head.build(frozen, counted(torch.arange(50)), 0)
        batch = head.inputs(module, frozen, rows, torch.tensor([[9]]))
        losses.append(AnchoredLoss(module, frozen, head, ALONE)(*batch))
    assert torch.equal(*losses)


@pytest.mark.parametrize("by", Normaliser)
def test_a_loss_in_chunks_is_that_of_the_whole(
    target: tuple[Path, FrozenTarget], monkeypatch: pytest.MonkeyPatch, by: Normaliser
) -> None:
    _, frozen = target
    head = Dspark(block_size=4, head_rank=8, normalise_by=by, slot_weights=SlotWeights.dpace)
    rows = one_text(list(range(3, 30)))
    drafter = head.build(frozen, counted(rows.tokens), 0)
    batch = head.inputs(drafter, frozen, rows, drawn_anchors(rows, 9, torch.Generator().manual_seed(0)))

    def gradients() -> list[torch.Tensor]:
        drafter.zero_grad()
        AnchoredLoss(drafter, frozen, head, ALONE)(*batch).backward()
        return [weight.grad.clone() for weight in drafter.parameters() if weight.grad is not None]

    whole = gradients()
    monkeypatch.setattr("spec_lab.train.losses.MOST_LOGITS", 4 * drafter.num_slots * frozen.config.vocab_size)
    torch.testing.assert_close(gradients(), whole, rtol=1e-4, atol=1e-6)


def test_dpace_counts_the_slots_that_are_still_reached() -> None:
    label, counts = torch.tensor([[1.0, 0.0, 1.0]]), torch.tensor([[True, True, False]])
    assert still_reached(label, counts).tolist() == [[1.5, 0.5, 0.0]]
