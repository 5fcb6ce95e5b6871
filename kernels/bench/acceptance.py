"""Times kernels over the vocabulary on a GPU, and the torch forms that they replace.

    PYTHONPATH=.:kernels python kernels/bench/acceptance.py [--batch 1 16 64] [--vocab 128256 151936] [--rows 4]

Lower bound: strict acceptance and the standing of drafts read every logit once, `batch * rows * vocab * 2` bytes in
bfloat16, and write very little. Rejection reads one row per request again. Standard rejection reads the drafter's
float32 logits in the same way. At batch 1 strict acceptance reads about 1 MB, which takes
an H200 at 4.2 TB/s under half a microsecond. So launches must be few, and each must fill the GPU. One block per row
would be only 4 blocks. Torch's operators write intermediate results (a sorted vocabulary, probabilities, float64
arrival times) and launch a kernel for each.

Times are for one call inside a CUDA graph of many, on the same logits. As in a round, where the LM head has just
written them, logits are in the L2 cache if they fit. So times can be below the printed bound of memory bandwidth.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from attention import BANDWIDTH, REPEATS, microseconds
from figures import Figure, options_of, write_figures

from spec_kernels.noise_reference import round_key
from spec_lab.acceptance.draft_sampling import sample_and_keep
from spec_lab.acceptance.rejection import METHODS, rejection_sample
from spec_lab.acceptance.standing import stand
from spec_lab.acceptance.strict import strict_accept
from spec_lab.core.kernel_set import Op
from spec_lab.operators.triton_set import TRITON_FUNCTIONS

Call = Callable[[int], object]
NAMES = {
    "strict": "strict acceptance",
    "standing": "draft standing",
    "one_hot": "one-hot rejection",
    "standard": "standard rejection",
    "draft": "draft sampling",
}


def cases(batch: int, num_rows: int, vocab_size: int) -> Iterator[tuple[str, int, Call, Call]]:
    """Yield the name, the bytes that have to move, the kernel and the torch form of each case."""
    num_drafts = num_rows - 1
    logits = torch.randn(batch, num_rows, vocab_size, device="cuda", dtype=torch.bfloat16)
    draft_logits = logits[:, :-1].float() + torch.randn(batch, num_drafts, vocab_size, device="cuda")
    drafts = logits[:, :-1].argmax(dim=-1)
    active = torch.ones(batch, dtype=torch.bool, device="cuda")
    slot_ids, kv_lens = torch.arange(batch, device="cuda"), torch.full((batch,), 1000, device="cuda")
    seeds, column = torch.arange(batch + 1, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    kept = torch.zeros(batch + 1, num_drafts, vocab_size, device="cuda")
    row = batch * vocab_size * logits.element_size()
    q_row = batch * vocab_size * kept.element_size()

    yield "strict", num_rows * row, *both(Op.STRICT_ACCEPT, strict_accept, (logits, drafts, active, None))
    yield "standing", num_rows * row, *both(Op.DRAFT_STANDING, stand, (logits, drafts))

    draws = (active, slot_ids, seeds, kv_lens, 0.8, None)
    one_hot, standard = (partial(rejection_sample, METHODS[name], round_key) for name in ("one_hot", "standard"))
    yield "one_hot", (num_rows + 1) * row, *both(Op.REJECTION_SAMPLE, one_hot, (logits, drafts, None, *draws))
    num_bytes = (num_rows + 1) * row + num_rows * q_row
    yield "standard", num_bytes, *both(Op.REJECTION_SAMPLE, standard, (logits, drafts, draft_logits, *draws))

    drawn = (kept, logits[:, 0], slot_ids, seeds, kv_lens, column, 0.8)
    yield "draft", row + q_row, *both(Op.SAMPLE_DRAFT, sample_and_keep, drawn)


def both(op: Op, torch_form: Callable[..., object], given: tuple[object, ...]) -> list[Call]:
    return [lambda index: TRITON_FUNCTIONS[op](*given), lambda index: torch_form(*given)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("batch", [1, 16, 64]), ("vocab", [128256, 151936]), ("rows", [4])):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=default)
    options = options_of(parser)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16 logits, medians of {REPEATS} replays")
    print("batch   vocab rows  what         kernel us   torch us   floor us")
    figures = []
    for batch, vocab_size, num_rows in itertools.product(options.batch, options.vocab, options.rows):
        for name, num_bytes, kernel, torch_form in cases(batch, num_rows, vocab_size):
            kernel_us, torch_us = microseconds(kernel), microseconds(torch_form)
            times = f"{kernel_us:12.2f}{torch_us:11.2f}{num_bytes / BANDWIDTH * 1e6:11.2f}"
            print(f"{batch:5}{vocab_size:8}{num_rows:5}  {name:10}{times}")
            shape = f"batch {batch}, vocabulary {vocab_size}, {num_rows} rows"
            figures.append(Figure(NAMES[name], shape, num_bytes, None, kernel_us, torch_us))
    write_figures(options.csv, figures)


if __name__ == "__main__":
    main()
