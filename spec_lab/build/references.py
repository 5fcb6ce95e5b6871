"""The configs of a run's references: plain decoding, the same run with a fixed K, without pruning
and without graphs."""

from __future__ import annotations

from dataclasses import replace

from spec_lab.config.groups import TreeConfig
from spec_lab.config.option import get
from spec_lab.config.run import PruneConfig, RecurrentConfig, Run


def plain_config(run: Run) -> Run:
    """Return the same run, but with plain decoding and a lossless rule, for references=[plain] and other plain passes.

    After the last KV write, its prompt pass computes only the last row, and logits for it alone, as in serving engines.
    """
    return replace(
        run,
        drafter=get("drafter", "none")(),
        acceptance=get("acceptance", "rejection" if run.sampling.temperature > 0 else "strict")(),
        prune=get("prune", "prefill")(),
        tree=TreeConfig(),
        recurrent=RecurrentConfig(),
    )


def fixed_config(run: Run, num_draft_tokens: int) -> Run:
    """Return the same run with so many drafts in every round."""
    drafter = replace(run.drafter, plan="none", num_draft_tokens=num_draft_tokens)
    return replace(run, drafter=drafter, record=replace(run.record, confidences=False))


def unpruned_config(run: Run) -> Run:
    """Return the same run without pruning."""
    return replace(run, prune=PruneConfig())


def eager_config(run: Run) -> Run:
    """Return the same run without graphs."""
    return replace(run, graph=get("graph", "eager")())
