"""One sentence that says what a run came to, without a reader having to weigh the table."""

from __future__ import annotations

from spec_lab.record.answer_metrics import answers_cut
from spec_lab.record.schema import Accuracy, Ratio, Rows, Summary
from spec_lab.record.wording import number, percent, with_range

JUDGED_REPEATS = 3
NO_PLAIN = "references has no plain"
CPU_CAVEAT = (
    "these are a CPU's times: what a draft step, a verified row and a dropped one cost beside the rest of a round is "
    "another thing on a GPU"
)


def verdict(summary: Summary) -> str:
    """Say speedup with its range, acceptance length, same tokens or not, what pruning saved, what the device hides."""
    if summary["status"] != "finished":
        return f"The run is {summary['status']}: {summary['reason'] or 'no reason was recorded'}."
    parts = [_speed(summary), _tokens(summary), _price(summary), _pruning(summary), _shared(summary), _caveat(summary)]
    return "; ".join(part for part in parts if part) + "."


def is_noise(ratio: Ratio) -> bool:
    """Tell whether a change is no larger than what the repeats differ by.

    Stricter than asking whether the range holds 1: of three repeats that differ by chance alone, all lie on one side in
    25 % of cases, and their median is farther off than their range in 9 % (normal noise, simulated).
    """
    return abs(ratio["value"] - 1) <= ratio["high"] - ratio["low"]


def _speed(summary: Summary) -> str:
    drafter = summary["choices"].get("drafter", "the drafter")
    if not summary["rounds"]:
        subject = drafter if summary["num_draft_tokens"] else "Plain decoding"
        return f"{subject} had no round to time: every output ended with the prompt pass's own token"
    if not summary["num_draft_tokens"]:
        return f"Plain decoding gave {number(summary['decode_tokens_per_second'], 1)} tokens/s and drafted nothing"
    if summary["speedup"] is None:
        return f"{drafter} was not timed against plain decoding ({_why_not_timed(summary)}), {_acceptance(summary)}"
    return f"{_speedup(drafter, summary['speedup'], len(summary['repeats']))}, {_acceptance(summary)}"


def _why_not_timed(summary: Summary) -> str:
    return "which had no round itself" if "plain" in summary["references"] else NO_PLAIN


def _speedup(drafter: str, speedup: Ratio, num_repeats: int) -> str:
    measured = f"{_range(speedup, num_repeats)} times as fast as plain decoding"
    if num_repeats < JUDGED_REPEATS:
        return f"{drafter} decoded {measured}, with too few repeats to judge the noise"
    if is_noise(speedup):
        return f"{drafter} decoded {measured}, no difference beyond noise"
    direction = "faster" if speedup["value"] > 1 else "slower"
    return f"{drafter} is {direction}: it decoded {measured} over {num_repeats} repeats"


def _range(ratio: Ratio, num_repeats: int) -> str:
    return number(ratio["value"]) if num_repeats == 1 else with_range(ratio["value"], ratio["low"], ratio["high"])


def _acceptance(summary: Summary) -> str:
    num_tokens = (summary["num_draft_tokens"] or 0) + 1
    if summary["acceptance_length"] is None:
        return "with too few rounds to take an acceptance length from"
    imposed = " that was imposed, not measured" if summary["acceptance_imposed"] else ""
    text = f"with an acceptance length of {number(summary['acceptance_length'])} of {num_tokens}{imposed}"
    if summary["break_even_acceptance_length"] is not None:
        text += f" (drafting pays from {number(summary['break_even_acceptance_length'])})"
    return text


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
            "which part at a near-tie of the target's own logits"
        )
    else:
        text = f"the same tokens as plain decoding in all {counts['requests']} requests"
    if summary["repeats_identical"] is False:
        text += ", though the repeats differ from each other"
    return text


def _is_lossy(summary: Summary) -> bool:
    return summary["acceptance_lossless"] is False


def _price(summary: Summary) -> str:
    """Say what a lossy rule did to the text and to the answers."""
    if not _is_lossy(summary):
        return ""
    rule = summary["choices"].get("acceptance", "the acceptance rule")
    if summary["acceptance_imposed"]:
        return f"acceptance={rule} is lossy and imposed: its text is neither model's, and no answer is counted"
    text = f"acceptance={rule} is lossy: {_equal(summary)}"
    if summary["accuracy"]["value"] is None:
        return f"{text}, and no answer could be checked"
    if answers_cut(summary, summary):
        return f"{text}, and all outputs were cut before an answer; raise max_new_tokens"
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
    ratio, unpruned = summary["pruning_speedup"], summary["references"].get("unpruned")
    if unpruned is None:
        return ""
    if ratio is None:
        return f"pruning had no round to change and {_saved_rows(summary)}"
    value, low, high = (f"{100 * (ratio[key] - 1):+.1f}" for key in ("value", "low", "high"))
    num_repeats = len(summary["repeats"])
    text = f"pruning changed the decode rate by {value} %" + (f" ({low} to {high} %)" if num_repeats > 1 else "")
    if num_repeats < JUDGED_REPEATS:
        return f"{text}, with too few repeats to judge the noise, and {_saved_rows(summary)}"
    return f"{text}, {'within' if is_noise(ratio) else 'beyond'} noise, and {_saved_rows(summary)}"


def _saved_rows(summary: Summary) -> str:
    rows, all_rows = summary["rows"], summary["references"]["unpruned"]["rows"]
    return (
        f"computed {rows['catchup_computed']:,} of {all_rows['catchup_computed']:,} catch-up rows "
        f"and {rows['prefill_logits']:,} of {all_rows['prefill_logits']:,} rows of prompt logits"
        f"{_shared_rows(rows, all_rows)}{_experts_read(summary)}{_prompt_pass(summary)}"
    )


def _experts_read(summary: Summary) -> str:
    """Say how many different experts the catch-up step read a round, where its layer has any."""
    read, unpruned = summary.get("experts_read"), summary["references"]["unpruned"].get("experts_read")
    if not read or not unpruned or unpruned["catchup"] == 0:
        return ""
    return f", and read {read['catchup']:.1f} experts a catch-up where unpruned read {unpruned['catchup']:.1f}"


def _shared_rows(rows: Rows, all_rows: Rows) -> str:
    """Say how many prompt rows entered the layers that only read KV, where there are such layers."""
    unpruned = all_rows.get("prefill_shared", 0)
    return (
        f", {rows.get('prefill_shared', 0):,} of {unpruned:,} prompt rows in layers that share KV" if unpruned else ""
    )


def _prompt_pass(summary: Summary) -> str:
    """Say what `prune.prefill` saves, which is no part of the decode rate."""
    pruned, unpruned = (speed["prefill_ms_per_request"] for speed in (summary, summary["references"]["unpruned"]))
    if pruned is None or unpruned is None:
        return ""
    return f" (prompt pass {number(pruned, 1)} ms a request, unpruned {number(unpruned, 1)})"


def _shared(summary: Summary) -> str:
    """Say that no time of the run means anything, where other jobs may have run beside it."""
    return "its times mean nothing (shared_device=true)" if summary["config"].get("shared_device") else ""


def _caveat(summary: Summary) -> str:
    device = summary["device"] or ""
    return CPU_CAVEAT if device.startswith("cpu") and summary["num_draft_tokens"] else ""
