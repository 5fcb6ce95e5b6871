"""Times the pass of one prompt with several sizes of its chunks, and says which kernels take the time.

    python benchmarks/prompt_chunks.py --tokens 32000 --chunks 4096,8192,16384 [--no-kernels] [KNOB=VALUE ...]

There is a line for each chunk size. It has the time of the first pass, in which kernels are compiled and planned, and
that of the fastest later pass. It also has the peak memory, with weights and cache. The kernels are those of one more
pass, which is profiled.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

import torch
from prompt_passes import whole_numbers
from torch.profiler import ProfilerActivity, profile

from spec_lab.measure.lab import MAIN, Lab, load_lab
from spec_lab.menu.chosen import choose
from spec_lab.program.compose import compose_run
from spec_lab.program.ending import guarded

GIBI = 2**30
KINDS = (
    *(("nvjet", "products"), ("gemm", "products"), ("cutlass", "products"), ("cudnn", "cuDNN attention")),
    *(("attend", "paged attention"), ("merge", "merging pieces"), ("silu_gate", "gate"), ("norm", "norms")),
    *(("rope", "RoPE and write"), ("gather", "gather"), ("index", "gather"), ("elementwise", "elementwise")),
)
"""A kernel's kind is that of the first word here that its name contains."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--chunks", type=whole_numbers, default=[8192])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--no-kernels", action="store_true")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args()
    sizes = [f"workload.prompt_tokens={options.tokens}", "workload.num_requests=1", "batch_size=1"]
    fixed = ["references=[]", "max_new_tokens=1", "graph=eager", "workload=random_ids", *sizes]
    lab = load_lab(choose(compose_run([*fixed, *options.overrides])[0]))
    for chunk in options.chunks:
        lab.engines[MAIN].prompt_pass.chunk_size = chunk
        first, *later = [seconds(lab) for _ in range(1 + options.repeats)]
        peak = torch.cuda.max_memory_allocated() / GIBI if torch.cuda.is_available() else float("nan")
        print(f"chunk {chunk}: first {first:.3f} s, then {min(later):.4f} s, peak {peak:.1f} GiB", flush=True)
        if not options.no_kernels:
            show_kernels(lab)


def seconds(lab: Lab) -> float:
    """Run the prompt, and return the time of its pass."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    return sum(record.seconds for record in lab.engines[MAIN].generate(lab.requests).prefills)


def show_kernels(lab: Lab) -> None:
    """Print the time of each kind of kernel, and of the longest kernels."""
    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        seconds(lab)
    kernels = [
        (event.key, (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3, event.count)
        for event in profiler.key_averages()
    ]
    times: Counter[str] = Counter()
    for name, milliseconds, _ in kernels:
        times[next((kind for word, kind in KINDS if word in name), "other")] += milliseconds
    print("   ", ", ".join(f"{kind} {milliseconds:.1f} ms" for kind, milliseconds in times.most_common()))
    for name, milliseconds, count in sorted(kernels, key=lambda kernel: -kernel[1])[:10]:
        print(f"    {milliseconds:9.2f} ms {count:5}x  {name[:100]}", flush=True)


if __name__ == "__main__":
    sys.exit(guarded(main))
