"""A run with its option names resolved to registry entries, which later code uses.

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
    """A run and the registry entries (`Option`) that it chose.

    Attributes:
        registry: the registry that it chose from.
        sizes: the sizes of its tree; None if its drafts are a chain.
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
        """Return the chosen options, in the order in which their refusals are listed."""
        return [
            *(self.target, self.drafter, self.rule, self.prefill, self.catchup),
            *(self.graph, self.attention, self.workload, self.checker, self.logger, self.tree),
        ]

    @property
    def target_folder(self) -> Path:
        """Return the folder of the target's checkpoint, or its GGUF file."""
        return self.target.folder(self.config.target)

    @property
    def drafter_folder(self) -> Path:
        """Return the folder of the drafter's weights; the drafter must have some."""
        assert self.drafter.folder is not None, "called only for drafters with weights"
        return self.drafter.folder(self.config, self.config.drafter)

    def again(self, config: RunConfig) -> Chosen:
        """Resolve another run with the same registry; UserError if it names an option that is not registered."""
        assert config.extensions == self.config.extensions, "a run with other extensions has another registry"
        return _resolve(config, self.registry)


def choose(config: RunConfig) -> Chosen:
    """Resolve the options that a run names.

    Raises:
        UserError: one of the options is not registered, or an extension cannot be loaded.
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
    """Return the same run with K set to its tree's depth if K has its default; another K is refused later."""
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
    """Return whether the drafts of a run are sampled."""
    sampling = getattr(config.drafter, "draft_sampling", DraftSampling.greedy)
    return bool(sampling != DraftSampling.greedy)
