"""Block drafters against their papers written down slowly, without any cache (`slow_block.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from spec_lab.checkpoints.families import read_model_config
from spec_lab.config.choices import DraftSampling, KernelsChoice
from spec_lab.config.groups import GraphConfig
from spec_lab.config.run import RecordConfig, SamplingConfig
from spec_lab.core.types import AcceptanceInputs, Sequence
from spec_lab.drafters.picking import GreedyPicker
from spec_lab.options.acceptance.imposed import Synthetic
from spec_lab.options.acceptance.lossless import Rejection
from spec_lab.options.graphs import EagerGraph, FullLoop, RoundGraph, SplitSeed
from tests import drawn_plan  # noqa: F401  registers a plan
from tests.lab import Reference, make_config, make_engine, random_requests
from tests.scripted_rule import ScriptedAcceptance, ScriptedRule, compare_drafts
from tests.slow_block import SlowBlock
from tests.tiny_blocks import TinyBlock, write_block
from tests.tiny_checkpoints import rewrite_tensors
from tests.tiny_gemma4 import make_tiny_gemma4

BLOCKS: dict[str, TinyBlock] = {
    "dflash": TinyBlock(),
    "anchor_first": TinyBlock(anchor_first=True),
    "markov": TinyBlock(head="markov", anchor_first=True),
    "gated": TinyBlock(head="markov", form="gated"),
    "rnn": TinyBlock(head="markov", form="rnn", anchor_first=True),
    "gru": TinyBlock(head="gru"),
    "gru_shifted": TinyBlock(head="gru", shift_label=True),
    "selector": TinyBlock(head="selector", conv=True),
    "lattice": TinyBlock(head="lattice"),
    "lattice_conv": TinyBlock(head="lattice", conv=True, num_layers=1, outputs=(4,)),
    "window": TinyBlock(window=3),
    "causal_window": TinyBlock(window=3, non_causal=False, sliding=(1,)),
    "is_causal": TinyBlock(is_causal=True),
    "is_causal_window": TinyBlock(window=3, is_causal=True, sliding=(1,)),
    "moving_window": TinyBlock(window=3, is_causal=False),
    "moving_window_conv": TinyBlock(head="selector", conv=True, window=7, is_causal=False, sliding=(0, 1)),
    "embedding_scale": TinyBlock(head="gru", embedding_scale=2.5),
    "output_multiplier": TinyBlock(head="markov", anchor_first=True, output_multiplier=0.3),
    "softcap": TinyBlock(head="markov", softcap=0.5),
    "embedding_tap": TinyBlock(outputs=(-1, 3, 6)),
    "deepspec": TinyBlock(layout="deepspec", head="markov", anchor_first=True),
    "speculators": TinyBlock(layout="speculators"),
    "speculators_dspark": TinyBlock(layout="speculators", head="markov", anchor_first=True, draft_vocab_size=100),
    "rows_of_the_targets_head": TinyBlock(layout="speculators", head="markov", draft_vocab_size=90, shares_head=True),
    "speculators_dflash2": TinyBlock(layout="speculators", head="selector", conv=True, window=5),
}


KINDS = "none", "dflash"


def run_against_slow_block(
    target: tuple[Path, Reference],
    folder: Path,
    block: TinyBlock,
    num_drafts: int = 3,
    kernels: KernelsChoice = KernelsChoice.torch,
) -> ScriptedRule:
    """Prompts of one token and of several chunks, page borders, padded rows, slots that are used again."""
    tensors = write_block(folder, block, read_model_config(target[0]))
    return run_against(SlowBlock(tensors, block, target[1]), target, folder, num_drafts, kernels)


def run_against(
    slow: SlowBlock,
    target: tuple[Path, Reference],
    folder: Path,
    num_drafts: int = 3,
    kernels: KernelsChoice = KernelsChoice.torch,
    window: int | None = None,
) -> ScriptedRule:
    """Do so with the drafter in a folder, and what it should draft."""
    options, sizes = slow.block.options | {"window": window}, {"max_new_tokens": 9, "bucket": 4}
    pair = target[0], folder
    rule = compare_drafts(slow, pair, "dflash", num_drafts, options=options, kernels=kernels, **sizes)
    for record in rule.rounds:
        parts = [record.stage_seconds[part] for part in ("context", "block", "head")]
        assert min(parts) > 0 and sum(parts) <= record.stage_seconds["catchup"], "timed apart"
    return rule


@pytest.mark.parametrize("name", BLOCKS)
def test_drafts_equal_the_block_recomputed(target: tuple[Path, Reference], tmp_path: Path, name: str) -> None:
    """Every slot's law is compared, after prompts and after rounds of every n."""
    rule = run_against_slow_block(target, tmp_path, BLOCKS[name])
    assert set(rule.accepted) == {0, 1, 2, 3} and rule.compared > 30


