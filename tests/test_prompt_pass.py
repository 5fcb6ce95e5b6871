"""prune.prefill (llama.cpp #149): the same first token, features, KV and drafts, fewer rows and logits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.core.prompts import PromptPack
from spec_lab.core.results import RowCounts
from spec_lab.core.types import (
    Request,
    Sequence,
    TargetOutput,
)
from spec_lab.engine.engine import Engine
from tests.lab import make_config, make_engine, make_pair

PROMPT = tuple(3 + (11 * i) % 150 for i in range(23))


@pytest.fixture(scope="module", params=["qwen3", "qwen2_sliding"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    if request.param == "qwen3":
        return make_pair(folder)
    return make_pair(folder, "qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=2)


@dataclass
class Pass:
    """What one prompt pass left behind."""

    engine: Engine
    sampled: int
    drafts: list[int]
    packs: list[PromptPack]
    rows: RowCounts
    target_rows: torch.Tensor
    drafter_rows: torch.Tensor
    logit_rows: list[int]
    hidden_rows: list[int]


def run_prompt(pair: tuple[Path, Path], prune: str, chunk: int, prompt: tuple[int, ...] = PROMPT) -> Pass:
    request = Request("r", "x", prompt, 8)
    config = make_config(pair, "eagle3", prune=prune, cache={"prefill_chunk": chunk, "page_size": 4})
    engine = make_engine(config, [request])
    parts = engine.parts
    drafter: Any = parts.drafter
    target: Any = parts.target
    packs: list[PromptPack] = []
    logit_rows: list[int] = []
    hidden_rows: list[int] = []
    ingest, logits, forward = drafter.ingest, target.logits, target.forward

    def noted_ingest(pack: PromptPack) -> Any:
        packs.append(pack)
        return ingest(pack)

    def noted_logits(hidden: torch.Tensor) -> torch.Tensor:
        logit_rows.append(len(hidden))
        rows: torch.Tensor = logits(hidden)
        return rows

    def noted_forward(*arguments: Any) -> TargetOutput:
        output: TargetOutput = forward(*arguments)
        hidden_rows.append(len(output.hidden))
        return output

    drafter.ingest, target.logits, target.forward = noted_ingest, noted_logits, noted_forward
    sequence = Sequence(request, 0, [5, 2, 7, 3, 9, 4, 8, 6][: -(-(len(prompt) + 8 + 6) // 4)], 0.0, list(prompt))
    assert len(sequence.pages) * 4 >= len(prompt) + 6
    engine.parts.slots.table.assign(0, sequence.pages)
    rows = RowCounts()
    with torch.inference_mode():
        while sequence.is_prefilling:
            rows.add(engine.prompt_pass.run([sequence])[0])
    assert sequence.kv_len == len(prompt) and sequence.num_output_tokens == 1
    assert int(parts.slots.kv_lens[0]) == len(prompt)
    assert int(parts.slots.input_ids[0, 0]) == sequence.tokens[-1]
    slots = torch.tensor([page * 4 + offset for page in sequence.pages for offset in range(4)])[: len(prompt)]
    return Pass(
        engine,
        sequence.tokens[-1],
        parts.slots.input_ids[0, 1:].tolist(),
        packs,
        rows,
        parts.cache.kv[:, slots],
        drafter.cache.kv[slots],
        logit_rows,
        hidden_rows,
    )


@pytest.mark.parametrize(
    ("chunk", "prompt"), [(1, PROMPT), (5, PROMPT), (512, PROMPT), (5, PROMPT[:1]), (5, PROMPT[:5])]
)
def test_last_row_equals_all_rows(pair: tuple[Path, Path], chunk: int, prompt: tuple[int, ...]) -> None:
    """The first token and the drafts are the same; features, KV of target and KV of drafter are so to the bit."""
    full, pruned = (run_prompt(pair, prune, chunk, prompt) for prune in ("none", "prefill"))
    assert pruned.sampled == full.sampled
    assert pruned.drafts == full.drafts and len(pruned.drafts) == 3
    for ours, theirs in zip(pruned.packs, full.packs, strict=True):
        assert ours.features is not None and theirs.features is not None
        assert torch.equal(ours.features, theirs.features)
    assert full.target_rows.abs().sum() > 0 and full.drafter_rows.abs().amax(dim=(1, 2, 3)).min() > 0
    assert torch.equal(pruned.target_rows, full.target_rows)
    assert torch.equal(pruned.drafter_rows, full.drafter_rows)


@pytest.mark.parametrize("chunk", [1, 5, 512])
def test_rows_and_logits_are_counted_as_they_were_computed(pair: tuple[Path, Path], chunk: int) -> None:
    full, pruned = (run_prompt(pair, prune, chunk) for prune in ("none", "prefill"))
    num_chunks = -(-23 // chunk)
    assert full.rows.prefill_logits == sum(full.logit_rows) == sum(full.hidden_rows) == 23
    assert pruned.rows.prefill_logits == 1 and pruned.logit_rows == [1], "none before the last chunk"
    assert pruned.hidden_rows == [0] * (num_chunks - 1) + [1], "the last layer keeps the row somebody reads"
    assert full.rows.prefill_hidden == pruned.rows.prefill_hidden == 23, "the drafter needs every row's feature"
    assert (full.rows.prefill_computed, pruned.rows.prefill_computed) == (23, 1)


def test_the_ingest_pairs_the_next_token_with_the_feature_of_each_position(pair: tuple[Path, Path]) -> None:
    """Rows 0..T-1, after t[T] is sampled: a chunk's last row takes the next prompt token."""
    passed = run_prompt(pair, "prefill", 5)
    assert [pack.spans[0].start for pack in passed.packs] == [0, 5, 10, 15, 20]
    paired = torch.cat([pack.next_token_ids for pack in passed.packs]).tolist()
    assert paired == [*PROMPT[1:], passed.sampled]
    positions = torch.cat([pack.attention.positions for pack in passed.packs]).tolist()
    assert positions == list(range(23))
    assert [pack.ends is None for pack in passed.packs] == [True] * 4 + [False]
