"""One table of runs on several engines: the common length, the three checks of tokens, and each engine's own number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from spec_lab.record.acceptance import common_counts
from spec_lab.record.reading import Found
from spec_lab.record.statistics import Interval, bootstrapped, lengths
from spec_lab.study.frame import ends, frame, own, varied
from spec_lab.study.run_table import LAB
from spec_lab.study.tables import Table, table_of

SAME = ("target", "drafter", "acceptance", "sampling", "tree", "workload")
"""Groups in which a run is the lab's twin."""
NOTE = (
    "common length: 1 + accepted drafts / rounds that offered one, as judged, pooled; 95 % bootstrap over prompts. "
    "to the lab's: less that of the lab's run of the same options, resampled together. lab's length: by the lab's own "
    "definition. = own plain, = lab's plain: share of outputs with the tokens of plain decoding by the same engine, "
    "and by the lab. margin: median distance of the lab's two best logits where they part from the lab's."
)


def has_other_engines(runs: Sequence[Found]) -> bool:
    """Return whether some run was decoded by another engine."""
    return any(found.run.engine != LAB for found in runs)


def engines_table(runs: Sequence[Found]) -> Table:
    """Return a line for each finished run, each beside the lab's run of the same options."""
    finished = [found for found in runs if found.run.status == "finished"]
    if not finished:
        return table_of(pd.DataFrame(), {})
    frames = own(frame(finished))
    told = [name for name in frames if name.startswith("told.") and frames[name].notna().any()]
    lines = []
    for row, found in zip(frames.to_dict("records"), finished, strict=True):
        line = {**row, "version": found.run.engine_version}
        if found.run.engine != LAB and (twin := _twin(found, finished)) is not None:
            line |= ends("to_lab", common_difference(found, twin))
        own_numbers = (f"{name.removeprefix('told.')} {row[name]:.3f}" for name in told if pd.notna(row[name]))
        margin = found.run["lab_divergence.median_margin"]
        line["margin"] = None if margin is None else f"{margin:.1e}"
        lines.append(line | {"its_own": ", ".join(own_numbers) or None})
    shown = ("engine", "drafter", "drafter.num_draft_tokens")
    differing = (varied(part) for _, part in frames.groupby("engine"))  # what auto became differs between engines
    knobs = {name: name for names in differing for name in names if name not in shown}
    most = int(max((found.run.num_draft_tokens or 0) for found in finished))
    columns = {
        "engine": "engine",
        "version": "version",
        "drafter": "drafter",
        "K": "K",
        **knobs,
        "common length": "common_length",
        "to the lab's": "to_lab",
        "lab's length": "acceptance_length",
        **{f"@{place}": f"common_rate_by_position.{place}" for place in range(1, most + 1)},
        "its own number": "its_own",
        "decode tok/s": "decode_tokens_per_second",
        "over its plain": "speedup.mean",
        "TTFT, ms": "latency_ms.ttft.p50",
        "TPOT, ms": "latency_ms.tpot.p50",
        "= own plain": "equal_to_plain",
        "= lab's plain": "equal_to_lab",
        "margin": "margin",
    }
    return table_of(pd.DataFrame(lines), columns, "Engines", NOTE)


def common_difference(mine: Found, base: Found) -> Interval | None:
    """Return a run's common length less that of a base run; without an interval if their prompts differ, or if one
    tells totals alone."""
    told = mine.run["common_length"], base.run["common_length"]
    if None in told:
        return None
    alone = Interval(told[0] - told[1], None, None)
    theirs = {request.id: request for request in base.requests}
    pairs = [(request, theirs[request.id]) for request in mine.requests if request.id in theirs]
    if len(pairs) != base.run["num_requests"] or any(a.prompt_ids != b.prompt_ids for a, b in pairs):
        return alone
    a, b = (
        common_counts([pair[side] for pair in pairs], found.run.num_draft_tokens or 0)
        for side, found in enumerate((mine, base))
    )
    found = bootstrapped(lambda picks: lengths(a[picks]) - lengths(b[picks]), len(pairs))
    return alone if found.low is None else found


def _twin(mine: Found, runs: Sequence[Found]) -> Found | None:
    """Return the lab's run of the same options and K."""

    def key(found: Found) -> tuple[Any, ...]:
        choices: Mapping[str, str] = found.run.choices
        return *(choices.get(group) for group in SAME), found.run.num_draft_tokens, found.run.target.dtype

    return next((found for found in runs if found.run.engine == LAB and key(found) == key(mine)), None)
