"""Checks of the engine: bounds of acceptance, equality with plain decoding, and the drafts of teacher forcing."""

from __future__ import annotations

import dataclasses

import torch

from spec_lab.config.groups import DrafterConfig
from spec_lab.config.option import get
from spec_lab.core.results import RequestRecord
from spec_lab.core.types import Request
from spec_lab.doctor.evidence import MIN_ROUNDS, Evidence
from spec_lab.doctor.findings import Finding, Verdict
from spec_lab.doctor.rounds import rounds_of
from spec_lab.doctor.subject import Subject
from spec_lab.doctor.teacher_forced import Drafted
from spec_lab.measure.audit import audit
from spec_lab.record.draft_counts import acceptance_length
from spec_lab.record.statistics import wilson_interval

# A uniformly random draft is right once in vocab_size times, so chance almost never gives a larger length.
MAX_RANDOM_LENGTH = 1.15
NO_ROUND = "no round to judge; use more prompts or longer outputs"
FEW_ROUNDS = "too few for a verdict; use more prompts or longer outputs"
NUM_RANDOM_REQUESTS, NUM_RANDOM_TOKENS = 3, 24
# The loop's drafts equal those of teacher forcing except for rounding, which changes hardly any in float32. In bfloat16
# on a CPU, 5 % of the pocket pair's rounds had other drafts.
MIN_SAME_FLOAT32 = 0.98
MIN_SAME_16_BIT = 0.85
# For first drafts. The shipped eagle3 head agrees in 0.46 to 0.94 by category (its card). With the halves of its input
# swapped, or its vocabulary map shifted, it agrees in less than 0.1. The shipped module of pocket_hybrid agrees in 0.24
# of the 38 rounds of two hard prompts, and in 0.53 over all nine.
MIN_AGREEMENT = 0.25
# For each later draft, over the rounds whose drafts before it are right. The shipped drafters have 0.57 to 0.84 over
# 144 rounds of the pocket workload. The body of SmolLM2's block drafter has 0.33 to 0.37, and a module with random
# weights 0. As few as 24 rounds may be judged, so a rate is below a bound if its whole interval is.
MIN_LATER_AGREEMENT = 0.3


def check_bounds(subject: Subject) -> list[Finding]:
    """Check that all drafts of drafter=oracle are accepted and hardly any of drafter=random, in an engine like the
    run's. The drafts are chains."""
    return [_check_oracle(subject), _check_random(subject)]


def check_output(subject: Subject, loop: list[RequestRecord]) -> Finding:
    """Check whether the run's output equals plain decoding's except at near-ties."""
    check = "output against plain decoding"
    num_bugs, num_ties = _divergences(subject, loop)
    measured = f"{len(loop)} requests: {num_bugs} differ, {num_ties} at a near-tie"
    if num_bugs:
        return Finding(check, Verdict.FAULT, measured, "verify is broken: strict acceptance changes the target's text")
    return Finding(check, Verdict.OK, measured)


def check_teacher_forcing(evidence: Evidence) -> Finding:
    """Measure how often a drafter agrees with the target if only the drafter and its inputs can be wrong."""
    drafted = evidence.as_configured
    measured = f"{_rates(drafted)}, after right drafts {conditionals(drafted)}, over {len(evidence.rounds)} rounds"
    verdict, cause = disagreement(drafted)
    return Finding("teacher forcing", verdict, measured, cause)


def disagreement(drafted: Drafted) -> tuple[Verdict, str | None]:
    """Return what is wrong with the drafter of these drafts.

    A later draft is only judged in rounds whose earlier drafts are right, and only if these are `MIN_ROUNDS` or more.
    A low rate whose 95 % interval holds its bound is suspicious.
    """
    rates = {position: drafted.conditional(position) for position in _judged(drafted)}
    bounds = {position: MIN_AGREEMENT if position == 1 else MIN_LATER_AGREEMENT for position in rates}
    low = [position for position, rate in rates.items() if rate < bounds[position]]
    sure = [position for position in low if _upper_end(drafted, position) < bounds[position]]
    if not low:
        return Verdict.OK, None
    position = (sure or low)[0]
    if not sure:
        return Verdict.SUSPICIOUS, (
            f"draft {position} is right in {rates[position]:.0%} of the rounds that get to it, which are {FEW_ROUNDS}"
        )
    if position == 1:
        return Verdict.FAULT, (
            "drafts disagree even with the target's own text and features in one pass, and no other reading tried here "
            "is better: weights of another target, or not trained enough"
        )
    return Verdict.FAULT, (
        f"draft {position} is right in {rates[position]:.0%} of the rounds whose earlier drafts are right, draft 1 in "
        f"{rates[1]:.0%}: the step, module or slot that makes it has wrong weights, is not fed as it was trained, or "
        "is not trained enough"
    )


