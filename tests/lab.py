"""Small engines on tiny random checkpoints, for tests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.tiny_checkpoints import make_tiny_eagle3, make_tiny_target

from spec_lab import build
from spec_lab.config import (
    AcceptanceConfig,
    AttentionConfig,
    CacheConfig,
    DrafterConfig,
    Eagle3DrafterConfig,
    GraphConfig,
    LoggerConfig,
    NgramDrafterConfig,
    NoDrafterConfig,
    PruneConfig,
    RunConfig,
    SamplingConfig,
    TargetConfig,
    WorkloadConfig,
)
from spec_lab.core.types import Request
from spec_lab.engine.engine import Engine
from spec_lab.models.config import Family, read_model_config

PRUNING = {
    "none": ("all_rows", "none"),
    "prefill": ("last_row", "none"),
    "post_attention": ("last_row", "post_attention"),
    "catchup": ("last_row", "pre_attention"),
}
DRAFTERS: dict[str, type[DrafterConfig]] = {
    "none": NoDrafterConfig,
    "eagle3": Eagle3DrafterConfig,
    "ngram": NgramDrafterConfig,
    "oracle": DrafterConfig,
    "random": DrafterConfig,
}


def make_pair(folder: Path, family: Family = "qwen3", **overrides: Any) -> tuple[Path, Path]:
    """A tiny target and a random head for it."""
    target, head = folder / "target", folder / "head"
    make_tiny_target(target, family, **overrides)
    make_tiny_eagle3(head, read_model_config(target))
    return target, head


def make_config(
    pair: tuple[Path, Path], drafter: str = "eagle3", num_draft_tokens: int = 3, prune: str = "none", **changes: Any
) -> RunConfig:
    """A run on `pair`; `changes` are top-level keys, and `cache` a dict of its keys."""
    options: dict[str, Any] = {"name": drafter, "num_draft_tokens": 0 if drafter == "none" else num_draft_tokens}
    if drafter == "eagle3":
        options["path"] = str(pair[1])
    prefill, catchup = PRUNING[prune]
    return RunConfig(
        target=TargetConfig(name="hf", path=str(pair[0])),
        drafter=DRAFTERS[drafter](**options),
        acceptance=AcceptanceConfig(name="strict"),
        prune=PruneConfig(name=prune, prefill=prefill, catchup=catchup),
        graph=GraphConfig(),
        attention=AttentionConfig(),
        workload=WorkloadConfig(name="pocket"),
        sampling=SamplingConfig(),
        logger=LoggerConfig(name="jsonl"),
        cache=CacheConfig(**changes.pop("cache", {})),
        **changes,
    )


def make_engine(config: RunConfig, requests: list[Request]) -> Engine:
    """The engine of a configuration, with caches that hold `requests`."""
    limits = build.engine_limits(config, requests, config.drafter.num_draft_tokens)
    models = build.load_models(config, limits.max_seq_len)
    return build.build_engine(
        config, models, build.load_drafter(config, models), build.build_prune_policy(config.prune), limits
    )


def random_requests(
    count: int, max_new_tokens: int = 24, seed: int = 0, vocab_size: int = 160, lengths: tuple[int, int] = (1, 40)
) -> list[Request]:
    """Requests of mixed prompt lengths. Token 2, the tiny targets' EOS, is not in a prompt."""
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
