"""Measures how far rounding moves the margin between a target's two best tokens, and where texts diverge because of it.

    python benchmarks/margin_noise.py dtype=bfloat16 batch_size=54 workload.limit=54 max_new_tokens=96 [KNOB=VALUE ...]

All prompts are decoded without drafts, by default on a CPU. Then the target computes each text's logits in three ways:
as plain decoding of that request alone does, in chunks, and in chunks in float32. The output has a line for each pair
of ways. It also has a line for each of the five texts that diverge furthest from plain decoding of the request alone.
These lines have the two tolerances of the audit (spec_lab/measure/audit.py).
"""

from __future__ import annotations

import argparse
import sys

import torch

from spec_lab.core.results import RequestRecord
from spec_lab.engine.teacher import TeacherForcing
from spec_lab.measure.audit import near_tie_tolerance, noise_tolerance
from spec_lab.measure.lab import MAIN, Lab, load_lab
from spec_lab.menu.chosen import choose
from spec_lab.program.compose import compose_run
from spec_lab.program.ending import guarded

FIXED = ["drafter=none", "references=[]", "workload.ignore_eos=true"]
EXACT = ["dtype=float32", "batch_size=1", "graph=eager", "attention=torch", "kernels=torch", "row_invariant=false"]
QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)
DECODED, CHUNKED, FLOAT32 = "alone", "in chunks", "float32"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-float32", action="store_true", help="for random weights, which depend on the dtype")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args()
    lab = lab_of(options.overrides)
    teachers = {FLOAT32: lab_of([*options.overrides, *EXACT]).teacher} if not options.no_float32 else {}
    lab.engines[MAIN].prepare()
    records = lab.engines[MAIN].generate(lab.requests).requests
    ways = [ways_of(record, lab.teacher, teachers) for record in records]
    show_moved(ways)
    show_parted(lab, records, ways)


def lab_of(overrides: list[str]) -> Lab:
    """Load a run of these overrides."""
    return load_lab(choose(compose_run([*FIXED, *overrides])[0]))


@torch.inference_mode()
def ways_of(
    record: RequestRecord, teacher: TeacherForcing, others: dict[str, TeacherForcing]
) -> dict[str, torch.Tensor]:
    """Return the [tokens, vocab] logits of a text by each way of computing them."""
    ways = {
        DECODED: teacher._decoded(record.prompt_ids, record.output_ids[:-1]),
        CHUNKED: teacher._in_chunks(record.prompt_ids, record.output_ids[:-1]),
    }
    ways |= {name: other._in_chunks(record.prompt_ids, record.output_ids[:-1]) for name, other in others.items()}
    return {name: torch.cat(list(blocks)).cpu() for name, blocks in ways.items()}


def show_moved(ways: list[dict[str, torch.Tensor]]) -> None:
    """Print by how much the margins of each two ways differ."""
    names = list(ways[0])
    for name, other in [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]:
        moved, steps = [], []
        for logits in ways:
            best = logits[other].topk(2, dim=-1)
            moved.append((logits[name] - logits[other]).gather(1, best.indices).diff(dim=1).abs().squeeze(1))
            steps.append(torch.tensor([near_tie_tolerance(torch.bfloat16, top) for top in best.values[:, 0].tolist()]))
        by, tolerance = torch.cat(moved), torch.cat(steps)
        sizes = ", ".join(f"{q:.1%} within {value:.3f}" for q, value in zip(QUANTILES, quantiles(by), strict=True))
        rms, beyond = float(by.square().mean().sqrt()), int((by >= tolerance).sum())
        print(f"{name} and {other}: rms {rms:.4f}, {sizes}; {beyond} of {by.numel()} by two steps of bfloat16 or more")


def quantiles(values: torch.Tensor) -> list[float]:
    """Return the values at `QUANTILES`."""
    ordered = values.sort().values
    return [float(ordered[round(q * (len(ordered) - 1))]) for q in QUANTILES]


def show_parted(lab: Lab, records: list[RequestRecord], ways: list[dict[str, torch.Tensor]]) -> None:
    """Print how many texts diverge from plain decoding of the request alone, and the five that diverge furthest."""
    noise = lab.teacher.margin_noise([*records[0].prompt_ids, *records[0].output_ids])
    lines = []
    for record, logits in zip(records, ways, strict=True):
        alone = logits[DECODED].argmax(dim=-1).tolist()
        at = next((i for i, (a, b) in enumerate(zip(record.output_ids, alone, strict=True)) if a != b), None)
        if at is None:
            continue
        gaps = {name: float(rows[at].max() - rows[at, record.output_ids[at]]) for name, rows in logits.items()}
        top = float(logits[DECODED][at].max())
        steps = near_tie_tolerance(lab.models.dtype, top)
        words = ", ".join(f"{name} {gap:.4f}" for name, gap in gaps.items())
        limits = f"two steps {steps:.4f}, with noise {noise_tolerance(lab.models.dtype, top, noise):.4f}"
        lines.append((gaps[DECODED] - steps, f"    {record.request_id} at {at}: under the best {words}; {limits}"))
    beyond = sum(excess >= 0 for excess, _ in lines)
    print(f"{len(lines)} of {len(records)} texts part, {beyond} beyond two steps; noise {noise:.4f}; the furthest:")
    for _, line in sorted(lines, reverse=True)[:5]:
        print(line)


if __name__ == "__main__":
    sys.exit(guarded(main))