@pytest.mark.parametrize("block", [TinyBlock(), TinyBlock(head="gru", embedding_scale=1.5)], ids=["target's", "file's"])
def test_a_block_starts_from_embeddings_as_scaled_as_gemmas(tmp_path: Path, block: TinyBlock) -> None:
    """As in the target, unless the file says how raw rows are scaled."""
    pytest.importorskip("transformers.models.gemma4")
    make_tiny_gemma4(tmp_path / "target", "31b", vocab_size=160)
    of_target = tmp_path / "target", Reference(tmp_path / "target")
    tensors = write_block(tmp_path / "block", replace(block, outputs=(1, 3)), read_model_config(of_target[0]))
    slow = SlowBlock(tensors, replace(block, outputs=(1, 3)), of_target[1])
    assert run_against(slow, of_target, tmp_path / "block").compared > 30


@pytest.mark.parametrize(
    ("block", "window"),
    [
        (TinyBlock(window=5, is_causal=False), 2),
        (TinyBlock(window=None, non_causal=False), 3),
        (TinyBlock(window=4, non_causal=False), 3),
    ],
    ids=["moves", "none", "causal"],
)
def test_a_window_of_the_run_cuts_all_layers_and_makes_none_causal(
    target: tuple[Path, Reference], tmp_path: Path, block: TinyBlock, window: int
) -> None:
    slow = SlowBlock(write_block(tmp_path, block, read_model_config(target[0])), block, target[1], most_context=window)
    assert run_against(slow, target, tmp_path, window=window).compared > 30


@pytest.mark.parametrize("name", ["gated", "lattice"])
def test_a_head_that_is_left_out_leaves_the_body(target: tuple[Path, Reference], tmp_path: Path, name: str) -> None:
    """As if the file had none; and the text is plain decoding's."""
    block = BLOCKS[name]
    tensors = write_block(tmp_path, block, read_model_config(target[0]))
    slow = SlowBlock(tensors, replace(block, head="none"), target[1])
    assert run_against(slow, target, tmp_path).compared > 30
    requests = random_requests(2, 12, seed=3)
    texts = [make_engine(make_config((target[0], tmp_path), kind), requests).generate(requests) for kind in KINDS]
    assert len({tuple(tuple(each.output_ids) for each in text.requests) for text in texts}) == 1


@pytest.mark.parametrize("num_drafts", [1, 6])
def test_fewer_drafts_are_verified_of_the_same_block(
    target: tuple[Path, Reference], tmp_path: Path, num_drafts: int
) -> None:
    rule = run_against_slow_block(target, tmp_path, BLOCKS["markov"], num_drafts, KernelsChoice.native)
    assert {0, num_drafts} <= set(rule.accepted)


def test_context_rows_are_counted_as_they_were_written(target: tuple[Path, Reference], tmp_path: Path) -> None:
    """Those of accepted drafts, and of all rounds that the drafter had missed."""
    write_block(tmp_path, TinyBlock(), read_model_config(target[0]))
    requests = [replace(request, ignore_eos=True) for request in random_requests(3, 20)]
    options = TinyBlock().options | {"plan": "drawn"}
    engine = make_engine(make_config((target[0], tmp_path), "dflash", 3, "catchup", options=options), requests)
    body, written = cast(Any, engine.parts.drafter).blocks.model.body, [0]
    write = body.write
    body.write = lambda features, *rest: (written.append(len(features)), write(features, *rest))[1]
    counted = sum(record.rows.catchup_attention for record in engine.generate(requests).rounds)
    assert counted == sum(written) - sum(len(request.prompt_ids) for request in requests)


