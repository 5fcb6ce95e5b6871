"""Judges outputs: right answers with their intervals, thinking, and equality with plain decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spec_lab.record.acceptance import num_output_tokens
from spec_lab.record.metric import Measured, median_of, metric, ratio
from spec_lab.record.statistics import paired_difference_interval, wilson_interval

if TYPE_CHECKING:
    from spec_lab.record.models import Divergence, Request

CUT_BY_LIMIT = "length"


@metric("accuracy", "share", per="requests")
def accuracy(measured: Measured) -> dict[str, Any]:
    """Share of right answers among the n requests whose answer a program can check, with its 95 % Wilson interval; cut
    of the n outputs ran into max_new_tokens."""
    checked = [request for request in measured.requests if request.correct is not None]
    num_right = sum(request.correct is True for request in checked)
    low, high = wilson_interval(num_right, len(checked)) if checked else (None, None)
    num_cut = sum(request.finish_reason == CUT_BY_LIMIT for request in checked)
    return {"value": ratio(num_right, len(checked)), "low": low, "high": high, "n": len(checked), "cut": num_cut}


def answers_cut(numbers: Mapping[str, Any]) -> bool:
    """Return whether tables show `cut` in place of an accuracy of 0, since all checked outputs ran into
    max_new_tokens."""
    return numbers.get("accuracy") == 0 and numbers.get("accuracy.cut") == numbers.get("accuracy.n")


@metric("accuracy_change", "share")
def accuracy_change_over_plain(measured: Measured) -> dict[str, Any] | None:
    """Right answers gained less those lost against plain decoding, over the n prompts checked in both; the 95 %
    interval is that of a difference of paired proportions."""
    plain = measured.references.get("plain")
    return None if plain is None else accuracy_change(measured.requests, plain.requests)


def accuracy_change(requests: Sequence[Request], others: Sequence[Request]) -> dict[str, Any] | None:
    """Compare the answers of two runs, paired by prompt; None if no prompt was checked in both."""
    by_id = {other.id: other.correct for other in others}
    pairs = [(request.correct, by_id.get(request.id)) for request in requests]
    changes = [mine - other for mine, other in pairs if mine is not None and other is not None]
    if not changes:
        return None
    lost, gained, count = changes.count(-1), changes.count(1), len(changes)
    low, high = paired_difference_interval(lost, gained, count)
    return {"value": (gained - lost) / count, "low": low, "high": high, "lost": lost, "gained": gained, "n": count}


@metric("thinking", per="requests")
def thinking(measured: Measured) -> dict[str, float | None] | None:
    """Output tokens inside thinking, the markers not counted: mean of a request, and share of all output tokens.
    Thinking that is still open when the output is cut counts up to the cut. Null if the tokenizer has no markers."""
    spans = [request.thinking_spans for request in measured.requests]
    if not spans or None in spans:
        return None
    total = sum(high - low for of_request in spans for low, high in of_request or ())
    return {"mean_tokens": total / len(spans), "share": ratio(total, num_output_tokens(measured))}


@metric("equal_to_plain", "share", per="requests")
def equal_share(measured: Measured) -> float | None:
    """Share of outputs equal to plain decoding's token by token; null where the two were not compared."""
    return _equal([r.divergence for r in measured.requests]) if measured.is_compared else None


@metric("equal_to_lab", "share", per="requests")
def equal_to_lab(measured: Measured) -> float | None:
    """Share of another engine's outputs that are the lab's plain decoding, token by token; null for the lab's own, and
    where they were not compared."""
    return _equal([r.lab_divergence for r in measured.requests]) if measured.beside_lab else None


def _equal(divergences: Sequence[Divergence | None]) -> float | None:
    return ratio(divergences.count(None), len(divergences))


@metric("divergence")
def divergence(measured: Measured) -> dict[str, Any] | None:
    """Requests compared with plain decoding token by token, how many differ, and how. near_ties: first different at a
    token whose logit lies as near to plain decoding's best as rounding in the run's dtype reaches: 1e-4 in float32; in
    16-bit types two steps of that logit, or six times what the number of rows moves the target's margins by, up to 16
    steps. bugs: first different where they are not, under a rule that must be lossless. lossy: under a rule that may.
    median_index: of the first token that differs; median_margin: of plain decoding's own top-2 logit difference there.
    """
    return _divergences([r.divergence for r in measured.requests]) if measured.is_compared else None


@metric("lab_divergence")
def lab_divergence(measured: Measured) -> dict[str, Any] | None:
    """What `divergence` counts, of another engine's outputs beside the lab's plain decoding; margins are of the lab's
    logits. Null for the lab's own outputs, and where they were not compared."""
    return _divergences([r.lab_divergence for r in measured.requests]) if measured.beside_lab else None


def _divergences(of_requests: Sequence[Divergence | None]) -> dict[str, Any]:
    found = [each for each in of_requests if each is not None]
    kinds = [each.kind for each in found]
    return {
        "requests": len(of_requests),
        "diverged": len(found),
        "near_ties": kinds.count("near_tie"),
        "bugs": kinds.count("bug"),
        "lossy": kinds.count("lossy"),
        "median_index": median_of(each.index for each in found),
        "median_margin": median_of(each.margin for each in found),
    }
