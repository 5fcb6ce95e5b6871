"""All checks of one run. A fault in an earlier check may explain one in a later check."""

from __future__ import annotations

from spec_lab.doctor.aspects import aspects_of
from spec_lab.doctor.checkpoints import check_dtype, check_tokenizer, check_vocabulary
from spec_lab.doctor.evidence import MIN_ROUNDS, gather, run_loop
from spec_lab.doctor.findings import Finding, does_not_apply
from spec_lab.doctor.loop import check_bounds, check_loop, check_output, check_teacher_forcing
from spec_lab.doctor.readings import check_readings
from spec_lab.doctor.states import check_states
from spec_lab.doctor.subject import Subject
from spec_lab.doctor.trained_for import check_precision, check_training
from spec_lab.doctor.zeroed import check_hidden, check_recycled


def examine(subject: Subject) -> list[Finding]:
    """Run the checks that apply. Verify is checked first, since all other numbers depend on it. The drafter's files are
    next, since all drafts depend on them, and then other ways to read these files.

    Teacher forcing is last: low agreement there is the remaining explanation if nothing else was found.
    """
    loop, drafter = run_loop(subject), subject.config.drafter
    findings = [check_states(subject), *check_bounds(subject), check_output(subject, loop.records)]
    if drafter.drafts_on_host or not hasattr(drafter, "folder"):
        why = "looks drafts up, as many as it finds" if drafter.drafts_on_host else "has no weights"
        return [*findings, does_not_apply("files and drafts", f"drafter={drafter.name} {why}")]
    findings += [check_tokenizer(subject), check_vocabulary(subject), check_dtype(subject)]
    evidence = gather(subject, loop)
    if evidence is None:
        reason = f"fewer than {MIN_ROUNDS} rounds to compare; use more prompts, longer outputs or fewer draft tokens"
        return [*findings, does_not_apply("drafts", reason)]
    return [
        *findings,
        check_hidden(evidence),
        check_recycled(evidence),
        *check_readings(evidence, aspects_of(evidence.forced.lab(0))),
        check_precision(evidence),
        check_training(evidence),
        check_loop(evidence),
        check_teacher_forcing(evidence),
    ]
