"""The cost model: a round's cost, the acceptance length from which drafting pays, and the speedup it predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spec_lab.record.paired import PairedRatio, over_reference
from spec_lab.record.time_metrics import draft_ms, in_plain_steps
from spec_lab.record.wording import ABSENT, number
from spec_lab.report.cells import ratio_cell
from spec_lab.report.comparable import NumberedRun
from spec_lab.report.frame import predicted_speedup
from spec_lab.report.known_options import ORACLE
from spec_lab.report.table import format_table, paragraph

TITLE = "What a round costs, in steps of plain decoding"
NOTE = """\
draft, verify, rest: the stages of a round for each request, in steps of plain decoding. rest is accept, commit,
readback, and the host's time between stages; if one graph is the whole round, rest is the whole round. They add up to
break-even, the acceptance length from which drafting pays. predicted: length / break-even. off: measured / predicted -
1; tokens that are cut off a round lower measured, but not predicted. oracle's: the acceptance length of drafts that are
always right, which is measured if an oracle ran at this K (marked m), else K + 1. its speedup: the speedup with this
acceptance length and this drafter's cost."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a request round of one run, where 1 is the time of a plain decoding step for one request.

    Attributes:
        draft: the drafter's stages; None if they could not be timed separately.
        verify: the target's forward; None likewise.
        break_even: the whole round, which equals the break-even acceptance length.
        oracle_length: acceptance length of drafts that are always correct.
        oracle_was_run: whether `oracle_length` was measured.
    """

    run: NumberedRun
    draft: float | None
    verify: float | None
    break_even: float
    length: float | None
    measured: PairedRatio | None
    oracle_length: float
    oracle_was_run: bool

    @property
    def rest(self) -> float:
        """Return the rest of the cost. A part that could not be timed separately is in it."""
        return self.break_even - (self.draft or 0.0) - (self.verify or 0.0)

    @property
    def predicted(self) -> float | None:
        """Return the expected speedup of the decode rate."""
        return predicted_speedup(self.run.run.summary)

    @property
    def off(self) -> float | None:
        """Return measured over predicted speedup, minus 1."""
        return self.measured.value / self.predicted - 1 if self.measured is not None and self.predicted else None

    @property
    def oracle_speedup(self) -> float:
        """Return the speedup at the oracle's acceptance length and this drafter's cost."""
        return self.oracle_length / self.break_even


def read_costs(runs: Sequence[NumberedRun]) -> list[Cost]:
    """Return the costs of every finished run that drafted and has a plain decoding reference."""
    oracles = {
        run.run.summary["num_draft_tokens"]: length
        for run in runs
        if run.run.summary["choices"].get("drafter") == ORACLE
        and (length := run.run.summary["acceptance_length"]) is not None
    }
    return [cost for run in runs if (cost := _cost(run, oracles)) is not None]


def format_costs(costs: Sequence[Cost]) -> str:
    """Write the title, the table and the meanings of its columns."""
    header, body = cost_cells(costs)
    table = format_table(header, body, ("#", "drafter"))
    return "\n\n".join([TITLE, table, paragraph(NOTE)])


def cost_cells(costs: Sequence[Cost]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the cells, one row for each run."""
    header = [
        "#", "drafter", "K", "draft", "verify", "rest", "break-even", "length", "predicted", "measured", "off",
        "oracle's", "its speedup",
    ]  # fmt: skip
    body = [
        [
            cost.run.label,
            cost.run.run.summary["choices"].get("drafter", ABSENT),
            str(cost.run.run.summary["num_draft_tokens"]),
            number(cost.draft),
            number(cost.verify),
            number(cost.rest),
            number(cost.break_even),
            number(cost.length) + ("*" if cost.run.run.summary["acceptance_imposed"] else ""),
            number(cost.predicted),
            ratio_cell(cost.measured),
            ABSENT if cost.off is None else f"{100 * cost.off:+.1f}%",
            number(cost.oracle_length) + ("m" if cost.oracle_was_run else ""),
            number(cost.oracle_speedup),
        ]
        for cost in costs
    ]
    return header, body


def _cost(run: NumberedRun, oracles: dict[int | None, float]) -> Cost | None:
    summary = run.run.summary
    num_draft_tokens, break_even = summary["num_draft_tokens"], summary["break_even_acceptance_length"]
    if summary["status"] != "finished" or not num_draft_tokens or not break_even:
        return None
    return Cost(
        run,
        in_plain_steps(summary, draft_ms(summary)),
        in_plain_steps(summary, summary["stage_ms_per_round"].get("verify")),
        break_even,
        summary["acceptance_length"],
        over_reference(summary, summary, "plain"),
        oracles.get(num_draft_tokens, num_draft_tokens + 1.0),
        num_draft_tokens in oracles,
    )
