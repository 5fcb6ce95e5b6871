"""The verdict: a run's results in a sentence, for readers who do not study the table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spec_lab.record.answers import answers_cut
from spec_lab.record.statistics import LEAST_TURNS, mean_ratio, over_reference
from spec_lab.record.wording import number, percent, with_range

if TYPE_CHECKING:
    from spec_lab.record.models import Run


def verdict(run: Run) -> str:
    """Say of a finished run what is known of its speed, acceptance, tokens and pruning, and of another how it ended."""
    if run.status != "finished":
        return f"The run is {run.status}: {run.reason or 'no reason was recorded'}."
    differ = "the repeats differ from each other" if run["repeats_identical"] is False else ""
    found = (_speed(run), *_tokens(run), differ, _pruning(run), *run.notes)
    return "; ".join(part for part in found if part) + "."


def _speed(run: Run) -> str:
    """Say how fast it was and how much was accepted: as every engine counts it, of another engine."""
    if run["rounds"] == 0:
        return "no round to time: every output ended with the prompt pass's own token"
    is_ours = run.engine == "lab"
    by = "" if is_ours else f" by {run.engine} {run.engine_version or ''}".rstrip()
    rate = f"gave {number(run['decode_tokens_per_second'], 1)} tokens/s"
    if not run.num_draft_tokens:
        return f"Plain decoding{by} {rate}"
    times = _times(run, "plain", "plain decoding")
    speed = f"decoded {times}" if times else f"{rate}, and was not timed against plain decoding"
    length = f"an acceptance length of {number(run['acceptance_length'])}"
    length = length if is_ours else f"a common length of {number(run['common_length'])}"
    imposed, even = " that was imposed" if run.acceptance_imposed else "", run["break_even_acceptance_length"]
    pays = "" if even is None else f" (drafting pays from {number(even)})"
    drafter = run.choices.get("drafter", "the drafter")
    return f"{drafter}{by} {speed}, with {length} of {run.num_draft_tokens + 1}{imposed}{pays}"


def _times(run: Run, reference: str, name: str) -> str:
    """Write the ratio to a reference with its interval, and whether it differs from 1 beyond noise."""
    ratios = over_reference(run, reference)
    mean = mean_ratio(ratios)
    if mean is None:
        return ""
    times = f"{with_range(mean.value, mean.low, mean.high)} times as fast as {name}"
    if mean.low is None:
        return f"{times} (repeats={LEAST_TURNS} or more would give an interval)"
    return f"{times}, {'within' if mean.holds(1.0) else 'beyond'} noise over {len(ratios)} turns"


def _tokens(run: Run) -> list[str]:
    """Say how the outputs compare with plain decoding's; of a lossy rule also the answers."""
    if run.acceptance_lossless is False:
        rule = f"acceptance={run.choices.get('acceptance')} is lossy"
        if run.acceptance_imposed:
            return [f"{rule} and imposed, so that its text comes from neither model"]
        right = "cut before an answer" if answers_cut(run.metrics) else f"right in {percent(run['accuracy'])}"
        return [f"{rule}: its outputs are plain decoding's in {percent(run['equal_to_plain'])}, and {right}"]
    plain = [_same(run, "divergence", "plain decoding")] if run.num_draft_tokens else []
    return plain if run.engine == "lab" else [*plain, _same(run, "lab_divergence", "the lab's plain decoding")]


def _same(run: Run, metric: str, other: str) -> str:
    compared, parted, ties = (run[f"{metric}.{name}"] for name in ("requests", "diverged", "near_ties"))
    if compared is None:
        return f"its tokens were not compared with {other}"
    same = f"the same tokens as {other} in {f'{compared - parted} of' if parted else 'all'} {compared} requests"
    if parted > ties:
        return f"NOT {same}: {parted - ties} differ where the target's logits are no near-tie"
    return f"{same}, and up to a near-tie of the target's logits in the others" if parted else same


def _pruning(run: Run) -> str:
    times = _times(run, "unpruned", "unpruned")
    if not times:
        return ""
    rows, all_rows = run["rows.catchup_mlp"], run.references["unpruned"]["rows.catchup_mlp"]
    return f"pruned, it decodes {times}, with {rows:,} of {all_rows:,} catch-up rows in the MLP"
