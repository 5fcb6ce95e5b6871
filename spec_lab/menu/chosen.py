"""A run whose names are rows, resolved once when its job begins and handed on: nobody below asks the registry.

Imports no torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from spec_lab.menu import registry
from spec_lab.menu.choices import DraftSampling
from spec_lab.menu.config import RunConfig
from spec_lab.menu.offers import RunOffers, run_offers
from spec_lab.menu.option import (
    AttentionOption,
    CatchupPruningOption,
    CheckerOption,
    DrafterOption,
    GraphOption,
    LoggerOption,
    Option,
    PromptPruningOption,
    RuleOption,
    TargetOption,
    TreeOption,
    TreeSizes,
    WorkloadOption,
)
from spec_lab.menu.registry import Registry, Row, chosen_name


@dataclass(frozen=True, slots=True)
class Chosen:
    """A run, and what it chose.

    Attributes:
        registry: all that it chose from.
        sizes: of its tree; None where its drafts are a chain.
        offers: how many drafts its requests may offer.
    """

    config: RunConfig
    registry: Registry
    target: TargetOption
    drafter: DrafterOption
    rule: RuleOption
    prefill: PromptPruningOption
    catchup: CatchupPruningOption
    graph: GraphOption
    attention: AttentionOption
    workload: WorkloadOption
    checker: CheckerOption
    logger: LoggerOption
    tree: TreeOption
    sizes: TreeSizes | None
    offers: RunOffers

    @property
    def rows(self) -> list[Option]:
        """Returns the rows in the order in which their refusals are listed."""
        return [
            *(self.target, self.drafter, self.rule, self.prefill, self.catchup),
            *(self.graph, self.attention, self.workload, self.logger, self.tree),
        ]

    @property
    def target_folder(self) -> Path:
        """Returns the folder of the target's checkpoint."""
        return self.target.folder(self.config.target)

    @property
    def drafter_folder(self) -> Path:
        """Returns the folder of the drafter's weights, which it has."""
        assert self.drafter.folder is not None, "only drafters with weights are asked"
        return self.drafter.folder(self.config, self.config.drafter)

    def again(self, config: RunConfig) -> Chosen:
        """Resolve another run of the same registry; UserError where it names what nothing registered."""
        assert config.extensions == self.config.extensions, "other extensions are another registry"
        return _resolve(config, self.registry)


def choose(config: RunConfig) -> Chosen:
    """Resolve what a run names.

    Raises:
        UserError: nothing registered one of the names, or an extension cannot be loaded.
    """
    return _resolve(config, registry.load(config.extensions))


def _resolve(config: RunConfig, options: Registry) -> Chosen:
    def row(kind: type[Row]) -> Row:
        return options.find(kind, chosen_name(config, kind))

    target, drafter, rule = row(TargetOption), row(DrafterOption), row(RuleOption)
    prefill, catchup, graph = row(PromptPruningOption), row(CatchupPruningOption), row(GraphOption)
    attention, workload, logger, tree = row(AttentionOption), row(WorkloadOption), row(LoggerOption), row(TreeOption)
    return Chosen(
        config=config,
        registry=options,
        target=target,
        drafter=drafter,
        rule=rule,
        prefill=prefill,
        catchup=catchup,
        graph=graph,
        attention=attention,
        workload=workload,
        checker=row(CheckerOption),
        logger=logger,
        tree=tree,
        sizes=None if tree.sizes is None else tree.sizes(config.tree),
        offers=run_offers(config, drafter.drafts_on_host),
    )


def with_depth_as_k(config: RunConfig) -> RunConfig:
    """Return the same run with K as deep as its tree, unless somebody set K: what then differs is refused."""
    name = config.tree.name
    options = registry.load(config.extensions).options(TreeOption)
    if name not in options or (sizes := options[name].sizes) is None:
        return config
    drafter = config.drafter
    usual = next(field.default for field in dataclasses.fields(drafter) if field.name == "num_draft_tokens")
    if drafter.num_draft_tokens != usual or usual == 0:
        return config
    drafter = dataclasses.replace(drafter, num_draft_tokens=sizes(config.tree).depth)
    return dataclasses.replace(config, drafter=drafter)


def drafts_are_drawn(config: RunConfig) -> bool:
    """Tell whether the drafts of a run are sampled."""
    sampling = getattr(config.drafter, "draft_sampling", DraftSampling.greedy)
    return bool(sampling != DraftSampling.greedy)