def accepted_as_imposed(
    target: tuple[Path, Reference],
    folder: Path,
    block: TinyBlock,
    graph: GraphConfig,
    picker: GreedyPicker | None = None,
) -> list[Any]:
    """Texts and counts, where a rule accepts drafts whatever they are, so that each of them shows in the text."""
    write_block(folder, block, read_model_config(target[0]))
    requests = random_requests(4, 9, lengths=(1, 12), seed=2)
    changes = {"batch_size": 3, "cache": {"page_size": 4}, "options": block.options, "graph": graph}
    config = make_config((target[0], folder), "dflash", **changes)
    engine = make_engine(replace(config, acceptance=Synthetic(rates=[0.8, 0.5, 0.3])), requests)
    if picker is not None:
        cast(Any, engine.parts.drafter).picker = picker
    return [(record.output_ids, record.accepted_per_round) for record in engine.generate(requests).requests]


class SlotBySlot(GreedyPicker):
    """Picks the likeliest token of one slot after the other."""

    takes_likeliest = False


@pytest.mark.parametrize("draft_vocab_size", [None, 100])
def test_slots_that_do_not_wait_are_drafted_at_once(
    target: tuple[Path, Reference], tmp_path: Path, draft_vocab_size: int | None
) -> None:
    block = TinyBlock(layout="speculators", draft_vocab_size=draft_vocab_size)
    at_once = accepted_as_imposed(target, tmp_path, block, EagerGraph())
    assert at_once == accepted_as_imposed(target, tmp_path, block, EagerGraph(), SlotBySlot())


@pytest.mark.parametrize(
    ("name", "graph"),
    [
        ("gru", FullLoop()),
        ("window", SplitSeed()),
        ("lattice_conv", RoundGraph(prompts=True)),
        ("speculators_dspark", RoundGraph(rounds_per_replay=3)),
    ],
)
def test_captured_rounds_are_eager_ones(
    target: tuple[Path, Reference], tmp_path: Path, name: str, graph: GraphConfig
) -> None:
    eager = accepted_as_imposed(target, tmp_path, BLOCKS[name], EagerGraph())
    assert eager == accepted_as_imposed(target, tmp_path, BLOCKS[name], graph)


@dataclass
class LawCheck(ScriptedAcceptance):
    """Compares the law that each draft was recorded with, behind the drafts before it, and keeps how sure it is."""

    slow: SlowBlock = field(kw_only=True)
    sure: dict[str, list[list[float]]] = field(default_factory=dict)

    def check(self, sequence: Sequence, drafts: list[int], inputs: AcceptanceInputs, row: int) -> None:
        _, logits = self.slow.follow(sequence.tokens, drafts)
        assert inputs.draft_logits is not None
        for recorded, expected in zip(inputs.draft_logits[row], logits, strict=True):
            torch.testing.assert_close(recorded.softmax(-1), (expected / 0.8).softmax(-1), rtol=0, atol=1e-4)
        products = torch.tensor(self.slow.sure[: len(drafts)]).cumprod(0)
        self.sure.setdefault(sequence.request.request_id, []).append(products.tolist())


@pytest.mark.parametrize("name", ["dflash", "rnn", "gru", "selector", "lattice", "speculators_dspark"])
def test_drafts_are_recorded_with_the_law_behind_the_head(
    target: tuple[Path, Reference], tmp_path: Path, name: str
) -> None:
    """That of each draft is the head's behind the drafts that were really drawn; confidences precede them."""
    block = replace(BLOCKS[name], confidence=BLOCKS[name].head == "markov")
    tensors = write_block(tmp_path, block, read_model_config(target[0]))
    options = block.options | {"draft_sampling": DraftSampling.distribution}
    if block.confidence:
        tensors["confidence_head.proj.weight"] *= 8  # so that the token in front changes how sure it is
        rewrite_tensors(tmp_path, {"confidence_head.proj.weight": tensors["confidence_head.proj.weight"]})
        options |= {"confidence": True}
    requests = random_requests(2, 16, lengths=(1, 12), seed=2)
    config = make_config((target[0], tmp_path), "dflash", batch_size=2, options=options)
    config = replace(config, acceptance=Rejection(), sampling=SamplingConfig(temperature=0.8))
    engine = make_engine(replace(config, record=RecordConfig(confidences=block.confidence)), requests)
    rule = LawCheck(engine, lambda num_drafts: min(num_drafts, 1), slow=SlowBlock(tensors, block, target[1]))
    engine.parts.rule = rule
    result = engine.generate(requests)
    assert len(rule.accepted) > 4
    for record in result.requests if block.confidence else ():
        for confidences, expected in zip(record.confidence_per_round, rule.sure[record.request_id], strict=False):
            assert confidences == pytest.approx(expected, abs=1e-4)
