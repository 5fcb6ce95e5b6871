"""Decode rates on a CPU: transformers' `generate`, our plain decoding, and drafters, on a shipped or packaged target.

Decoding one row of a small model is bound by the cost of calling operators and streaming weights through the caches,
not by arithmetic. So a round of K + 1 rows costs little more than a plain step, and drafting can pay. It pays if the
acceptance length exceeds the break-even length: the time of a round over that of a plain step.

Acceptance lengths by category come from an untimed pass over `--prompts-per-category` prompts of each. Fewer prompts
are timed, a multiple of the batch size, so that every batch is full. Transformers, plain decoding and the drafters take
turns on them in one process, in another order each turn. All compute in float32 with the same number of threads, and
all are warmed up first.

A rate is the median over turns. A ratio is the geometric mean of the turns' ratios, with its 95 % interval.
Transformers and plain decoding are compared with prompt passes included, since `generate` has no separate decode rate.
Both compute logits for the last prompt row only. Drafters are compared with plain decoding by decode rate, without
prompt passes.

    python benchmarks/cpu_vs_transformers.py [--turns 5] [--prompts 9] [--prompts-per-category 8]
        [--max-new-tokens 128] [--batch-sizes 1 8] [--num-threads 1] [--kernels auto] [--drafters eagle3 ...]
        [--target pocket] [KEY=VALUE ...]

`--drafters` without a name compares plain decoding alone. Words with `=` are overrides of the lab's runs, and do not
affect transformers: `target.weight_dtype=bfloat16` keeps the lab's weights in 16 bits, while those of transformers stay
in float32.

The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch

from spec_lab.app.compose import compose
from spec_lab.checkpoints.checkpoint import open_tensors
from spec_lab.checkpoints.families.table import read_model_config
from spec_lab.checkpoints.gguf_file import is_gguf
from spec_lab.checkpoints.tensor_shapes import decoder_tensor_shapes
from spec_lab.core.ending import ended
from spec_lab.core.results import GenerationResult
from spec_lab.core.types import Request
from spec_lab.engine.engine import Engine
from spec_lab.measure.lab import MAIN, load_lab
from spec_lab.menu.chosen import choose
from spec_lab.menu.config import RunConfig
from spec_lab.record import times
from spec_lab.record.draft_counts import acceptance_length
from spec_lab.record.metric import Measured, median_of
from spec_lab.record.statistics import of_turns
from spec_lab.record.wording import format_table, number, with_range
from spec_lab.workloads.prompt_files import shipped_prompts

DRAFTERS = ("eagle3", "ngram", "oracle", "random")
BATCH_SIZE_FOR_ACCEPTANCE = 8

Turn = dict[str, Any]
"""The results of one pass each: a `GenerationResult` by the engine's name, and tokens/s under "transformers"."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=9, help="timed ones, rounded up to whole batches")
    parser.add_argument("--prompts-per-category", type=int, default=8, help="for the acceptance lengths")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--target", default="pocket")
    parser.add_argument("--drafters", nargs="*", choices=DRAFTERS, default=DRAFTERS)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    acceptance = measure_acceptance(options) if options.drafters else {}
    speed = [measure_speed(batch_size, options) for batch_size in options.batch_sizes]
    print(json.dumps({"num_threads": options.num_threads, "acceptance_length": acceptance, "speed": speed}))


def measure_acceptance(options: argparse.Namespace) -> dict[str, dict[str, float | None]]:
    """Print and return the acceptance length of each drafter by category."""
    num_prompts = options.prompts_per_category * len({prompt.category for prompt in shipped_prompts()})
    _, engines, requests = load(BATCH_SIZE_FOR_ACCEPTANCE, num_prompts, options)
    results = {name: engines[name].generate(requests) for name in options.drafters}
    table: dict[str, dict[str, float | None]] = {}
    for category in [*sorted({request.category for request in requests}), "all"]:
        table[category] = {
            name: acceptance_length(
                [r for r in result.requests if category in (r.category, "all")], result.num_draft_tokens
            )
            for name, result in results.items()
        }
    print(f"acceptance length, {len(requests)} prompts")
    body = [[category, *map(number, lengths.values())] for category, lengths in table.items()]
    print(format_table(["category", *options.drafters], body, left=["category"]))
    return table


