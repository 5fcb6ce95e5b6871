"""The configs of a run's references: plain decoding, the same run without pruning, and the same run without graphs."""

from __future__ import annotations

import dataclasses

from spec_lab.menu.config import PruneConfig, RecurrentConfig, RunConfig, TreeConfig, VerifyConfig
from spec_lab.options.drafters.none import NoDrafterConfig
from spec_lab.options.graphs.eager import EagerGraphConfig
from spec_lab.options.rules.rejection import RejectionConfig, RejectionMethodChoice
from spec_lab.options.rules.strict import StrictAcceptanceConfig

UNPRUNED = PruneConfig(prefill="all_rows", catchup="none")
PLAIN_PRUNE = PruneConfig(prefill="last_row", catchup="none")


def plain_config(config: RunConfig) -> RunConfig:
    """Return the same run, but with plain decoding and a lossless rule, for references=[plain] and other plain passes.

    After the last KV write, its prompt pass computes only the last row, and logits for it alone, as in serving engines.
    """
    is_greedy = config.sampling.temperature == 0
    rule = StrictAcceptanceConfig() if is_greedy else RejectionConfig(method=RejectionMethodChoice.one_hot)
    return dataclasses.replace(
        config,
        drafter=NoDrafterConfig(),
        acceptance=rule,
        prune=PLAIN_PRUNE,
        tree=TreeConfig(),
        verify=VerifyConfig(),
        recurrent=RecurrentConfig(),
    )


def unpruned_config(config: RunConfig) -> RunConfig:
    """Return the same run without pruning."""
    return dataclasses.replace(config, prune=UNPRUNED)


def eager_config(config: RunConfig) -> RunConfig:
    """Return the same run without graphs."""
    return dataclasses.replace(config, graph=EagerGraphConfig())
