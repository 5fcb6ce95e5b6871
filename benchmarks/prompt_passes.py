"""Times prompt passes with chunks of one request and of several in a forward (`cache.prefill_tokens`).

    python benchmarks/prompt_passes.py [--sizes 1,2048,8192] [--repeats 3] [KNOB=VALUE ...]

Every request of the workload ends with its prompt pass: the first token and the first drafts are in the time, rounds
are not. A line a size: the best repeat's time a request, the forwards it took, and how many first tokens differ from
those of the first size. With graph.prompts=true and a size of 1 prompts are replayed.
"""

from __future__ import annotations

import argparse
import sys

from spec_lab.core.results import GenerationResult
from spec_lab.engine.engine import Engine
from spec_lab.measure.lab import MAIN, load_lab
from spec_lab.menu.chosen import choose
from spec_lab.program.compose import compose_run
from spec_lab.program.ending import guarded


def milliseconds(result: GenerationResult) -> float:
    """Return the time of a repeat's prompt passes, a request."""
    return 1e3 * sum(record.seconds for record in result.prefills) / len(result.prefills)


def whole_numbers(text: str) -> list[int]:
    """Read numbers with commas between them."""
    return [int(number) for number in text.split(",")]


def first_tokens(result: GenerationResult) -> list[int]:
    """Return the token behind each prompt, in the order of the requests."""
    return [record.output_ids[0] for record in result.requests]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=whole_numbers, default=[1, 512, 2048, 8192])
    parser.add_argument("--repeats", type=int, default=3)
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
    alone: list[int] | None = None
    for size in arguments.sizes:
        engine.prompt_pass.pack_size = size
        engine.generate(lab.requests)  # first calls of every shape
        results = [engine.generate(lab.requests) for _ in range(arguments.repeats)]
        tokens = first_tokens(results[0])
        alone = alone or tokens
        num_different = sum(ours != theirs for ours, theirs in zip(tokens, alone, strict=True))
        print(
            f"prefill_tokens={size:<6} {min(map(milliseconds, results)):8.2f} ms a request, "
            f"{results[0].num_prompt_forwards} forwards, {num_different} first tokens differ",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(guarded(main))
