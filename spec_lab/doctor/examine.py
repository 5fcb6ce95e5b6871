"""All checks of one run. A fault in an earlier check may explain one in a later check."""

from __future__ import annotations

from spec_lab.doctor.aspects import aspects_of
from spec_lab.doctor.checkpoints import check_dtype, check_tokenizer, check_vocabulary
from spec_lab.doctor.evidence import MIN_ROUNDS, Evidence, gather, run_loop
from spec_lab.doctor.findings import Finding, does_not_apply
from spec_lab.doctor.hidden import CHECK as HIDDEN_CHECK
from spec_lab.doctor.hidden import check_hidden
from spec_lab.doctor.loop import check_bounds, check_loop, check_output, check_teacher_forcing
from spec_lab.doctor.readings import aspect_names, check_readings
from spec_lab.doctor.recycled import CHECK as RECYCLED_CHECK
from spec_lab.doctor.recycled import check_recycled
from spec_lab.doctor.states import check_states
from spec_lab.doctor.subject import Subject
from spec_lab.doctor.trained_for import PRECISION_CHECK, TRAINING_CHECK, check_precision, check_training

FORCED_CHECKS = (
    *(HIDDEN_CHECK, RECYCLED_CHECK, *aspect_names(()), PRECISION_CHECK, TRAINING_CHECK),
    *("loop against teacher forcing", "teacher forcing"),
)
"""The names of the checks in `_forced`, for a run in which they cannot be done."""


def examine(subject: Subject) -> list[Finding]:
    """Run the checks that apply. Verify is checked first, since all other numbers depend on it. The drafter's files are
    next, since all drafts depend on them, and then other ways to read these files.

    Teacher forcing is last: low agreement there is the remaining explanation if nothing else was found.
    """
    loop = run_loop(subject)
    findings = [check_states(subject), *check_bounds(subject), check_output(subject, loop.records)]
    is_finder = subject.config.drafter.drafts_on_host
    if is_finder or not hasattr(subject.config.drafter, "folder"):
        why = "looks drafts up, as many as it finds" if is_finder else "has no weights"
        reason = f"drafter={subject.config.drafter.name} {why}"
        skipped = ("tokenizer", "vocabulary map (d2t)", "dtype of the weights", *FORCED_CHECKS)
        return findings + [does_not_apply(check, reason) for check in skipped]
    findings += [check_tokenizer(subject), check_vocabulary(subject), check_dtype(subject)]
    evidence = gather(subject, loop)
    if evidence is None:
        reason = f"fewer than {MIN_ROUNDS} rounds to compare; use more prompts, longer outputs or fewer draft tokens"
        return findings + [does_not_apply(check, reason) for check in FORCED_CHECKS]
    return findings + _forced(subject, evidence)


def _forced(subject: Subject, evidence: Evidence) -> list[Finding]:
    return [
        check_hidden(evidence),
        check_recycled(evidence),
        *check_readings(evidence, aspects_of(evidence.forced.lab(0))),
        check_precision(evidence),
        check_training(evidence),
        check_loop(evidence),
        check_teacher_forcing(evidence),
    ]
