"""Shows the acceptance length of short outputs, by four ways of counting the rounds that are cut short.

    python benchmarks/acceptance_length_bias.py                     # about a minute

The shipped target and drafter decode the prompts once for each K. The same rounds are then cut as a smaller
max_new_tokens would have cut them. Nothing is timed. The table compares the ways with each other.
tests/test_acceptance_length.py shows that the first way is not biased, on simulated rounds whose true length is known.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from spec_lab.core.results import RequestRecord
from spec_lab.measure.lab import MAIN, load_lab
from spec_lab.menu.chosen import choose
from spec_lab.program.compose import compose_run
from spec_lab.program.ending import guarded
from spec_lab.program.table import format_table
from spec_lab.record import acceptance_metrics
from spec_lab.record.wording import number, percent

Way = Callable[[Sequence[RequestRecord], int], float | None]


def main() -> None:
    """Print the acceptance lengths of each definition, by K and limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafter", default="eagle3")
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[3, 5], metavar="K")
    parser.add_argument("--limits", type=int, nargs="+", default=[16, 64, 160, 256], metavar="TOKENS")
    parser.add_argument("--prompts", type=int, default=72)
    options = parser.parse_args()
    body = []
    for num_draft_tokens in options.draft_tokens:
        records = decode(options.drafter, num_draft_tokens, options.prompts, max(options.limits))
        print(describe_behind_the_end(records, num_draft_tokens))
        for limit in sorted(options.limits):
            shown = [cut(record, limit) for record in records]
            lengths = [number(way(shown, num_draft_tokens), 3) for way in WAYS.values()]
            body.append([str(num_draft_tokens), str(limit), *count_cuts(shown), *lengths])
    print(format_table(["K", "max_new_tokens", "rounds", "cut by it", "by EOS", *WAYS], body, left=()))


def decode(drafter: str, num_draft_tokens: int, num_prompts: int, max_new_tokens: int) -> list[RequestRecord]:
    """Decode shipped prompts once, to the largest limit. The outputs for smaller limits are cut from these."""
    config, _ = compose_run(
        [
            f"drafter={drafter}",
            f"drafter.num_draft_tokens={num_draft_tokens}",
            f"workload.limit={num_prompts}",
            f"max_new_tokens={max_new_tokens}",
            "batch_size=8",
            "references=[]",
        ]
    )
    lab = load_lab(choose(config))
    return lab.engines[MAIN].generate(lab.requests).requests


def cut(record: RequestRecord, limit: int) -> RequestRecord:
    """Return the rounds of `record` as a limit of `limit` output tokens, the prompt pass's included, would have cut
    them."""
    before = list(accumulate(record.emitted_per_round, initial=1))
    num_rounds = sum(length < limit for length in before[: len(record.emitted_per_round)])
    emitted = record.emitted_per_round[:num_rounds]
    if emitted:
        emitted[-1] = min(emitted[-1], limit - before[num_rounds - 1])
    return replace(
        record,
        offered_per_round=record.offered_per_round[:num_rounds],
        accepted_per_round=record.accepted_per_round[:num_rounds],
        judged_per_round=record.judged_per_round[:num_rounds],
        emitted_per_round=emitted,
        truncated=bool(emitted) and emitted[-1] < record.accepted_per_round[num_rounds - 1] + 1,
    )


def without_cut_rounds(records: Sequence[RequestRecord], num_draft_tokens: int) -> float | None:
    """Return the definition of schema versions 1 and 2."""
    lengths = [m + 1 for r in records for m in (r.accepted_per_round[:-1] if r.truncated else r.accepted_per_round)]
    return sum(lengths) / len(lengths) if lengths else None


def as_judged(records: Sequence[RequestRecord], num_draft_tokens: int) -> float | None:
    """Return vLLM's mean acceptance length."""
    lengths = [m + 1 for record in records for m in record.accepted_per_round]
    return sum(lengths) / len(lengths) if lengths else None


def as_emitted(records: Sequence[RequestRecord], num_draft_tokens: int) -> float | None:
    """Return the mean tokens that a round emitted, after any cut."""
    return acceptance_metrics.acceptance_length_all(records)


WAYS: dict[str, Way] = {
    "acceptance length": acceptance_metrics.acceptance_length,
    "cut rounds left out": without_cut_rounds,
    "as emitted": as_emitted,
    "as judged (vLLM)": as_judged,
}


def count_cuts(records: Sequence[RequestRecord]) -> list[str]:
    """Count rounds, those cut by the limit alone, and those that an end of sequence cut."""
    ended = [record for record in records if record.accepted_per_round and has_end_inside(record)]
    by_limit = sum(record.truncated for record in records) - sum(record.truncated for record in ended)
    return [str(acceptance_metrics.num_request_rounds(records)), str(by_limit), str(len(ended))]


def has_end_inside(record: RequestRecord) -> bool:
    """Return whether an end of sequence is among the drafts that the last round accepted."""
    return record.judged_per_round[-1] < record.accepted_per_round[-1] + 1


def describe_behind_the_end(records: Sequence[RequestRecord], num_draft_tokens: int) -> str:
    """Say how many drafts after an end of sequence the rule accepted, and what share of all other drafts."""
    ended = [record for record in records if record.accepted_per_round and has_end_inside(record)]
    rounds = [(record.accepted_per_round[-1], record.judged_per_round[-1]) for record in ended]
    reached = sum(min(accepted + 1, num_draft_tokens) - judged for accepted, judged in rounds)
    accepted = sum(accepted - judged for accepted, judged in rounds)
    counts = acceptance_metrics.draft_counts(records, num_draft_tokens)
    return (
        f"K={num_draft_tokens}: of {reached} drafts behind an end of sequence {accepted} were accepted, of the others "
        f"that were reached {percent(sum(counts.accepted) / sum(counts.reached))}"
    )


if __name__ == "__main__":
    sys.exit(guarded(main))
