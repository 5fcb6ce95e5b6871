"""Writes the card of a drafter for a target such as hf from records; no figure is typed in by hand."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spec_lab.train.checkpoint import num_weight_bytes
from spec_lab.train.drafter import DrafterDescription
from spec_lab.train.module_config import moved_by

MAX_CURVE_ROWS = 10


def head_card(
    output: Path, target: str, description: DrafterDescription, record: Mapping[str, Any], evaluation: Mapping[str, Any]
) -> str:
    """Return the README.md of the drafter in `output`, from its record and from what was measured by category."""
    truth, knobs = record["truth"], record["recipe"]["optimisation"]
    kind = description.kind[0].upper() + description.kind[1:]
    texts, proof = record["texts"], record["proof"]["after"]
    rounded = record["proof"].get("in_bfloat16")
    in_16_bits = (
        ""
        if rounded is None
        else f"Served in bfloat16, the drafter's logits differ from the training forward's by {rounded:.3f} of their "
        "variation."
    )
    rounds = ", ".join(f"{difference:.1e}" for difference in proof["differences"])
    return reflow(f"""# {output.name}: a drafter for {target}

{kind} of {record["num_parameters"] / 1e6:.2f} M parameters in bf16
({num_weight_bytes(output) / 1e6:.1f} MB). {description.reading}

## Training
On {record["num_texts"]:,} texts with {texts["written_tokens"]:,} tokens that the target wrote ({texts["settings"]}),
{description.loss}. Loss: {record["recipe"]["loss"]}. {record["num_steps"]:,} steps of {knobs["batch_size"]} rows of
{record["recipe"]["row_length"]} tokens, {moved_by(knobs)}, learning rate {knobs["peak_learning_rate"]:g}.
{record["seconds"]:.0f} s on {_devices(record)} with torch {record["torch"]}, including real decoding and proofs. The
weights are those of step {truth["best_step"]}, which had the largest acceptance length in decoding.

{_curve(record["curve"])}

## Proof
The training forward and the runtime's draft step, on a CPU in float32 from these files, differ by {rounds} in logits at
positions 1 to {len(proof["differences"])}; the largest logit is {proof["largest_logit"]:.1f}. Their drafts are equal.
With the oracle as the drafter, every draft is accepted. {in_16_bits}

## Acceptance length
Tokens a round, greedy, K={len(proof["differences"])}, after {truth["points"][-1]["decoded"]["requests"]} held-out
prompts of the training's texts, decoded by the lab's engine. The interval is a 95 % bootstrap interval over prompts. By
position: the share of drafts that are accepted, among those whose earlier drafts are all accepted. Teacher-forced
figures are estimated on held-out texts, without decoding.

{_lengths(truth)}
{_by_category(evaluation, output)}
""")


def _devices(record: Mapping[str, Any]) -> str:
    """Name the device, and the number of processes if there were several. Older records name no number; it was one."""
    number = record.get("num_processes", 1)
    return str(record["device"]) if number == 1 else f"{number} x {record['device']}"


def _curve(points: list[Mapping[str, Any]]) -> str:
    stride = -(-len(points) // MAX_CURVE_ROWS) or 1
    rows = [f"| {point['step']} | {point['loss']:.3f} |" for point in points[stride - 1 :: stride]]
    return "\n".join(["| step | training loss |", "|---|---|", *rows])


def _lengths(truth: Mapping[str, Any]) -> str:
    stride = -(-len(truth["points"]) // MAX_CURVE_ROWS)
    points = [
        point for index, point in enumerate(truth["points"]) if (index + 1) % stride == 0 or _is_best(truth, point)
    ]
    rows = [_row(name, line) for name, line in truth["lines"].items()]
    for point in points:
        reckoned = f"{point['teacher_forced']['acceptance_length']:.3f}"
        rows.append(_row(f"step {point['step']}", point["decoded"], reckoned))
    return "\n".join(["| | decoded | interval | by position | teacher-forced |", "|---|---|---|---|---|", *rows])


def _is_best(truth: Mapping[str, Any], point: Mapping[str, Any]) -> bool:
    return bool(point["step"] == truth["best_step"])


def _row(name: str, figures: Mapping[str, Any], reckoned: str = "") -> str:
    return f"| {name} | {_cells(figures)} | {reckoned} |"


def _cells(figures: Mapping[str, Any]) -> str:
    length, interval = figures["acceptance_length"], figures["interval"]
    shown = "-" if length is None else f"{length:.3f}"
    between = "-" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}"
    rates = " ".join("-" if rate is None else f"{rate:.2f}" for rate in figures["conditional_rates"])
    return f"{shown} | {between} | {rates}"


def _by_category(evaluation: Mapping[str, Any], output: Path) -> str:
    if not evaluation:
        return ""
    rows = "\n".join(_category_rows(evaluation))
    return f"""
## By category
The first turns of questions of {", ".join(evaluation["files"])}, on which nothing was trained, decoded likewise.

| category | drafter | decoded | interval | by position |
|---|---|---|---|---|
{rows}"""


def _category_rows(evaluation: Mapping[str, Any]) -> Iterator[str]:
    drafters = [name for name in evaluation if name not in ("files", "unread")]
    for category in [*evaluation[drafters[0]]["by_category"], "all"]:
        for name in drafters:
            figures = evaluation[name] if category == "all" else evaluation[name]["by_category"][category]
            yield f"| {category} | {name} | {_cells(figures)} |"


def reflow(card: str) -> str:
    """Wrap paragraphs and list items to the width of this project's files, after figures are inserted."""
    blocks = []
    for block in card.strip().split("\n\n"):
        heading, newline, rest = block.partition("\n") if block.startswith("#") else ("", "", block)
        if not rest.startswith(("|", "    ")):
            items = [" ".join(item.split()) for item in f"\n{rest}".split("\n- ")]
            lines = [textwrap.fill(items[0], 120)] if items[0] else []
            lines += [textwrap.fill(f"- {item}", 120, subsequent_indent="  ") for item in items[1:]]
            rest = "\n".join(lines)
        blocks.append(heading + newline + rest)
    return "\n\n".join(blocks) + "\n"
