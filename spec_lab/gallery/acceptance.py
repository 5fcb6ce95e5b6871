"""Acceptance of several drafters over the same prompts: by drafter, by category, by position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from spec_lab.core.errors import UserError
from spec_lab.gallery.studies import told_apart
from spec_lab.record.reading import read_all_request_rows
from spec_lab.record.row_schema import RequestRow
from spec_lab.record.runs import Run, load_positions
from spec_lab.record.schema import Summary
from spec_lab.record.wording import percent, with_range
from spec_lab.report.bootstrap import Interval, bootstrap_acceptance_length, bootstrap_difference
from spec_lab.report.known_options import BOUNDS

if TYPE_CHECKING:
    import pandas as pd

ALL = "all"


@dataclass(frozen=True, slots=True)
class DraftedRun:
    """The results of one drafter with K drafts in each round, by request."""

    drafter: str
    num_draft_tokens: int
    summary: Summary
    rows: list[RequestRow]

    @property
    def length(self) -> Interval | None:
        """Return the acceptance length over all prompts, with its interval; None if too few drafts were judged."""
        return bootstrap_acceptance_length(self.rows, self.num_draft_tokens)


def read_drafted(runs: Sequence[Run]) -> list[DraftedRun]:
    """Return the runs with drafts, in their order, with the names of `told_apart`.

    Raises:
        UserError: the requests of one cannot be read, there is no such run, or the runs have different prompts.
    """
    drafting = [run for run in runs if run.summary["num_draft_tokens"]]
    if not drafting:
        raise UserError("none of these runs drafts; make some with python -m spec_lab experiment=drafters")
    names = told_apart(drafting, [run.summary["choices"].get("drafter", "drafter") for run in drafting])
    found = [
        DraftedRun(
            name, run.summary["num_draft_tokens"] or 0, run.summary, read_all_request_rows(run.folder, run.summary)
        )
        for name, run in zip(names, drafting, strict=True)
    ]
    prompts = {tuple(sorted((row["id"], tuple(row["prompt_ids"])) for row in each.rows)) for each in found}
    if len(prompts) > 1:
        raise UserError(
            f"these {len(found)} runs have {len(prompts)} sets of prompts, which cannot be shown in one picture; name "
            "the folders of one set"
        )
    return found


def usual_draft_tokens(drafted: Sequence[DraftedRun]) -> int:
    """Return the K with the most runs; if there are several, the largest."""
    counts = Counter(each.num_draft_tokens for each in drafted)
    return max(counts, key=lambda k: (counts[k], k))


def at(drafted: Sequence[DraftedRun], num_draft_tokens: int) -> list[DraftedRun]:
    """Return the runs with one K, those with the longest acceptance length first.

    Raises:
        UserError: nothing ran at that K.
    """
    found = [each for each in drafted if each.num_draft_tokens == num_draft_tokens]
    if not found:
        there = sorted({each.num_draft_tokens for each in drafted})
        raise UserError(f"no run has K={num_draft_tokens}; there are {', '.join(map(str, there))}")
    return sorted(found, key=lambda each: -(each.summary["acceptance_length"] or 0.0))


def lengths(drafted: Sequence[DraftedRun]) -> pd.DataFrame:
    """Return the acceptance length with its 95 % interval, which needs several prompts. There is a row for each
    drafter, K and category with judged drafts. The category `all` stands for all prompts."""
    import pandas as pd

    columns = ["drafter", "K", "category", "requests", "acceptance_length", "low", "high"]
    frame = pd.DataFrame([row for each in drafted for row in _length_rows(each)], columns=columns)
    return frame.astype({"low": float, "high": float})


def rates(drafted: Sequence[DraftedRun]) -> pd.DataFrame:
    """Return the acceptance rate over all prompts, with a row for each drafter, K, position (from 1) and kind that has
    a rate."""
    import pandas as pd

    frames = []
    for each in drafted:
        frame = load_positions(each.summary)
        frame = frame[frame["category"] == ALL].drop(columns="category")
        frames.append(frame.assign(drafter=each.drafter, K=each.num_draft_tokens))
    return pd.concat(frames, ignore_index=True).dropna(subset="rate")


def _length_rows(each: DraftedRun) -> Iterator[tuple[object, ...]]:
    categories = sorted({row["category"] for row in each.rows})
    for category in (ALL, *categories):
        rows = [row for row in each.rows if category in (ALL, row["category"])]
        interval = bootstrap_acceptance_length(rows, each.num_draft_tokens)
        if interval is not None:
            yield each.drafter, each.num_draft_tokens, category, len(rows), interval.value, interval.low, interval.high


def conclude(drafted: Sequence[DraftedRun], num_draft_tokens: int) -> str:
    """Say which drafter has the longest acceptance, which others do not differ from it significantly, which text is
    easiest, and how acceptance changes with draft position."""
    found = [each for each in at(drafted, num_draft_tokens) if each.drafter not in BOUNDS]
    if not found or found[0].length is None:
        return f"Nothing was drafted at K = {num_draft_tokens} that could be compared."
    sentences = [_best(found), _categories(found), _positions(found[0])]
    return " ".join(sentence for sentence in sentences if sentence)


def _best(found: Sequence[DraftedRun]) -> str:
    best, *others = found
    length = best.length
    assert length is not None
    said = with_range(length.value, length.low, length.high)
    first = f"At K = {best.num_draft_tokens} **{best.drafter}** gets the most accepted: {said} tokens a round."
    if not others:
        return first
    near = [other.drafter for other in others if _is_near(best, other)]
    count = f"{len(best.rows)} prompts"
    if not near:
        return f"{first} Over {count} that is more than any other drafter gets, beyond noise."
    beaten = len(others) - len(near)
    return (
        f"{first} Over {count} the difference to {_and(near)} is within noise; "
        f"it is beyond noise to {_of_others(beaten, len(others))}."
    )


def _is_near(best: DraftedRun, other: DraftedRun) -> bool:
    """Return whether the two do not differ significantly over the prompts that both ran."""
    mine = {(row["id"], tuple(row["prompt_ids"])): row for row in best.rows}
    pairs = [(mine[key], row) for row in other.rows if (key := (row["id"], tuple(row["prompt_ids"]))) in mine]
    a, b = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    difference = bootstrap_difference(a, best.num_draft_tokens, b, other.num_draft_tokens)
    return difference is None or difference.holds_zero


class Spread(NamedTuple):
    """The smallest and the largest of some means, by name."""

    lowest: str
    low: float
    highest: str
    high: float


def _categories(found: Sequence[DraftedRun]) -> str:
    frame = lengths(found)
    inside = frame[frame["category"] != ALL]
    if inside["category"].nunique() < 2:
        return ""
    text = _spread(inside.groupby("category")["acceptance_length"].mean())
    said = (
        f"Averaged over these drafters `{text.highest}` is the easiest text ({text.high:.2f} tokens a round) and "
        f"`{text.lowest}` the hardest ({text.low:.2f})"
    )
    if len(found) < 2:
        return f"{said}."
    drafter = _spread(frame[frame["category"] == ALL].set_index("drafter")["acceptance_length"])
    by_text, by_drafter = text.high - text.low, drafter.high - drafter.low
    more = "more" if by_text > by_drafter else "less"
    return f"{said}: the text decides {more} ({by_text:.2f}) than the choice of the drafter ({by_drafter:.2f})."


def _spread(means: pd.Series) -> Spread:
    lowest, highest = str(means.idxmin()), str(means.idxmax())
    return Spread(lowest, float(means.min()), highest, float(means.max()))


def _positions(best: DraftedRun) -> str:
    by_position = best.summary["acceptance_rate_by_position"]
    plain, conditional = by_position["unconditional"], by_position["conditional"]
    if len(plain) < 2 or None in (plain[0], plain[-1], conditional[-1]):
        return ""
    first, last = conditional[0], conditional[-1]
    assert first is not None and last is not None
    how = "less" if last < first else "no less"
    return (
        f"Of {best.drafter}'s drafts the first is accepted in {percent(plain[0])} of the rounds and number "
        f"{len(plain)} in {percent(plain[-1])}. In the rounds that accept all before it, number {len(plain)} is "
        f"accepted in {percent(last)}, {how} often than the first. Only rounds on easier text get so far, so "
        "this does not say what depth alone does."
    )


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _of_others(count: int, total: int) -> str:
    if count == 0:
        return "none of the others"
    return f"all {total} others" if count == total else f"{count} of the {total} others"
