"""The verdict: a summary of a run's results in a sentence, for readers who do not study the table."""

from __future__ import annotations

from spec_lab.record.answer_metrics import answers_cut
from spec_lab.record.paired import LEAST_TURNS, PairedRatio, over_reference
from spec_lab.record.schema import Accuracy, Rows, Summary
from spec_lab.record.time_metrics import draft_ms, in_plain_steps
from spec_lab.record.wording import number, percent, with_range

NO_PLAIN = "plain is not among the references"
MOSTLY_FIXED = 0.75
"""If at least this share of a plain step's time does not grow with rows, the step is called mostly fixed cost."""


def verdict(summary: Summary) -> str:
    """Say of a finished run what is known of its speedup, acceptance length, tokens, pruning and fixed costs, and of
    another run how it ended."""
    if summary["status"] != "finished":
        return f"The run is {summary['status']}: {summary['reason'] or 'no reason was recorded'}."
    parts = [_speed(summary), _tokens(summary), _price(summary), _pruning(summary), _shared(summary), _caveat(summary)]
    return "; ".join(part for part in parts if part) + "."


def _speed(summary: Summary) -> str:
    drafter = summary["choices"].get("drafter", "the drafter")
    if not summary["rounds"]:
        subject = drafter if summary["num_draft_tokens"] else "Plain decoding"
        return f"{subject} had no round to time: every output ended with the prompt pass's own token"
    if not summary["num_draft_tokens"]:
        return f"Plain decoding gave {number(summary['decode_tokens_per_second'], 1)} tokens/s and drafted nothing"
    speedup = over_reference(summary, summary, "plain")
    if speedup is None:
        return f"{drafter} was not timed against plain decoding ({_why_not_timed(summary)}), {_acceptance(summary)}"
    return f"{_speedup(drafter, speedup)}, {_acceptance(summary)}{_break_even(summary, speedup)}"


def _why_not_timed(summary: Summary) -> str:
    return "which had no round itself" if "plain" in summary["references"] else NO_PLAIN


def _speedup(drafter: str, speedup: PairedRatio) -> str:
    measured = f"{with_range(speedup.value, *speedup.ends)} times as fast as plain decoding"
    if not speedup.is_judged:
        return f"{drafter} decoded {measured}{_too_few(speedup)}"
    if speedup.is_noise:
        return f"{drafter} decoded {measured} over {speedup.num_turns} turns, within noise"
    direction = "faster" if speedup.is_above else "slower"
    return f"{drafter} is {direction}: it decoded {measured} over {speedup.num_turns} turns"


def _too_few(ratio: PairedRatio) -> str:
    turns = "1 turn" if ratio.num_turns == 1 else f"{ratio.num_turns} turns"
    return f", with no interval from {turns} (repeats={LEAST_TURNS} or more give one)"


def _break_even(summary: Summary, speedup: PairedRatio) -> str:
    """Say from which acceptance length drafting pays. Nothing is said if the speedup has no interval."""
    length = summary["break_even_acceptance_length"]
    return f" (drafting pays from {number(length)})" if length is not None and speedup.is_judged else ""


def _acceptance(summary: Summary) -> str:
    num_tokens = (summary["num_draft_tokens"] or 0) + 1
    if summary["acceptance_length"] is None:
        return "with too few rounds to take an acceptance length from"
    imposed = " that was imposed, not measured" if summary["acceptance_imposed"] else ""
    return f"with an acceptance length of {number(summary['acceptance_length'])} of {num_tokens}{imposed}"


def _tokens(summary: Summary) -> str:
    counts = summary["divergence"]
    if not summary["num_draft_tokens"] or _is_lossy(summary):
        return ""
    if counts is None:
        text = "its tokens were not compared with plain decoding"
    elif counts["bugs"]:
        text = f"NOT the same tokens as plain decoding in {counts['bugs']} of {counts['requests']} requests: a bug"
    elif counts["diverged"] > counts["near_ties"]:
        text = f"other tokens than plain decoding in {counts['diverged']} of {counts['requests']} requests"
    elif counts["near_ties"]:
        text = (
            f"the same tokens as plain decoding but for {counts['near_ties']} of {counts['requests']} requests, "
            "which diverge at a near-tie of the target's own logits"
        )
    else:
        text = f"the same tokens as plain decoding in all {counts['requests']} requests"
    if summary["repeats_identical"] is False:
        text += ", though the repeats differ from each other"
    return text


def _is_lossy(summary: Summary) -> bool:
    return summary["acceptance_lossless"] is False


def _price(summary: Summary) -> str:
    """Describe the effect of a lossy rule on the text and on the answers."""
    if not _is_lossy(summary):
        return ""
    rule = summary["choices"].get("acceptance", "the acceptance rule")
    if summary["acceptance_imposed"]:
        return f"acceptance={rule} is lossy and imposed: its text comes from neither model, so answers are not counted"
    text = f"acceptance={rule} is lossy: {_equal(summary)}"
    if summary["accuracy"]["value"] is None:
        return f"{text}, and no answer could be checked"
    if answers_cut(summary, summary):
        return f"{text}, but all checked outputs were cut before an answer; raise max_new_tokens"
    return f"{text}, accuracy {_accuracy(summary['accuracy'])} {_beside_plain(summary)}"


