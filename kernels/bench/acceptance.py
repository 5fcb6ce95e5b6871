"""Time of the kernels over the vocabulary on a GPU, beside their torch references.

    PYTHONPATH=.:kernels python kernels/bench/acceptance.py [--batch 1 16 64] [--vocab 128256 151936] [--rows 4]

The physics: strict acceptance and the standing of drafts read every logit once, `batch * rows * vocab * 2` bytes in
bfloat16, and write next to nothing; rejection reads them once, the drafter's float32 logits once, and one row a request
of both again. At batch 1 that is about 1 MB, under half a microsecond of an H200's 4.2 TB/s: what counts there is that
the launches are few and that each fills the GPU, which one block a row (4 of them) would not. Torch's operators write
what lies between them (a sort of the vocabulary, probabilities, float64 arrivals) and launch a kernel for each.

Times are of one call inside a CUDA graph of many, on the same logits: in a round they come from the LM head just before
and lie in L2 as far as they fit, so the floor printed, of memory's bandwidth, can be passed.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from attention import BANDWIDTH, REPEATS, microseconds
from figures import Figure, write_figures

from spec_kernels import gumbel, rejection, relaxed, strict

Call = Callable[[int], object]
NAMES = {
    "strict": "strict acceptance",
    "standing": "draft standing",
    "one_hot": "one-hot rejection",
    "standard": "standard rejection",
    "draft": "draft sampling",
}


def cases(batch: int, num_rows: int, vocab_size: int) -> Iterator[tuple[str, int, Call, Call]]:
    """Yield the name, the bytes that have to move, the kernel and the reference of each case."""
    num_drafts = num_rows - 1
    logits = torch.randn(batch, num_rows, vocab_size, device="cuda", dtype=torch.bfloat16)
    draft_logits = logits[:, :-1].float() + torch.randn(batch, num_drafts, vocab_size, device="cuda")
    drafts = logits[:, :-1].argmax(dim=-1)
    active = torch.ones(batch, dtype=torch.bool, device="cuda")
    slot_ids, kv_lens = torch.arange(batch, device="cuda"), torch.full((batch,), 1000, device="cuda")
    seeds, column = torch.arange(batch + 1, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    tokens, num_emitted = torch.zeros_like(logits[..., 0], dtype=torch.int64), torch.zeros_like(slot_ids)
    kept = torch.zeros(batch + 1, num_drafts, vocab_size, device="cuda")
    row = batch * vocab_size * logits.element_size()
    q_row = batch * vocab_size * kept.element_size()

    verified = (tokens, num_emitted, logits, drafts, active, None)
    yield "strict", num_rows * row, *both(strict.strict_accept, strict.strict_accept_reference, verified)

    floats = torch.empty(2, batch, num_drafts, device="cuda")
    standing = (torch.empty_like(drafts, dtype=torch.bool), torch.empty_like(drafts), *floats, tokens, logits, drafts)
    yield "standing", num_rows * row, *both(relaxed.draft_standing, relaxed.draft_standing_reference, standing)

    draws = (active, slot_ids, seeds, kv_lens, 0.8, None)
    functions = (rejection.rejection_sample, rejection.rejection_sample_reference)
    one_hot = (tokens, num_emitted, logits, drafts, None, *draws)
    yield "one_hot", (num_rows + 1) * row, *both(*functions, one_hot)
    sampled = (tokens, num_emitted, logits, drafts, draft_logits, *draws)
    yield "standard", (num_rows + 1) * row + num_rows * q_row, *both(*functions, sampled)

    drawn = (num_emitted, kept, logits[:, 0], slot_ids, seeds, kv_lens, column, 0.8)
    yield "draft", row + q_row, *both(gumbel.sample_draft, gumbel.sample_draft_reference, drawn)


def both(kernel: Callable[..., object], reference: Callable[..., object], given: tuple[object, ...]) -> list[Call]:
    return [lambda index: kernel(*given), lambda index: reference(*given)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("batch", [1, 16, 64]), ("vocab", [128256, 151936]), ("rows", [4])):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=default)
    parser.add_argument("--csv", type=Path, help="write the measurements there, for notebooks/kernels.ipynb")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16 logits, medians of {REPEATS} replays")
    print("batch   vocab rows  what         kernel us   torch us   floor us")
    figures = []
    for batch, vocab_size, num_rows in itertools.product(options.batch, options.vocab, options.rows):
        for name, num_bytes, kernel, reference in cases(batch, num_rows, vocab_size):
            kernel_us, reference_us = microseconds(kernel), microseconds(reference)
            times = f"{kernel_us:12.2f}{reference_us:11.2f}{num_bytes / BANDWIDTH * 1e6:11.2f}"
            print(f"{batch:5}{vocab_size:8}{num_rows:5}  {name:10}{times}")
            shape = f"batch {batch}, vocabulary {vocab_size}, {num_rows} rows"
            figures.append(Figure(NAMES[name], shape, num_bytes, None, kernel_us, reference_us))
    if options.csv is not None:
        write_figures(options.csv, figures)


if __name__ == "__main__":
    main()
