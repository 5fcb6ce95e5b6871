"""A target split over several ranks is the whole one: weights, products, and the text that comes out of the engine."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spec_lab.build.engine import build_engine
from spec_lab.build.limits import engine_limits
from spec_lab.build.models import load_models
from spec_lab.checkpoints.checkpoint import open_tensors
from spec_lab.checkpoints.checkpoint_files import kept_part
from spec_lab.checkpoints.config import ModelConfig
from spec_lab.checkpoints.families import read_model_config
from spec_lab.checkpoints.random_weights import random_tensors
from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes
from spec_lab.config.run import Run
from spec_lab.core.results import GenerationResult
from spec_lab.core.types import Request
from spec_lab.engine.engine import Engine
from spec_lab.measure.world import World
from spec_lab.models.layer_builder import build_mlp
from spec_lab.models.partition import WHOLE, Partition
from spec_lab.models.tensor_parallel import TensorParallel
from tests.lab import generate, make_config, make_pair, random_requests
from tests.ranks import on_ranks
from tests.tiny_assistant import make_tiny_assistant
from tests.tiny_checkpoints import make_tiny_target
from tests.tiny_gemma4 import assistants_build, make_tiny_gemma4, make_tiny_gemma4_assistant

BIASED = {"attention_bias": True, "mlp_bias": True}
CPU = torch.device("cpu")


def load(folder: Path, partition: Partition) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    config = read_model_config(folder)
    return config, dict(open_tensors(folder, decoder_tensor_shapes(config), torch.float32, CPU, slices=partition))


def split_engine(config: Run, requests: list[Request], partition: Partition) -> Engine:
    chosen = config
    limits = engine_limits(chosen, requests)
    models = load_models(chosen, limits.max_seq_len, partition=partition)
    return build_engine(chosen, models, limits)


def texts(result: GenerationResult) -> dict[str, list[int]]:
    return {record.request_id: record.output_ids for record in result.requests}


def test_a_rank_reads_its_part_of_the_file(tmp_path: Path) -> None:
    """Parts put together are the whole, and what is not split is in every rank."""
    make_tiny_target(tmp_path, "llama", max_shard_size="40KB", **BIASED)
    _, whole = load(tmp_path, WHOLE)
    parts = on_ranks(2, lambda partition: load(tmp_path, partition)[1])
    for name, tensor in whole.items():
        of_name = [tensors[name] for tensors in parts]
        if any(key in name for key in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            assert torch.equal(torch.cat(of_name), tensor), name
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            assert torch.equal(torch.cat(of_name, dim=1), tensor), name
        else:
            assert all(torch.equal(part, tensor) for part in of_name), name


def test_random_weights_do_not_depend_on_the_number_of_ranks() -> None:
    shapes = {"a.q_proj.weight": (8, 6), "a.o_proj.weight": (6, 8), "a.o_proj.bias": (6,), "norm.weight": (6,)}
    whole = random_tensors(shapes, torch.float32, CPU, seed=3)
    for partition, tensors in on_ranks(2, lambda part: (part, random_tensors(shapes, torch.float32, CPU, 3, part))):
        for name, tensor in whole.items():
            assert torch.equal(kept_part(partition, name, tensor), tensors[name]), name
            assert tensors[name].untyped_storage().nbytes() == tensors[name].nbytes, "it holds the rest in memory too"


def test_a_split_pair_of_products_is_the_whole_one(tmp_path: Path) -> None:
    make_tiny_target(tmp_path, "llama", **BIASED)
    rows = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    config, tensors = load(tmp_path, WHOLE)
    expected = build_mlp(config.layers[1], tensors, "model.layers.1.mlp.")(rows)

    def split(partition: Partition) -> torch.Tensor:
        _, of_rank = load(tmp_path, partition)
        return build_mlp(partition.share(config.layers[1]), of_rank, "model.layers.1.mlp.", partition)(rows)

    ranks = on_ranks(2, split)
    torch.testing.assert_close(ranks[0], expected)
    assert torch.equal(ranks[0], ranks[1])


@pytest.mark.parametrize("vocab_size", [8, 9])
def test_logits_are_gathered_in_order(vocab_size: int) -> None:
    """Whether the tokens divide or not."""
    weight = torch.randn(vocab_size, 4, generator=torch.Generator().manual_seed(0))
    rows = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    for logits in on_ranks(2, lambda partition: partition.head(weight)(rows)):
        assert logits.is_contiguous()
        torch.testing.assert_close(logits, rows @ weight.T)


@pytest.mark.parametrize(("family", "changes"), [("llama", BIASED), ("qwen3", {"tie_word_embeddings": True})])
def test_two_ranks_write_the_text_of_one(tmp_path: Path, family: Any, changes: dict[str, Any]) -> None:
    pair = make_pair(tmp_path, family, **changes)
    config = make_config(pair, prune="catchup", batch_size=2)
    requests = random_requests(3, max_new_tokens=8)
    engines = on_ranks(2, lambda partition: split_engine(config, requests, partition))
    assert [engine.parts.cache.kv.shape[3] for engine in engines] == [1, 1], "each rank holds its KV heads"
    ranks = on_ranks(2, lambda partition: texts(split_engine(config, requests, partition).generate(requests)))
    assert ranks[0] == ranks[1] == generate(config, requests)


def test_a_drafter_that_reads_the_targets_kv_is_split_as_well(tmp_path: Path) -> None:
    """Its drafts, and so its rounds, are those of one rank."""
    target = tmp_path / "target"
    make_tiny_target(target, "qwen3")
    make_tiny_assistant(tmp_path / "head", read_model_config(target))
    config = make_config((target, tmp_path / "head"), "frozen_kv")
    requests = random_requests(2, max_new_tokens=8)

    def drafts(partition: Partition) -> list[Any]:
        engine = split_engine(config, requests, partition)
        drafted: list[Any] = []
        recur = engine.round.recur

        def noted(state: Any) -> torch.Tensor:
            tokens = recur(state)
            drafted.append(tokens.tolist())
            return tokens

        engine.round.recur = noted  # type: ignore[method-assign]
        return [texts(engine.generate(requests)), drafted]

    whole = drafts(WHOLE)
    assert on_ranks(2, drafts) == [whole, whole]


def test_a_gemma_and_its_assistant_are_split(tmp_path: Path) -> None:
    """Layers whose values are their keys, and an assistant that reads both kinds of heads."""
    two_heads = {"num_global_key_value_heads": 2}
    with assistants_build():
        make_tiny_gemma4(tmp_path / "target", "31b", **two_heads)
        make_tiny_gemma4_assistant(tmp_path / "head", "31b", text=two_heads)
    config = make_config((tmp_path / "target", tmp_path / "head"), "frozen_kv", prune="prefill")
    requests = random_requests(2, max_new_tokens=8, vocab_size=96)
    ranks = on_ranks(2, lambda partition: texts(split_engine(config, requests, partition).generate(requests)))
    assert ranks[0] == ranks[1] == generate(config, requests)


@pytest.mark.parametrize("differs", [False, True])
def test_ranks_that_emit_other_tokens_are_found(differs: bool) -> None:
    def compare(partition: TensorParallel) -> None:
        tokens = [5, 6 + differs * partition.rank]
        record = SimpleNamespace(request_id="r", output_ids=tokens, emitted_per_round=[2])
        result: Any = SimpleNamespace(requests=[record])
        World(partition, 2).require_agreement(result, CPU)

    with pytest.raises(RuntimeError, match="emitted different tokens") if differs else nullcontext():
        on_ranks(2, compare)
