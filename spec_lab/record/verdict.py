"""The verdict: a run's results in a sentence, for readers who do not study the table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_lab.record.answers import answers_cut
from spec_lab.record.statistics import LEAST_TURNS, PairedRatio, over_reference
from spec_lab.record.wording import number, percent, with_range

if TYPE_CHECKING:
    from spec_lab.record.models import Run


def verdict(run: Run) -> str:
    """Say of a finished run what is known of its speed, acceptance, tokens and pruning, and of another how it ended."""
    if run.status != "finished":
        return f"The run is {run.status}: {run.reason or 'no reason was recorded'}."
    return "; ".join(part for part in (_speed(run), _tokens(run), _price(run), _pruning(run), *run.notes) if part) + "."


def _speed(run: Run) -> str:
    drafter = run.choices.get("drafter", "the drafter")
    if not run["rounds"]:
        subject = drafter if run.num_draft_tokens else "Plain decoding"
        return f"{subject} had no round to time: every output ended with the prompt pass's own token"
    if not run.num_draft_tokens:
        return f"Plain decoding gave {number(run['decode_tokens_per_second'], 1)} tokens/s and drafted nothing"
    speedup = over_reference(run, "plain")
    if speedup is None:
        return f"{drafter} was not timed against plain decoding, {_acceptance(run)}"
    even = run["break_even_acceptance_length"]
    pays = "" if even is None or speedup.error is None else f" (drafting pays from {number(even)})"
    return f"{_compared(drafter, speedup)}, {_acceptance(run)}{pays}"


def _compared(drafter: str, speedup: PairedRatio) -> str:
    found = speedup.interval
    measured = f"{with_range(found.value, found.low, found.high)} times as fast as plain decoding"
    if found.low is None:
        return f"{drafter} decoded {measured}{_too_few(speedup)}"
    if found.holds(1.0):
        return f"{drafter} decoded {measured} over {speedup.num_turns} turns, within noise"
    direction = "faster" if found.value > 1 else "slower"
    return f"{drafter} is {direction}: it decoded {measured} over {speedup.num_turns} turns"


def _too_few(ratio: PairedRatio) -> str:
    turns = "1 turn" if ratio.num_turns == 1 else f"{ratio.num_turns} turns"
    return f", with no interval from {turns} (repeats={LEAST_TURNS} or more give one)"


def _acceptance(run: Run) -> str:
    length = run["acceptance_length"]
    if length is None:
        return "with too few rounds to take an acceptance length from"
    imposed = " that was imposed, not measured" if run.acceptance_imposed else ""
    return f"with an acceptance length of {number(length)} of {(run.num_draft_tokens or 0) + 1}{imposed}"


def _tokens(run: Run) -> str:
    if not run.num_draft_tokens or run.acceptance_lossless is False:
        return ""
    compared, diverged = run["divergence.requests"], run["divergence.diverged"]
    if compared is None:
        text = "its tokens were not compared with plain decoding"
    elif run["divergence.bugs"]:
        text = f"NOT the same tokens as plain decoding in {run['divergence.bugs']} of {compared} requests: a bug"
    elif diverged:
        text = (
            f"the same tokens as plain decoding but for {diverged} of {compared} requests, which diverge at a near-tie "
            "of the target's own logits"
        )
    else:
        text = f"the same tokens as plain decoding in all {compared} requests"
    return text + (", though the repeats differ from each other" if run["repeats_identical"] is False else "")


def _price(run: Run) -> str:
    """Describe the effect of a lossy rule on the text and on the answers."""
    if run.acceptance_lossless is not False:
        return ""
    rule = run.choices.get("acceptance", "the acceptance rule")
    if run.acceptance_imposed:
        return f"acceptance={rule} is lossy and imposed: its text comes from neither model, so answers are not counted"
    equal = run["equal_to_plain"]
    same = "were not compared with plain decoding" if equal is None else f"are plain decoding's in {percent(equal)}"
    text = f"acceptance={rule} is lossy: its outputs {same}"
    if run["accuracy"] is None:
        return f"{text}, and no answer could be checked"
    if answers_cut(run.metrics):
        return f"{text}, but all checked outputs were cut before an answer; raise max_new_tokens"
    low, high = percent(run["accuracy.low"]), percent(run["accuracy.high"])
    answers = f"accuracy {percent(run['accuracy'])} ({low} to {high})"
    if run["accuracy_change"] is None:
        return f"{text}, {answers}"
    lost, gained, count = (run[f"accuracy_change.{key}"] for key in ("lost", "gained", "n"))
    return f"{text}, {answers}; beside plain decoding {lost} answers lost and {gained} gained of {count}"


def _pruning(run: Run) -> str:
    unpruned, ratio = run.references.get("unpruned"), over_reference(run, "unpruned")
    if unpruned is None:
        return ""
    rows = (
        f"{run['rows.catchup_mlp']:,} of {unpruned['rows.catchup_mlp']:,} catch-up rows reached the MLP and "
        f"{run['rows.prefill_logits']:,} of {unpruned['rows.prefill_logits']:,} prompt rows the logits"
    )
    if ratio is None:
        return f"pruning had no round to change: {rows}"
    found = ratio.interval
    value = f"{100 * (found.value - 1):+.1f} %"
    if found.low is None or found.high is None:
        return f"pruning changed the decode rate by {value}{_too_few(ratio)}: {rows}"
    ends = f"{100 * (found.low - 1):+.1f} to {100 * (found.high - 1):+.1f} %"
    noise = "within" if found.holds(1.0) else "beyond"
    return f"pruning changed the decode rate by {value} ({ends}), {noise} noise: {rows}"
