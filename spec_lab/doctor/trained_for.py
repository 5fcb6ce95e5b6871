"""Checks whether the drafter was trained for another precision, or for other weights, of the target."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import torch

from spec_lab.checkpoints.digest import target_digest
from spec_lab.config.choices import CacheDtype, WeightDtype
from spec_lab.doctor.evidence import Evidence, gather, run_loop
from spec_lab.doctor.findings import Finding, Verdict, does_not_apply
from spec_lab.doctor.loop import conditionals
from spec_lab.doctor.readings import gain_of
from spec_lab.doctor.subject import load_subject
from spec_lab.record.statistics import bootstrapped

PRECISION_CHECK, TRAINING_CHECK = "precision of the target", "target of the training"
MIN_TEXTS = 8
"""With fewer, three standard errors of their mean happen by chance more than once in a hundred (Student's t)."""


def check_precision(evidence: Evidence) -> Finding:
    """Compare the drafter beside the target that the run rounds with the same drafter beside the target as it is
    stored. Each target is asked for its own text, and the prompts are paired."""
    run = evidence.subject.config
    weights, keys = run.target.weight_dtype, run.cache.dtype
    if (weights, keys) == (WeightDtype.auto, CacheDtype.auto):
        return does_not_apply(PRECISION_CHECK, "the run rounds neither the target's weights nor its keys and values")
    wide = load_subject(
        replace(
            run,
            target=replace(run.target, weight_dtype=WeightDtype.auto),
            cache=replace(run.cache, dtype=CacheDtype.auto),
        )
    )
    stored = gather(wide, run_loop(wide))
    if stored is None:
        return does_not_apply(PRECISION_CHECK, "the target as it is stored leaves too few rounds to compare")
    measured = (
        f"after right drafts {conditionals(evidence.as_configured)}, with the target as it is stored "
        f"{conditionals(stored.as_configured)}"
    )
    both = _by_text(evidence), _by_text(stored)
    texts = both[0].keys() & both[1].keys()
    if len(texts) < MIN_TEXTS:
        return does_not_apply(PRECISION_CHECK, f"fewer than {MIN_TEXTS} prompts to compare; use more")
    gain = gain_of(*(torch.stack([of[text].double().mean() for text in texts]) for of in both))
    if not gain.is_clear:
        return Finding(PRECISION_CHECK, Verdict.OK, measured)
    cause = (
        f"the drafter was trained for the target as it is stored: target.weight_dtype={weights} cache.dtype={keys} "
        f"costs it {gain.mean:.2f} drafts a round"
    )
    return Finding(PRECISION_CHECK, Verdict.FAULT, measured, cause)


def check_training(evidence: Evidence) -> Finding:
    """Compare the length, and the target's digest, with those in the `training.json` beside the drafter's weights."""
    subject = evidence.subject
    record = subject.drafter_folder / "training.json"
    if not record.is_file():
        return does_not_apply(TRAINING_CHECK, "no training.json beside the drafter's weights")
    facts = json.loads(record.read_text(encoding="utf-8"))
    ours, theirs = target_digest(subject.config.target.folder), facts["target"]["target"]
    if ours == theirs:
        return Finding(TRAINING_CHECK, Verdict.OK, f"trained for {ours}, which is this one")
    (then,) = (point["decoded"] for point in facts["points"] if point["step"] == facts["best_step"])
    num_drafts, low = len(then["conditional_rates"]), then["interval"][0]
    if num_drafts > subject.num_draft_tokens:
        return does_not_apply(TRAINING_CHECK, f"its length is of drafter.num_draft_tokens={num_drafts}; use that")
    by_text = [accepted.clamp(max=num_drafts) for accepted in _by_text(evidence).values()]
    sums, counts = (np.array([int(of(text)) for text in by_text]) for of in (torch.sum, len))
    now = bootstrapped(lambda picks: 1 + sums[picks].sum(-1) / counts[picks].sum(-1), len(by_text))
    assert now is not None
    here = conditionals(evidence.as_configured)
    there = " ".join(f"{rate or 0:.2f}" for rate in then["conditional_rates"])
    measured = (
        f"trained for {theirs}, used with {ours}; length {now.value:.2f} (up to {now.high or now.value:.2f}), in "
        f"training {then['acceptance_length']:.2f} (from {low:.2f}); after right drafts {here}, in training {there}"
    )
    if now.high is None or now.high >= low:
        return Finding(TRAINING_CHECK, Verdict.OK, measured)
    cause = (
        f"the drafter was trained for {facts['target']['path']} ({theirs}), and its drafts are worse here than there"
    )
    return Finding(TRAINING_CHECK, Verdict.FAULT, measured, cause)


def _by_text(evidence: Evidence) -> dict[int, torch.Tensor]:
    """Return the numbers of accepted drafts under teacher forcing, by the index of the request."""
    texts = torch.tensor([loop_round.text for loop_round in evidence.rounds])
    return {text: evidence.as_configured.accepted[texts == text] for text in texts.unique().tolist()}
