"""Judges outputs: right answers with their intervals, thinking, and equality with plain decoding.

The first paragraph of a function's docstring is the definition of its number (`spec_lab.record.definitions`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from statistics import NormalDist
from typing import TYPE_CHECKING

from spec_lab.record.acceptance_metrics import num_output_tokens
from spec_lab.record.averages import mean, ratio
from spec_lab.record.schema import Accuracy, AccuracyChange, Outcome, Summary, Thinking

if TYPE_CHECKING:
    from spec_lab.core.results import RequestRecord


def accuracy(correct: Iterable[bool | None], cut: Iterable[bool] = ()) -> Accuracy:
    """Share of right answers among the n requests whose answer a program can check, with its 95 % Wilson interval."""
    pairs = [(value, is_cut) for value, is_cut in zip_longest(correct, cut, fillvalue=False) if value is not None]
    if not pairs:
        return Accuracy(value=None, low=None, high=None, n=0, cut=0)
    num_right, num_cut = (sum(column) for column in zip(*pairs, strict=True))
    low, high = wilson_interval(num_right, len(pairs))
    return Accuracy(value=num_right / len(pairs), low=low, high=high, n=len(pairs), cut=num_cut)


def answers_cut(part: Outcome, summary: Summary) -> bool:
    """Number of checked outputs that ran into max_new_tokens; where all n did and the accuracy is 0, tables show `cut`
    in place of the accuracy.

    The function returns whether `cut` is shown. In records that do not count such outputs, it follows from the numbers
    of tokens. An accuracy above 0 is always shown: if the end of sequence is ignored, an answer may come long before
    the limit.

    Args:
        part: the run of `summary`, one of its categories or one of its references.
    """
    num_cut = part["accuracy"].get("cut")
    if num_cut is not None:
        return part["accuracy"]["value"] == 0 and num_cut == part["accuracy"]["n"]
    most = summary["config"].get("max_new_tokens")
    if most is None or part["accuracy"]["value"] != 0:
        return False
    if part is summary:
        checkable = [outcome for outcome in summary["by_category"].values() if outcome["accuracy"]["n"]]
        return all(_is_cut(outcome, most) for outcome in checkable or [part])
    same_texts = part["output_tokens"] == summary["output_tokens"] and part["accuracy"] == summary["accuracy"]
    return _is_cut(part, most) or (same_texts and answers_cut(summary, summary))


def _is_cut(part: Outcome, most: int) -> bool:
    return part["output_tokens"] == part["num_requests"] * most


def wilson_interval(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a proportion (Wilson 1927). It stays inside 0 to 1, and is accurate near both ends."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = successes / trials
    centre = share + z * z / (2 * trials)
    spread = z * (share * (1 - share) / trials + z * z / (4 * trials * trials)) ** 0.5
    scale = 1 + z * z / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def accuracy_change(
    correct: Mapping[str, bool | None], reference: Mapping[str, bool | None], over: str
) -> AccuracyChange | None:
    """Right answers gained less those lost against the reference named in `over`, over the n prompts checked in both.

    Answers are paired by prompt; the 95 % interval is `paired_difference_interval`. None if no prompt was checked in
    both.
    """
    pairs = [
        (answer, reference[request_id])
        for request_id, answer in correct.items()
        if answer is not None and reference.get(request_id) is not None
    ]
    if not pairs:
        return None
    lost = sum(other is True and not answer for answer, other in pairs)
    gained = sum(answer and not other for answer, other in pairs)
    low, high = paired_difference_interval(lost, gained, len(pairs))
    difference = (gained - lost) / len(pairs)
    return AccuracyChange(over=over, n=len(pairs), lost=lost, gained=gained, difference=difference, low=low, high=high)


def paired_difference_interval(lost: int, gained: int, num_pairs: int, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of a difference of paired proportions: Wald's with half a pair added to each cell (Agresti, Min 2005).

    Unlike Wald's own interval, it has a width even if no pair differs.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    lost_adjusted, gained_adjusted, total = lost + 0.5, gained + 0.5, num_pairs + 2
    change = (gained_adjusted - lost_adjusted) / total
    spread = z * (lost_adjusted + gained_adjusted - total * change * change) ** 0.5 / total
    return max(-1.0, change - spread), min(1.0, change + spread)


def thinking(requests: Sequence[RequestRecord], num_thinking_tokens: Mapping[str, int] | None) -> Thinking | None:
    """Output tokens inside thinking, the markers not counted: mean of a request, and share of all output tokens.

    Thinking that is still open when the output is cut counts up to the cut. Null if the tokenizer has no markers.
    """
    if num_thinking_tokens is None:
        return None
    counts = [num_thinking_tokens[request.request_id] for request in requests]
    return Thinking(mean_tokens=mean(counts), share=ratio(sum(counts), num_output_tokens(requests)))


def equal_share(requests: Sequence[RequestRecord], diverged: Collection[str] | None) -> float | None:
    """Share of outputs equal to plain decoding's token by token; null where the two were not compared."""
    if diverged is None:
        return None
    return ratio(sum(request.request_id not in diverged for request in requests), len(requests))