def measure_speed(batch_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Time all contestants at one batch size; print and return the results."""
    num_prompts = -(-options.prompts // batch_size) * batch_size
    config, engines, requests = load(batch_size, num_prompts, options)
    contestants: dict[str, Callable[[list[Request]], Any]] = {
        "transformers": transformers_generate(config),
        **{name: engine.generate for name, engine in engines.items()},
    }
    for run in contestants.values():
        run(requests[:batch_size])
    turns = [take_turns(contestants, requests, turn) for turn in range(options.turns)]
    return report(batch_size, len(requests), turns, options.drafters)


def load(
    batch_size: int, num_prompts: int, options: argparse.Namespace
) -> tuple[RunConfig, dict[str, Engine], list[Request]]:
    """Load `plain`, every drafter, and prompts of all categories in turn. The oracle gets plain decoding's outputs."""
    common = [
        f"target={options.target}",
        "device=cpu",
        "dtype=float32",
        f"num_threads={options.num_threads}",
        f"kernels={options.kernels}",
        f"batch_size={batch_size}",
        f"max_new_tokens={options.max_new_tokens}",
        f"workload.limit={num_prompts}",
        "prune=catchup",
        *options.overrides,
    ]
    labs = {
        name: load_lab(choose(compose([*common, f"drafter={drafter}", "references=[]"]).config))
        for name, drafter in {"plain": "none", **{name: name for name in options.drafters}}.items()
    }
    first = labs["plain"]
    engines = {name: lab.engines[MAIN] for name, lab in labs.items()}
    plain = {record.request_id: record.output_ids for record in engines["plain"].generate(first.requests).requests}
    for engine in engines.values():
        learn = engine.parts.drafter.requirements.learn_continuations
        if learn is not None:
            learn(plain)
    return first.config, engines, first.requests


def transformers_generate(config: RunConfig) -> Callable[[list[Request]], float]:
    """Return a function that runs `generate` on requests in batches and gives its tokens/s."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    path = choose(config).target_folder
    where = {"gguf_file": path.name} if is_gguf(path) else {}
    read_config = AutoConfig.from_pretrained(path.parent if where else path, trust_remote_code=False, **where)
    model = AutoModelForCausalLM.from_config(read_config, dtype=torch.float32).eval()
    # The lab reads the weights, since transformers needs accelerate to read GGUF. A tied head is not among them.
    shapes = decoder_tensor_shapes(read_model_config(path))
    model.load_state_dict(dict(open_tensors(path, shapes, torch.float32, "cpu")), strict=False)
    model.tie_weights()

    def run(requests: list[Request]) -> float:
        num_tokens, start = 0, perf_counter()
        with torch.inference_mode():
            for first in range(0, len(requests), config.batch_size):
                ids, mask = left_padded(requests[first : first + config.batch_size])
                limit = config.max_new_tokens
                output = model.generate(ids, attention_mask=mask, max_new_tokens=limit, do_sample=False, pad_token_id=0)
                num_tokens += count_new_tokens(output[:, ids.shape[1] :], model.generation_config.eos_token_id)
        return num_tokens / (perf_counter() - start)

    return run


def left_padded(requests: list[Request]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask [batch, longest], with padding on the left as `generate` wants it."""
    longest = max(len(request.prompt_ids) for request in requests)
    padding = [longest - len(request.prompt_ids) for request in requests]
    pairs = list(zip(padding, requests, strict=True))
    ids = torch.tensor([[0] * left + list(request.prompt_ids) for left, request in pairs])
    mask = torch.tensor([[0] * left + [1] * len(request.prompt_ids) for left, request in pairs])
    return ids, mask


def count_new_tokens(output: torch.Tensor, eos: int | list[int]) -> int:
    """Count the tokens up to and including the first EOS of each row; the others are padding."""
    stops = torch.isin(output, torch.tensor(eos))
    after = stops.long().cumsum(1) - stops.long()
    return int((after == 0).sum())


def take_turns(contestants: dict[str, Callable[[list[Request]], Any]], requests: list[Request], turn: int) -> Turn:
    """Let each run one pass. The order rotates with the turn, so that a machine that slows down does not always affect
    the same one.

    Args:
        turn: counts from 0.
    """
    names = list(contestants)
    shift = turn % len(names)
    results = {}
    for name in names[shift:] + names[:shift]:
        gc.collect()
        results[name] = contestants[name](requests)
    return results


def report(batch_size: int, num_prompts: int, turns: list[Turn], drafters: Sequence[str]) -> dict[str, Any]:
    """Print the table of one batch size; return its numbers."""
    theirs = [turn["transformers"] for turn in turns]
    ours: list[Any] = [times.end_to_end_tokens_per_second(turn["plain"]) for turn in turns]
    against = ratios(ours, theirs)
    print(f"\nbatch size {batch_size}, {torch.get_num_threads()} threads, {num_prompts} prompts, {len(turns)} turns")
    print(f"transformers generate {number(median(theirs), 1)} tokens/s, plain {number(median(ours), 1)}, ", end="")
    print(f"ratio {with_range(*against)}")
    print(f"plain step {number(median(times.round_ms(turn['plain']) for turn in turns), 2)} ms")
    rows = {name: drafter_row([turn[name] for turn in turns], [turn["plain"] for turn in turns]) for name in drafters}
    header = ["drafter", "decode tok/s", "over plain", "acceptance length", "break-even", "round ms"]
    if rows:
        print(format_table(header, [[name, *cells(row)] for name, row in rows.items()], left=["drafter"]))
    return {
        "batch_size": batch_size,
        "prompts": num_prompts,
        "transformers": median(theirs),
        "plain": median(ours),
        "plain_over_transformers": against,
        "drafters": rows,
    }


def ratios(ours: list[Any], theirs: list[Any]) -> tuple[float, float | None, float | None]:
    """Return the mean ratio within a turn, and the ends of its interval."""
    ratio = of_turns(ours, theirs)
    assert ratio is not None, "every turn has rounds"
    interval = ratio.interval
    return interval.value, interval.low, interval.high


def drafter_row(results: list[GenerationResult], plain: list[GenerationResult]) -> dict[str, Any]:
    """Compute one drafter's figures from its turns and plain decoding's."""
    rates = [times.decode_tokens_per_second(result) for result in results]
    measured = Measured((), results, results[0].num_draft_tokens, {"plain": Measured(repeats=plain)})
    return {
        "decode_tokens_per_second": median_of(rates),
        "over_plain": ratios(rates, [times.decode_tokens_per_second(result) for result in plain]),
        "acceptance_length": acceptance_length(results[0].requests, results[0].num_draft_tokens),
        "break_even": times.break_even_acceptance_length(measured),
        "round_ms": median_of(times.round_ms(result) for result in results),
    }


def cells(row: dict[str, Any]) -> list[str]:
    """Write the figures of a line."""
    return [
        number(row["decode_tokens_per_second"], 1),
        with_range(*row["over_plain"]),
        number(row["acceptance_length"]),
        number(row["break_even"]),
        number(row["round_ms"], 3),
    ]


if __name__ == "__main__":
    sys.exit(ended(main))
