"""Helpers that build small engines on tiny random checkpoints, and the reference their output is compared with."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import spec_lab.options  # noqa: F401  registers the options
from spec_lab.build.engine import build_engine
from spec_lab.build.limits import engine_limits
from spec_lab.build.models import load_models
from spec_lab.checkpoints.families import read_model_config
from spec_lab.config.choices import KernelsChoice
from spec_lab.config.option import get
from spec_lab.config.run import CacheConfig, PruneConfig, Run, SamplingConfig
from spec_lab.core.kv_cache import SCRATCH_PAGE, LayerCache
from spec_lab.core.types import Request
from spec_lab.engine.engine import Engine
from spec_lab.options.drafters.weights import WeightsConfig
from spec_lab.options.graphs import EagerGraph
from tests.tiny_checkpoints import Family, make_tiny_eagle3, make_tiny_target

PRUNING = {
    "none": ("all_rows", "none"),
    "prefill": ("last_row", "none"),
    "post_attention": ("last_row", "post_attention"),
    "catchup": ("last_row", "pre_attention"),
}
NEAR_TIE = 1e-4


def make_pair(folder: Path, family: Family = "qwen3", **overrides: Any) -> tuple[Path, Path]:
    """Write a tiny target of four layers and a random EAGLE-3 head for it; return both folders."""
    target, head = folder / "target", folder / "head"
    make_tiny_target(target, family, **{"num_hidden_layers": 4} | overrides)
    make_tiny_eagle3(head, read_model_config(target))
    return target, head


def part(group: str, name: str, **knobs: Any) -> Any:
    """An option of a group, as its class."""
    return get(group, name)(**knobs)


def with_depth_as_k(config: Run) -> Run:
    """The run with the depth of its tree as K."""
    assert config.sizes is not None
    return replace(config, drafter=replace(config.drafter, num_draft_tokens=config.sizes.depth))


def make_config(
    pair: tuple[Path, Path], drafter: str = "eagle3", num_draft_tokens: int = 3, prune: str = "none", **changes: Any
) -> Run:
    """The configuration of a run on `pair`: the folder of the target, and that of the drafter where it has weights.

    Args:
        changes: top-level keys; `cache` and `options` are dicts of keys of the cache and of the drafter.
    """
    schema = get("drafter", drafter)
    options: dict[str, Any] = {"num_draft_tokens": 0 if drafter == "none" else num_draft_tokens}
    if issubclass(schema, WeightsConfig):
        options["path"] = str(pair[1])
    prefill, catchup = PRUNING[prune]
    return Run(
        target=part("target", "hf", path=str(pair[0])),
        drafter=schema(**options | changes.pop("options", {})),
        acceptance=part("acceptance", "strict"),
        prune=PruneConfig(prefill=prefill, catchup=catchup),
        graph=changes.pop("graph", EagerGraph()),
        attention=part("attention", "torch"),
        workload=part("workload", "pocket"),
        sampling=SamplingConfig(),
        logger=part("logger", "jsonl"),
        cache=CacheConfig(**{"prefill_chunk": 512, "prefill_tokens": 2048, **changes.pop("cache", {})}),
        **{"kernels": KernelsChoice.torch, "device": "cpu", **changes},
    )


def make_engine(config: Run, requests: list[Request]) -> Engine:
    """Build the engine of a configuration, with caches that hold `requests`."""
    limits = engine_limits(config, requests)
    return build_engine(config, load_models(config, limits.max_seq_len), limits)


def random_requests(
    count: int, max_new_tokens: int = 24, seed: int = 0, vocab_size: int = 160, lengths: tuple[int, int] = (1, 40)
) -> list[Request]:
    """Requests of mixed prompt lengths. Token 2, the tiny targets' end of sequence, is in no prompt."""
    generator = random.Random(seed)
    return [
        Request(
            request_id=f"r{index}",
            category="even" if index % 2 == 0 else "odd",
            prompt_ids=tuple(generator.randrange(3, vocab_size) for _ in range(generator.randint(*lengths))),
            max_new_tokens=max_new_tokens,
        )
        for index in range(count)
    ]


def generate(config: Run, requests: list[Request]) -> dict[str, list[int]]:
    """Decode with a fresh engine; return the output tokens by request id."""
    return {
        record.request_id: record.output_ids for record in make_engine(config, requests).generate(requests).requests
    }


def assert_captured_alike(config: Run, graph: str, requests: list[Request]) -> None:
    """Check that the graph mode `graph` gives the tokens of eager rounds, and the drafter's KV, in which every draft
    shows.
    """
    engines = [make_engine(config, requests)]
    engines.append(make_engine(replace(config, graph=part("graph", graph)), requests))
    eager, captured = (engine.generate(requests) for engine in engines)
    assert captured.graph.replays > 0
    assert [r.output_ids for r in captured.requests] == [r.output_ids for r in eager.requests]
    start = (SCRATCH_PAGE + 1) * config.cache.page_size
    drafters: list[Any] = [engine.parts.drafter for engine in engines]
    caches = [drafter.cache for drafter in drafters]
    expected, got = (cache.kv[start:] if isinstance(cache, LayerCache) else cache.kv[:, start:] for cache in caches)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


class Reference:
    """The transformers model of a tiny target, which says its greedy tokens, and how close a decision was."""

    def __init__(self, target: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, trust_remote_code=False).eval()

    def greedy(self, request: Request) -> list[int]:
        """The output tokens of `transformers.generate`."""
        stops = None if request.ignore_eos else self.model.generation_config.eos_token_id
        prompt = torch.tensor([request.prompt_ids])
        output = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=request.max_new_tokens,
            eos_token_id=stops,
            pad_token_id=0,
        )
        tokens: list[int] = output[0, prompt.shape[1] :].tolist()
        return tokens

    @torch.inference_mode()
    def margin(self, token_ids: list[int]) -> float:
        """How far the two largest logits after `token_ids` are apart."""
        first, second = self.model(torch.tensor([token_ids])).logits[0, -1].topk(2).values
        return float(first - second)

    def assert_lossless(
        self, requests: list[Request], outputs: Mapping[str, list[int]], plain: Mapping[str, list[int]]
    ) -> None:
        """Check that outputs equal plain decoding's token for token, or first differ where plain decoding was within
        NEAR_TIE of another token.
        """
        for request in requests:
            got, expected = outputs[request.request_id], plain[request.request_id]
            if got == expected:
                continue
            same = 0
            while same < min(len(got), len(expected)) and got[same] == expected[same]:
                same += 1
            assert same < min(len(got), len(expected)), f"{request.request_id}: {got} is not as long as {expected}"
            margin = self.margin([*request.prompt_ids, *expected[:same]])
            assert margin < NEAR_TIE, f"{request.request_id}: token {same} differs, margin {margin}: {got} {expected}"