def check_loop(evidence: Evidence) -> Finding:
    """Compare the drafts of teacher forcing and of the loop for the same rounds. If they differ, the fault is in the
    cache or the loop: of the catch-up (or first) step, which makes draft 1, or of the recurrent steps."""
    in_loop, forced = evidence.in_loop, evidence.as_configured
    same = (in_loop.tokens == forced.tokens) | (in_loop.tokens < 0)
    same_first, same_all = (float(rows.double().mean()) for rows in (same[:, 0], same.all(dim=1)))
    measured = (
        f"{_rates(in_loop)}; of the rounds {same_first:.1%} have the same draft 1 as under teacher forcing, "
        f"{same_all:.1%} the same drafts"
    )
    least = MIN_SAME_FLOAT32 if evidence.subject.models.dtype == torch.float32 else MIN_SAME_16_BIT
    cause = None
    if same_first < least:
        cause = (
            "cache or loop: draft 1 differs in the loop, so the catch-up (or first) step reads a stale cache, a "
            "wrong slot or a wrong length; compare graph=eager, prune=none and attention=torch"
        )
    elif same_all < least:
        cause = (
            "cache or loop: draft 1 is correct, later ones are not, so the recurrent steps read a stale cache or stale "
            "metadata; compare graph=eager and attention=torch"
        )
    return Finding("loop against teacher forcing", Verdict.OK if cause is None else Verdict.FAULT, measured, cause)


def _check_oracle(subject: Subject) -> Finding:
    length = subject.num_draft_tokens + 1
    config = get("drafter", "oracle")(num_draft_tokens=subject.num_draft_tokens)
    records = _generate(subject, config, subject.requests)
    num_bugs, _ = _divergences(subject, records)
    rounds = rounds_of(subject, records)
    accepted = sum(loop_round.accepted for loop_round in rounds) / max(len(rounds), 1)
    measured = f"{accepted + 1:.2f} tokens a round of {length} over {len(rounds)} rounds, {num_bugs} outputs differ"
    if num_bugs == 0 and not rounds:
        return Finding("oracle (upper bound)", Verdict.DOES_NOT_APPLY, NO_ROUND)
    if num_bugs == 0 and accepted == subject.num_draft_tokens:
        return Finding("oracle (upper bound)", Verdict.OK, measured)
    cause = "verify or the loop is broken: right drafts are not all accepted"
    return Finding("oracle (upper bound)", Verdict.FAULT, measured, cause)


def _check_random(subject: Subject) -> Finding:
    config = get("drafter", "random")(num_draft_tokens=subject.num_draft_tokens)
    requests = [
        dataclasses.replace(request, max_new_tokens=min(request.max_new_tokens, NUM_RANDOM_TOKENS))
        for request in subject.requests[:NUM_RANDOM_REQUESTS]
    ]
    records = _generate(subject, config, requests)
    length = acceptance_length(records, subject.num_draft_tokens)
    if length is None:
        return Finding("random (lower bound)", Verdict.DOES_NOT_APPLY, NO_ROUND)
    measured = f"{length:.2f} tokens a round"
    if length <= MAX_RANDOM_LENGTH:
        return Finding("random (lower bound)", Verdict.OK, measured)
    cause = "verify is broken: it accepts drafts that cannot be right"
    return Finding("random (lower bound)", Verdict.FAULT, measured, cause)


def _generate(subject: Subject, drafter: DrafterConfig, requests: list[Request]) -> list[RequestRecord]:
    return subject.engine(dataclasses.replace(subject.of_spine, drafter=drafter)).generate(requests).requests


def _divergences(subject: Subject, records: list[RequestRecord]) -> tuple[int, int]:
    """Return how many outputs differ from plain decoding's: by a bug, and at a near-tie."""
    plain = {record.request_id: record.output_ids for record in subject.plain}
    teacher = subject.greedy_teacher()
    found = audit(records, plain, teacher, teacher.rounds_to)
    num_bugs = sum(divergence.kind == "bug" for divergence in found.values())
    return num_bugs, len(found) - num_bugs


def conditionals(drafted: Drafted) -> str:
    """Write the rates after right drafts, with a dash for positions that too few rounds reach."""
    judged = _judged(drafted)
    return " ".join(f"{drafted.conditional(each):.2f}" if each in judged else "-" for each in drafted.positions)


def _upper_end(drafted: Drafted, position: int) -> float:
    """Return the upper end of the 95 % interval of a position's conditional rate."""
    num_right = int((drafted.accepted >= position).sum())
    return wilson_interval(num_right, drafted.num_judged(position))[1]


def _judged(drafted: Drafted) -> list[int]:
    return [position for position in drafted.positions if drafted.num_judged(position) >= MIN_ROUNDS]


def _rates(drafted: Drafted) -> str:
    return f"rate by position {' '.join(f'{drafted.agreement(position):.2f}' for position in drafted.positions)}"
