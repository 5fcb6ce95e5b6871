"""Decode rates on a CPU: transformers' `generate`, our plain decoding, and every drafter, on the pocket target.

Decoding one row of a small model is bound by the cost of calling operators and streaming weights through the caches,
not by arithmetic, so a round of K + 1 rows costs little more than a plain step. That is what drafting lives on: it pays
when the acceptance length exceeds the break-even length, time of a round over time of a plain step.

All contestants take turns on the same prompts in one process: every number in the table is the median over the turns of
that contestant's rate, every ratio the median (lowest to highest) of ratios within a turn. Prompt passes are included
for transformers and ours alike in the first two columns (`generate` offers no rate of its own for decoding); the
drafters are compared by decode rate, prompt passes left out.

    python benchmarks/cpu_vs_transformers.py [--turns 5] [--prompts 9] [--max-new-tokens 128] [--batch-sizes 1 8]

The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch

from spec_lab import build
from spec_lab.cli.compose import compose_run
from spec_lab.core.types import GenerationResult, Request
from spec_lab.engine.engine import Engine
from spec_lab.record import metrics
from spec_lab.record.table import format_table, number, with_range
from spec_lab.runner import MAIN, load_lab

DRAFTERS = ("eagle3", "ngram", "oracle", "random")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=9)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    results = [measure(batch_size, options) for batch_size in options.batch_sizes]
    print(json.dumps({"num_threads": torch.get_num_threads(), "results": results}))


def measure(batch_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run and print everything at one batch size."""
    common = [
        f"batch_size={batch_size}",
        f"max_new_tokens={options.max_new_tokens}",
        f"workload.limit={options.prompts}",
        "references=[plain]",
        "prune=catchup",
    ]
    labs = {name: load_lab(compose_run([*common, f"drafter={name}"])[0]) for name in DRAFTERS}
    requests = labs["eagle3"].requests
    engines: dict[str, Engine] = {"plain": labs["eagle3"].engines["plain"]}
    engines |= {name: lab.engines[MAIN] for name, lab in labs.items()}
    plain = engines["plain"].generate(requests)
    engines["oracle"].parts.drafter.learn({r.request_id: r.output_ids for r in plain.requests})
    generate = transformers_generate(labs["eagle3"].config, requests, batch_size)
    generate()
    turns = [turn(engines, generate, requests) for _ in range(options.turns)]
    return report(batch_size, turns)


def turn(
    engines: dict[str, Engine], generate: Callable[[], float], requests: list[Request]
) -> tuple[float, dict[str, GenerationResult]]:
    """One pass of each contestant: tokens/s of transformers, and our results."""
    return generate(), {name: engine.generate(requests) for name, engine in engines.items()}


def transformers_generate(config: Any, requests: list[Request], batch_size: int) -> Callable[[], float]:
    """A function that runs `generate` on the requests in batches and returns its tokens/s."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(build.target_folder(config), dtype=torch.float32).eval()
    batches = [requests[start : start + batch_size] for start in range(0, len(requests), batch_size)]

    def run() -> float:
        num_tokens, start = 0, perf_counter()
        with torch.inference_mode():
            for batch in batches:
                ids, mask = left_padded([list(request.prompt_ids) for request in batch])
                limit = batch[0].max_new_tokens
                output = model.generate(ids, attention_mask=mask, max_new_tokens=limit, do_sample=False, pad_token_id=0)
                num_tokens += count_new_tokens(output[:, ids.shape[1] :], model.generation_config.eos_token_id)
        return num_tokens / (perf_counter() - start)

    return run


def left_padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and mask [batch, longest], padding on the left as `generate` wants it."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def count_new_tokens(output: torch.Tensor, eos: int | list[int]) -> int:
    """Tokens up to and with the first EOS of each row; what follows is padding."""
    stops = torch.isin(output, torch.tensor(eos))
    after = stops.long().cumsum(1) - stops.long()
    return int((after == 0).sum())


def report(batch_size: int, turns: list[tuple[float, dict[str, GenerationResult]]]) -> dict[str, Any]:
    """Print the tables of one batch size; return their numbers."""
    theirs = [rate for rate, _ in turns]
    ours = [metrics.end_to_end_tokens_per_second(results["plain"]) for _, results in turns]
    against = ratios(ours, theirs)
    print(f"\nbatch size {batch_size}, {torch.get_num_threads()} threads, {len(turns)} turns")
    print(f"transformers generate {number(median(theirs), 1)} tokens/s, plain {number(median(ours), 1)}, ", end="")
    print(f"ratio {with_range(*against)}")
    rows = {name: drafter_row(name, [results for _, results in turns]) for name in DRAFTERS}
    header = ["drafter", "decode tok/s", "over plain", "acceptance length", "break-even", "round ms"]
    print(format_table(header, [[name, *cells(row)] for name, row in rows.items()], left=["drafter"]))
    categories = by_category({name: turns[0][1][name] for name in DRAFTERS})
    print(format_table(["acceptance length", *DRAFTERS], categories, left=["acceptance length"]))
    return {
        "batch_size": batch_size,
        "transformers": median(theirs),
        "plain_over_transformers": against,
        "drafters": rows,
    }


def ratios(ours: list[Any], theirs: list[Any]) -> tuple[float, float, float]:
    """Median, lowest and highest ratio within a turn."""
    paired = [a / b for a, b in zip(ours, theirs, strict=True)]
    return median(paired), min(paired), max(paired)


def drafter_row(name: str, turns: list[dict[str, GenerationResult]]) -> dict[str, Any]:
    rates = [metrics.decode_tokens_per_second(results[name].rounds) for results in turns]
    plain = [metrics.decode_tokens_per_second(results["plain"].rounds) for results in turns]
    even = [metrics.break_even_acceptance_length(results[name].rounds, results["plain"].rounds) for results in turns]
    return {
        "decode_tokens_per_second": median(rate for rate in rates if rate),
        "over_plain": ratios(rates, plain),
        "acceptance_length": metrics.acceptance_length(turns[0][name].requests),
        "break_even": median(length for length in even if length),
        "round_ms": metrics.round_ms(turns[0][name].rounds),
    }


def cells(row: dict[str, Any]) -> list[str]:
    return [
        number(row["decode_tokens_per_second"], 1),
        with_range(*row["over_plain"]),
        number(row["acceptance_length"]),
        number(row["break_even"]),
        number(row["round_ms"], 3),
    ]


def by_category(results: dict[str, GenerationResult]) -> list[list[str]]:
    """Acceptance length of each drafter in each category."""
    categories = sorted({record.category for result in results.values() for record in result.requests})
    return [
        [category]
        + [
            number(metrics.acceptance_length([r for r in result.requests if r.category == category]))
            for result in results.values()
        ]
        for category in categories
    ]


if __name__ == "__main__":
    main()