def _equal(summary: Summary) -> str:
    counts, share = summary["divergence"], summary["equal_to_plain"]
    if counts is None or share is None:
        return "its outputs were not compared with plain decoding"
    num_equal = counts["requests"] - counts["diverged"]
    return f"{percent(share)} of the outputs are plain decoding's ({num_equal} of {counts['requests']})"


def _beside_plain(summary: Summary) -> str:
    change, plain = summary["accuracy_change"], summary["references"].get("plain")
    if plain is None:
        return f"with no plain decoding beside it ({NO_PLAIN})"
    if change is None:
        return "with no answer that was checked in plain decoding too"
    return (
        f"beside plain decoding's {_accuracy(plain['accuracy'])}, prompt by prompt {change['lost']} answers lost and "
        f"{change['gained']} gained of {change['n']}"
    )


def _accuracy(accuracy: Accuracy) -> str:
    low, high = percent(accuracy["low"]), percent(accuracy["high"])
    return f"{percent(accuracy['value'])} ({low} to {high})"


def _pruning(summary: Summary) -> str:
    if "unpruned" not in summary["references"]:
        return ""
    ratio = over_reference(summary, summary, "unpruned")
    if ratio is None:
        return f"pruning had no round to change and {_saved_rows(summary)}"
    return f"pruning changed the decode rate by {_change(ratio)}, and {_saved_rows(summary)}"


def _change(ratio: PairedRatio) -> str:
    value = f"{_percent_change(ratio.value)} %"
    if ratio.interval is None:
        return f"{value}{_too_few(ratio)}"
    low, high = map(_percent_change, ratio.interval)
    return f"{value} ({low} to {high} %), {'within' if ratio.is_noise else 'beyond'} noise"


def _percent_change(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f}"


def _saved_rows(summary: Summary) -> str:
    rows, all_rows = summary["rows"], summary["references"]["unpruned"]["rows"]
    return (
        f"computed {rows['catchup_computed']:,} of {all_rows['catchup_computed']:,} catch-up rows "
        f"and {rows['prefill_logits']:,} of {all_rows['prefill_logits']:,} rows of prompt logits"
        f"{_shared_rows(rows, all_rows)}{_experts_read(summary)}{_prompt_pass(summary)}"
    )


def _experts_read(summary: Summary) -> str:
    """Say how many distinct experts the catch-up step read in a round, if its layer has experts."""
    read, unpruned = summary.get("experts_read"), summary["references"]["unpruned"].get("experts_read")
    if not read or not unpruned or unpruned["catchup"] == 0:
        return ""
    return f", and read {read['catchup']:.1f} experts a catch-up where unpruned read {unpruned['catchup']:.1f}"


def _shared_rows(rows: Rows, all_rows: Rows) -> str:
    """Say how many prompt rows entered the layers that only read KV, if there are such layers."""
    unpruned = all_rows.get("prefill_shared", 0)
    return (
        f", {rows.get('prefill_shared', 0):,} of {unpruned:,} prompt rows in layers that share KV" if unpruned else ""
    )


def _prompt_pass(summary: Summary) -> str:
    """Say what `prune.prefill` saves, which does not affect the decode rate."""
    pruned, unpruned = (speed["prefill_ms_per_request"] for speed in (summary, summary["references"]["unpruned"]))
    if pruned is None or unpruned is None:
        return ""
    return f" (prompt pass {number(pruned, 1)} ms a request, unpruned {number(unpruned, 1)})"


def _shared(summary: Summary) -> str:
    """Say that the run's times are meaningless, if another process was on its device."""
    return "its times mean nothing, since another process was on its device" if summary.get("shared_device") else ""


def _caveat(summary: Summary) -> str:
    """Say that a CPU's fixed costs consume the gain, if the stage times show it.

    They show it under two conditions. On average a row after the first adds at most a quarter of a plain step to
    verify. Drafting takes at least a quarter of a plain step, and at least as long as all these rows. Nothing is said
    if there is a gain, or if there are too few turns for an interval.
    """
    is_cpu, num_rows = (summary["device"] or "").startswith("cpu"), _verify_rows(summary)
    verify = in_plain_steps(summary, summary["stage_ms_per_round"].get("verify"))
    draft = in_plain_steps(summary, draft_ms(summary))
    ratios = [over_reference(summary, summary, name) for name in ("plain", "unpruned")]
    if not is_cpu or num_rows < 2 or verify is None or draft is None:
        return ""
    if ratios[0] is None or not ratios[0].is_judged or any(ratio is not None and ratio.is_above for ratio in ratios):
        return ""
    more_rows = verify - 1
    if more_rows / (num_rows - 1) > 1 - MOSTLY_FIXED or draft < max(more_rows, 1 - MOSTLY_FIXED):
        return ""
    return (
        f"verifying {num_rows} rows takes {number(verify)} plain steps, and drafting {number(draft)}: on this CPU a "
        "step is mostly fixed cost (calling operations, reading weights), so fewer rows save little, and each draft "
        "step pays it too"
    )


def _verify_rows(summary: Summary) -> int:
    return summary.get("tree_rows") or (summary["num_draft_tokens"] or 0) + 1
