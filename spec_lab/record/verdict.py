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
        text += f", {_times(ratio, 'without drafts')}"
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
    if not run["rounds"]:
        return "no round to time: every output ended with the prompt pass's own token"
    if not run.num_draft_tokens:
        return f"Plain decoding gave {number(run['decode_tokens_per_second'], 1)} tokens/s"
    drafter, imposed = run.choices.get("drafter", "the drafter"), " that was imposed" if run.acceptance_imposed else ""
    accepted = f"an acceptance length of {number(run['acceptance_length'])} of {run.num_draft_tokens + 1}{imposed}"
    ratio, even = over_reference(run, "plain"), number(run["break_even_acceptance_length"])
    if ratio is None:
        return f"{drafter} was not timed against plain decoding, with {accepted}"
    return f"{drafter} decoded {_times(ratio, 'plain decoding')}, with {accepted} (drafting pays from {even})"


def _times(ratio: PairedRatio, other: str) -> str:
    """Write a ratio with its interval, and whether it differs from 1 beyond noise."""
    times = f"{with_range(ratio.interval.value, ratio.interval.low, ratio.interval.high)} times as fast as {other}"
    if ratio.error is None:
        return f"{times} (repeats={LEAST_TURNS} or more would give an interval)"
    return f"{times}, {'within' if ratio.interval.holds(1.0) else 'beyond'} noise over {ratio.num_turns} turns"


def _tokens(run: Run) -> str:
    """Say how the outputs compare with plain decoding's; of a lossy rule also the answers."""
    compared, bugs, diverged = (run[f"divergence.{name}"] for name in ("requests", "bugs", "diverged"))
    if run.acceptance_lossless is False:
        rule, equal = f"acceptance={run.choices.get('acceptance')} is lossy", run["equal_to_plain"]
        if run.acceptance_imposed:
            return f"{rule} and imposed, so that its text comes from neither model"
        right = "cut before an answer" if answers_cut(run.metrics) else f"right in {percent(run['accuracy'])}"
        return f"{rule}: its outputs are plain decoding's in {percent(equal)}, and {right}"
    if not run.num_draft_tokens:
        return ""
    if compared is None:
        return "its tokens were not compared with plain decoding"
    repeats = ", though the repeats differ from each other" if run["repeats_identical"] is False else ""
    if bugs:
        return f"NOT the same tokens as plain decoding in {bugs} of {compared} requests: a bug{repeats}"
    ties = f" but for {diverged} that diverge at a near-tie of the target's own logits" if diverged else ""
    return f"the same tokens as plain decoding in all {compared} requests{ties}{repeats}"


def _pruning(run: Run) -> str:
    unpruned, ratio = run.references.get("unpruned"), over_reference(run, "unpruned")
    if unpruned is None or ratio is None:
        return ""
    rows = f"{run['rows.catchup_mlp']:,} of {unpruned['rows.catchup_mlp']:,} catch-up rows in the MLP"
    return f"pruned, it decodes {_times(ratio, 'unpruned')}, with {rows}"
