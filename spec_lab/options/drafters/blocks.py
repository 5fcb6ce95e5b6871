"""drafter=dflash and the presets of its parts (`block_keys`): their refusals and registry entries (rows)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spec_lab.checkpoints.block_config import SlotReading, Slots
from spec_lab.checkpoints.block_heads import HeadKind
from spec_lab.menu.choices import Weights
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import RunConfig
from spec_lab.menu.option import DrafterOption
from spec_lab.menu.readings import Aspect
from spec_lab.options.drafters.block_keys import (
    BLOCK_SIZE,
    PRESETS,
    BlockDrafterConfig,
    fewer_drafts,
    head_has_part,
)
from spec_lab.options.shipped import DrafterWeights, path_beside_random_weights, zoo_folders

if TYPE_CHECKING:
    from spec_lab.wiring.drafting import DrafterFactory
    from spec_lab.wiring.models import DrafterBuild

LARGEST_BLOCK = 256
OF_RANDOM_WEIGHTS = ("block_size", "num_layers", "head_rank", "head_topk")


def weights_or_random(config: RunConfig) -> str | None:
    """Sizes are only set for random weights, and a path only for a checkpoint, which has its own sizes."""
    options: Any = config.drafter
    if options.weights == Weights.random:
        return path_beside_random_weights(options)
    given = [name for name in OF_RANDOM_WEIGHTS if getattr(options, name) is not None]
    if not given:
        return DrafterWeights(zoo_folders(options.name)).missing(config)
    return (
        f"drafter.{given[0]}={getattr(options, given[0])} is read only with drafter.weights=random, since a checkpoint "
        "has its own; leave it out"
    )


def steps_are_replayed(config: RunConfig) -> str | None:
    """graph=step_replay is refused: one pass makes all drafts, so there is no draft step to replay."""
    if config.graph.name != "step_replay":
        return None
    return (
        f"drafter={config.drafter.name} drafts a block in one pass, so graph=step_replay has no draft step to replay; "
        "use graph=full_loop, or graph=split_seed for a graph of only the head"
    )


def block_has_room(config: RunConfig) -> str | None:
    """A block of random weights has room for the drafts. That of a checkpoint is checked when it is loaded."""
    options: Any = config.drafter
    if options.weights != Weights.random:
        return None
    size = options.block_size or BLOCK_SIZE
    most = SlotReading.of(Slots(options.slots.value), size, HeadKind(options.head.value)).most_drafts
    if options.num_draft_tokens <= most:
        return None
    return (
        f"drafter.num_draft_tokens={options.num_draft_tokens} is more than the {most} drafts of a block of {size} rows "
        f"with drafter.slots={options.slots}; use {fewer_drafts(config, most)} or a larger drafter.block_size"
    )


def parts_are_read(config: RunConfig) -> str | None:
    """Keys of parts that the head does not have are not set."""
    return head_has_part(config.drafter)


def rows_written(config: RunConfig) -> int:
    """Return how many positions past the last token a round may write: verify's, and a block after them."""
    options: Any = config.drafter
    size = options.block_size or BLOCK_SIZE
    if options.weights != Weights.random:
        from spec_lab.checkpoints.block_layouts import read_block_file

        folder = DrafterWeights(zoo_folders(options.name)).folder(config, options)
        size = read_block_file(folder).fields.integer("block_size")
    return int(options.num_draft_tokens) + 1 + size


def load(chosen: Chosen, options: BlockDrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Read the weights or make random ones; the factory then makes a drafter with them for each engine."""
    from spec_lab.options.drafters.block_loading import load_chain

    return load_chain(chosen, options, build)


def load_tree(chosen: Chosen, options: BlockDrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Load the same drafter, which drafts a tree of the slots of its block."""
    from spec_lab.options.drafters.block_loading import load_tree

    return load_tree(chosen, options, build)


def aspects(chosen: Chosen, options: BlockDrafterConfig, build: DrafterBuild) -> list[Aspect]:
    """List the choices in reading the drafter, with the alternatives."""
    from spec_lab.options.drafters.block_loading import aspects

    return aspects(chosen, options, build)


ROWS = tuple(
    DrafterOption(
        name=name,
        schema=schema,
        load=load,
        refusals=(weights_or_random, block_has_room, parts_are_read, steps_are_replayed),
        folder=DrafterWeights(zoo_folders(name)).folder,
        aspects=aspects,
        load_tree=load_tree,
        no_branch_keys=True,
        no_moves="drafts a block in one pass",
        notes_confidence=True,
        ingests_in_graphs=True,
        preset_of=None if name == "dflash" else "dflash",
        rows_written=rows_written,
    )
    for name, schema in PRESETS.items()
)
