"""Times prompt passes whose forwards have chunks of one request, or of several (`cache.prefill_tokens`).

    python benchmarks/prompt_passes.py [--sizes 1,2048,8192] [--repeats 3] [KNOB=VALUE ...]

Every request of the workload ends after its prompt pass. So the times include the first token and the first drafts, but
no rounds. There is a line for each size. It has the time a request in the fastest repeat, and the number of forwards.
It also says for how many prompts the last row's logits have other bits than with the first size. With
graph.prompts=true logits are not compared. --as-they-round measures once more with the library's usual products, with
which bits may depend on how prompts share forwards.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from hashlib import sha256

import torch

from spec_lab.core.prompts import PromptRounding
from spec_lab.core.results import GenerationResult
from spec_lab.core.types import Request
from spec_lab.engine.engine import Engine
from spec_lab.engine.graphs.prompts import CapturedPromptPass
from spec_lab.measure.lab import MAIN, load_lab
from spec_lab.menu.chosen import choose
from spec_lab.program.compose import compose_run
from spec_lab.program.ending import guarded


def milliseconds(result: GenerationResult) -> float:
    """Return the mean time of a request's prompt pass in a repeat."""
    return 1e3 * sum(record.seconds for record in result.prefills) / len(result.prefills)


def whole_numbers(text: str) -> list[int]:
    """Read numbers with commas between them."""
    return [int(number) for number in text.split(",")]


def logits_behind(engine: Engine, requests: list[Request]) -> Counter[str]:
    """Run the prompts, and count the logits after them by their bits."""
    found: Counter[str] = Counter()
    rule = engine.parts.rule
    own = rule.first_tokens

    def first_tokens(logits: torch.Tensor, slot_ids: torch.Tensor, kv_lens: torch.Tensor) -> torch.Tensor:
        found.update(sha256(row.numpy()).hexdigest() for row in logits.float().cpu())
        return own(logits, slot_ids, kv_lens)

    rule.first_tokens = first_tokens  # type: ignore[method-assign]
    try:
        engine.generate(requests)
    finally:
        rule.first_tokens = own  # type: ignore[method-assign]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=whole_numbers, default=[1, 512, 2048, 8192])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--as-they-round", action="store_true")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    config, _ = compose_run(["references=[]", "max_new_tokens=1", *arguments.overrides])
    lab = load_lab(choose(config))
    engine: Engine = lab.engines[MAIN]
    engine.prepare()
    lengths = [len(request.prompt_ids) for request in lab.requests]
    print(
        f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens, batch {engine.scheduler.num_slots}, "
        f"{lab.models.device}, {lab.models.dtype}, attention={config.attention.name} kernels={config.kernels}"
    )
    roundings = [engine.prompt_pass.rounding, *([PromptRounding()] if arguments.as_they_round else [])]
    for rounding in roundings:
        engine.prompt_pass.rounding = rounding
        print(f"at least {rounding.least_rows} rows a forward")
        time_sizes(engine, lab.requests, arguments.sizes, arguments.repeats)


def time_sizes(engine: Engine, requests: list[Request], sizes: list[int], repeats: int) -> None:
    """Print a line for each size."""
    captured = isinstance(engine.prompt_pass, CapturedPromptPass)
    alone: Counter[str] | None = None
    for size in sizes:
        engine.prompt_pass.pack_size = size
        logits = Counter[str]() if captured else logits_behind(engine, requests)  # first calls of every shape
        alone = alone or logits
        engine.generate(requests)
        results = [engine.generate(requests) for _ in range(repeats)]
        print(
            f"prefill_tokens={size:<6} {min(map(milliseconds, results)):8.2f} ms a request, "
            f"{results[0].num_prompt_forwards} forwards, {(logits - alone).total()} prompts with other bits",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(guarded(main))
