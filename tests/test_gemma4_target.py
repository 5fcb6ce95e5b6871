"""Gemma 4 targets against transformers in float32: each kind, prompts in one piece or in chunks, one row or N rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_lab.checkpoints.families import read_model_config
from spec_lab.core.kept import Drop, Kept
from spec_lab.core.types import FeatureSpec, NormSide
from tests.covering import each_value
from tests.target_lane import Lane, assert_last_row_alone, made_once, make_lane, random_tokens
from tests.tiny_gemma4 import KINDS, VOCAB, WINDOW, make_tiny_gemma4, use_hub_spelling

pytest.importorskip("transformers.models.gemma4")

LENGTH = 5 * WINDOW
# One error of arithmetic; the smallest mistake in the forward shows as more than fifty of them.
TOLERANCE = 3e-5
PARTS = {"whole": [40], "chunks_of_7": [7] * 5 + [5], "one_row": [9] + [1] * 31, "rows_of_4": [4] * 10}


def tokens_of(*shape: int) -> torch.Tensor:
    return random_tokens(*shape, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder and the transformers model of each kind, made once."""

    return made_once(tmp_path_factory, make_tiny_gemma4)


@pytest.mark.parametrize(
    ("kind", "name"),
    each_value(KINDS, PARTS, times=2),
)
@torch.inference_mode()
def test_logits_and_features_equal_transformers(checkpoints: Any, kind: str, name: str) -> None:
    """Sequences of five windows, over page borders, whole, chunked, one row and N rows at a time."""
    folder, model = checkpoints(kind)
    token_ids = tokens_of(1, LENGTH)
    output = model(token_ids, output_hidden_states=True)
    layers = tuple(range(0, model.config.num_hidden_layers, 2))
    features = FeatureSpec(layer_inputs=layers, final_hidden=NormSide.POST_NORM)
    expected = torch.cat([output.hidden_states[layer][0] for layer in (*layers, -1)], dim=-1)
    logits, read = make_lane(folder, LENGTH).run_parts(token_ids, PARTS[name], features)
    assert (logits - output.logits[0]).abs().max() < TOLERANCE
    torch.testing.assert_close(read, expected, rtol=0, atol=10 * TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_the_hubs_files_read_the_same(checkpoints: Any, tmp_path: Path, kind: str) -> None:
    """Nested names and sizes, dead tensors of layers that share KV, and tensors of other senses."""
    saved, _ = checkpoints(kind)
    model = make_tiny_gemma4(tmp_path, kind)
    use_hub_spelling(tmp_path, model)
    ours, hubs = read_model_config(saved), read_model_config(tmp_path)
    assert replace(hubs, eos_token_ids=ours.eos_token_ids) == ours
    token_ids = tokens_of(1, 12)
    one, other = (make_lane(folder, LENGTH).run(token_ids, [0], FeatureSpec()).hidden for folder in (saved, tmp_path))
    assert torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_ragged_verify_rows_equal_transformers(checkpoints: Any, kind: str) -> None:
    """N rows of three requests in one forward: at the start, at the edge of the window, and past it."""
    folder, model = checkpoints(kind)
    token_ids, lens = tokens_of(3, LENGTH), [1, WINDOW - 1, 20]
    expected = model(token_ids).logits
    logits = make_lane(folder, LENGTH, num_requests=3).verify_ragged(token_ids, lens)
    for request, length in enumerate(lens):
        theirs = expected[request, length : length + 4]
        torch.testing.assert_close(logits[request], theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("start", [WINDOW - 3, WINDOW - 1, WINDOW, 2 * WINDOW + 1])
@torch.inference_mode()
def test_rejected_rows_across_the_edge_of_the_window_leave_nothing(checkpoints: Any, start: int) -> None:
    """Four rows with wrong drafts, then four right ones from the position after the first."""
    folder, model = checkpoints("e2b")
    token_ids = tokens_of(1, LENGTH)
    lane = make_lane(folder, LENGTH)
    lane.run(token_ids[:, :start], [0], FeatureSpec())
    wrong = torch.cat((token_ids[:, start : start + 1], VOCAB - 1 - token_ids[:, start + 1 : start + 4]), dim=1)
    lane.run(wrong, [start], FeatureSpec())
    logits = lane.target.logits(lane.run(token_ids[:, start + 1 : start + 5], [start + 1], FeatureSpec()).hidden)
    expected = model(token_ids).logits[0, start + 1 : start + 5]
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["e2b", "31b"])
def test_rows_that_nobody_reads_do_not_enter_the_layers_behind_the_last_write(checkpoints: Any, kind: str) -> None:
    lanes, count = [make_lane(checkpoints(kind)[0], LENGTH) for _ in range(3)], 13
    entered = count_rows(lanes[1])
    assert_last_row_alone(lanes, tokens_of(1, count), FeatureSpec(layer_inputs=(1, 3)))
    assert entered == ([count] * 4 + [1] * 4 if kind == "e2b" else [count] * 6)


@torch.inference_mode()
def test_a_drafter_that_reads_a_layer_behind_the_last_write_keeps_all_rows(checkpoints: Any) -> None:
    lane = make_lane(checkpoints("e2b")[0], LENGTH)
    entered = count_rows(lane)
    live = Kept(Drop.BEFORE_ATTENTION, torch.tensor([12]), lane.metadata(1, [12]))
    output = lane.run(tokens_of(1, 13), [0], FeatureSpec(layer_inputs=(2, 6)), live)
    assert entered == [13] * 8 and output.features is not None and len(output.features) == 13
    assert len(output.hidden) == 1


def count_rows(lane: Lane) -> list[int]:
    """A list that grows by the number of rows that enter each layer."""
    entered: list[int] = []
    target: Any = lane.target

    def counted(layer: Any) -> Callable[..., torch.Tensor]:
        def call(stream: torch.Tensor, *rest: Any) -> torch.Tensor:
            entered.append(len(stream))
            out: torch.Tensor = layer(stream, *rest)
            return out

        return call

    target.layers = [counted(layer) for layer in target.layers]
    return entered


@torch.inference_mode()
def test_bfloat16_rounds_where_transformers_rounds(checkpoints: Any) -> None:
    """The scale of embeddings is a bfloat16, norms round once, and logits are capped in float32."""
    folder, model = checkpoints("e2b")
    token_ids = tokens_of(1, LENGTH)
    exact = model(token_ids).logits[0]
    theirs = make_tiny_gemma4_bfloat16(folder)(token_ids).logits[0].float()
    ours, _ = make_lane(folder, LENGTH, dtype=torch.bfloat16).run_parts(token_ids, [LENGTH], FeatureSpec())
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().mean() < 1.3 * (theirs - exact).abs().mean()


def make_tiny_gemma4_bfloat16(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, trust_remote_code=False).eval()
