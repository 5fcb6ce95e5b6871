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
    found = (_speed(run), _tokens(run), _pruning(run)) if run.engine == "lab" else _of_other_engine(run)
    return "; ".join(part for part in (*found, *run.notes) if part) + "."


def _of_other_engine(run: Run) -> tuple[str, ...]:
    """Say of another engine's run how fast it was, its common length, and whose tokens it gave."""
    name = f"{run.engine} {run.engine_version or ''}".strip()
    rate, length = run["decode_tokens_per_second"], run["common_length"]
    text = f"{name} gave {number(rate, 1)} tokens/s" if rate is not None else f"{name} decoded"
    if not run.num_draft_tokens:
        return f"{text} and drafted nothing", _same(run, "lab_divergence", "the lab's plain decoding")
    if (ratio := over_reference(run, "plain")) is not None:
        times = with_range(ratio.interval.value, ratio.interval.low, ratio.interval.high)
        text += f", {times} times as fast as without drafts, {_judged(ratio)}"
    told = "does not tell how many drafts it accepted" if length is None else f"had a common length of {number(length)}"
    return (
        f"{text}; with {run.choices.get('drafter', 'the drafter')} it {told}",
        _same(run, "divergence", "its own plain decoding"),
        _same(run, "lab_divergence", "the lab's plain decoding"),
    )


def _same(run: Run, metric: str, other: str) -> str:
    compared, parted = run[f"{metric}.requests"], run[f"{metric}.diverged"]
    if compared is None:
        return f"its tokens were not compared with {other}"
    if not parted:
        return f"the tokens of {other} in all {compared} requests"
    ties = run[f"{metric}.near_ties"]
    where = f"{ties} of the others part at near-ties of the lab's logits" if ties else "the others part at no near-tie"
    return f"the tokens of {other} in {compared - parted} of {compared} requests, {where}"


def _speed(run: Run) -> str:
    drafter = run.choices.get("drafter", "the drafter")
    if not run["rounds"]:
        return f"{drafter} had no round to time: every output ended with the prompt pass's own token"
    if not run.num_draft_tokens:
        return f"Plain decoding gave {number(run['decode_tokens_per_second'], 1)} tokens/s and drafted nothing"
    length, imposed = run["acceptance_length"], " that was imposed, not measured" if run.acceptance_imposed else ""
    accepted = f"an acceptance length of {number(length)} of {run.num_draft_tokens + 1}{imposed}"
    ratio, even = over_reference(run, "plain"), run["break_even_acceptance_length"]
    if ratio is None:
        return f"{drafter} was not timed against plain decoding, with {accepted}"
    times = with_range(ratio.interval.value, ratio.interval.low, ratio.interval.high)
    pays = f"drafting pays from {number(even)}"
    return f"{drafter} decoded {times} times as fast as plain decoding, {_judged(ratio)}, with {accepted} ({pays})"


def _judged(ratio: PairedRatio) -> str:
    """Say whether a ratio differs from 1 beyond noise."""
    if ratio.error is None:
        return f"too few turns for an interval (repeats={LEAST_TURNS} or more give one)"
    found = "within noise" if ratio.interval.holds(1.0) else "faster" if ratio.interval.value > 1 else "slower"
    return f"{found} over {ratio.num_turns} turns"


def _tokens(run: Run) -> str:
    """Say how the outputs compare with plain decoding's; of a lossy rule also the answers."""
    compared, equal = run["divergence.requests"], run["equal_to_plain"]
    if run.acceptance_lossless is False:
        rule = f"acceptance={run.choices.get('acceptance')} is lossy"
        if run.acceptance_imposed:
            return f"{rule} and imposed: its text comes from neither model, so answers are not counted"
        same = "not compared with plain decoding" if equal is None else f"plain decoding's in {percent(equal)}"
        return f"{rule}: its outputs are {same}, {_answers(run)}"
    if not run.num_draft_tokens:
        return ""
    if compared is None:
        text = "its tokens were not compared with plain decoding"
    elif run["divergence.bugs"]:
        text = f"NOT the same tokens as plain decoding in {run['divergence.bugs']} of {compared} requests: a bug"
    elif run["divergence.diverged"]:
        text = (
            f"the same tokens as plain decoding but for {run['divergence.diverged']} of {compared} requests, which "
            "diverge at a near-tie of the target's own logits"
        )
    else:
        text = f"the same tokens as plain decoding in all {compared} requests"
    return text + (", though the repeats differ from each other" if run["repeats_identical"] is False else "")


def _answers(run: Run) -> str:
    if run["accuracy"] is None:
        return "and no answer could be checked"
    if answers_cut(run.metrics):
        return "but all checked outputs were cut before an answer; raise max_new_tokens"
    found = f"accuracy {percent(run['accuracy'])} ({percent(run['accuracy.low'])} to {percent(run['accuracy.high'])})"
    lost, gained, count = (run[f"accuracy_change.{key}"] for key in ("lost", "gained", "n"))
    return (
        found if lost is None else f"{found}, {lost} answers lost and {gained} gained of {count} beside plain decoding"
    )


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
    found = with_range(ratio.interval.value, ratio.interval.low, ratio.interval.high)
    return f"pruned, it decodes {found} times as fast as unpruned, {_judged(ratio)}: {rows}"
