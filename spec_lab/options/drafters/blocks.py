"""drafter=dflash, and the presets of its parts: dspark, domino, dflash2, lilicorr.

A block drafter is a body, a reading of its slots, and a head. A preset is a choice of parts, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from spec_lab.errors import UserError
from spec_lab.menu.choices import Choice, Weights
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import RunConfig, TrainedDrafterConfig, knob
from spec_lab.menu.option import DrafterOption
from spec_lab.options.shipped import DrafterWeights, path_beside_random_weights, zoo_folders

if TYPE_CHECKING:
    import torch

    from spec_lab.checkpoints.block_config import BlockConfig
    from spec_lab.checkpoints.random_blocks import BlockParts
    from spec_lab.core.protocols import Drafter
    from spec_lab.wiring.drafting import DrafterFactory, DrafterResources
    from spec_lab.wiring.models import DrafterBuild

BLOCK_SIZE, LARGEST_BLOCK = 8, 256


class Head(Choice):
    """The heads that join the slots of a block."""

    none = "none", "each slot stands for itself"
    markov = "markov", "a bias from the token before, as DSpark"
    gru = "gru", "a GRU over the block so far, as Domino"
    selector = "selector", "the likeliest tokens scored behind the token before, as DFlash2"
    lattice = "lattice", "a transformer over the likeliest tokens of all slots, as LiLiCorr"


class Reading(Choice):
    """The readings of a block's rows."""

    mask_first = "mask_first", "a row predicts the token at its own position: block_size - 1 drafts, as DFlash"
    anchor_first = "anchor_first", "a row predicts the token behind it: block_size drafts, as DSpark"


class Form(Choice):
    """The ways in which a Markov head reads the token before."""

    vanilla = "vanilla"
    gated = "gated", "by a gate of the hidden row"
    rnn = "rnn", "into a state that it carries"


@dataclass
class BlockDrafterConfig(TrainedDrafterConfig):
    """drafter=dflash: a block of mask tokens in one pass over the target's hidden states."""

    name: str = "dflash"
    weights: Weights = knob(Weights.checkpoint, "where the weights come from")
    head: Head = knob(Head.none, "what joins the slots of a block")
    slots: Reading = knob(Reading.mask_first, "which row of a block predicts which token")
    conv: bool = knob(False, "convolutions within a block, around both halves of every layer")
    window: int | None = knob(None, "context rows that a block sees; null is all, or as the checkpoint says", least=1)
    confidence: bool = knob(False, "a head of its own says how sure it is; drafter.stop and verify.budget read it")
    block_size: int | None = knob(None, "rows of a block of random weights; null is 8", least=2, most=64)
    num_layers: int | None = knob(None, "layers of a body of random weights; null is 2", least=1, most=64)
    head_rank: int | None = knob(None, "width of the factors of a head of random weights; null is 256", least=1)
    head_topk: int | None = knob(
        None, "tokens that a head of random weights scores in a slot; null is 16", least=1, most=256
    )
    markov_form: Form = knob(Form.vanilla, "how a Markov head reads the token before")


@dataclass
class DsparkDrafterConfig(BlockDrafterConfig):
    """drafter=dspark: a Markov head, a draft in every row, and a head for confidence."""

    name: str = "dspark"
    head: Head = Head.markov
    slots: Reading = Reading.anchor_first
    confidence: bool = True


@dataclass
class DominoDrafterConfig(BlockDrafterConfig):
    """drafter=domino: a GRU over the drafts so far."""

    name: str = "domino"
    head: Head = Head.gru


@dataclass
class Dflash2DrafterConfig(BlockDrafterConfig):
    """drafter=dflash2: a selector, and convolutions in the body."""

    name: str = "dflash2"
    head: Head = Head.selector
    conv: bool = True


@dataclass
class LilicorrDrafterConfig(BlockDrafterConfig):
    """drafter=lilicorr: a transformer over the candidates of all slots."""

    name: str = "lilicorr"
    head: Head = Head.lattice


PRESETS: Mapping[str, type[BlockDrafterConfig]] = {
    "dflash": BlockDrafterConfig,
    "dspark": DsparkDrafterConfig,
    "domino": DominoDrafterConfig,
    "dflash2": Dflash2DrafterConfig,
    "lilicorr": LilicorrDrafterConfig,
}
OF_RANDOM_WEIGHTS = ("block_size", "num_layers", "head_rank", "head_topk")


def weights_or_random(config: RunConfig) -> str | None:
    """A checkpoint says its own sizes, and random weights lie nowhere."""
    options: Any = config.drafter
    if options.weights == Weights.random:
        return path_beside_random_weights(options)
    given = [name for name in OF_RANDOM_WEIGHTS if getattr(options, name) is not None]
    if not given:
        return DrafterWeights(zoo_folders(options.name)).missing(config)
    return (
        f"drafter.{given[0]}={getattr(options, given[0])} is read with drafter.weights=random only, since a checkpoint "
        "has its own; leave it out"
    )


def steps_are_replayed(config: RunConfig) -> str | None:
    """Nothing but picks is left behind the pass, so no step has metadata that the host could rebuild."""
    if config.graph.name != "step_replay":
        return None
    return (
        f"drafter={config.drafter.name} drafts a block in one pass, so graph=step_replay has no draft step to replay; "
        "use graph=full_loop, or graph=split_seed for a graph of the head alone"
    )


def accepted_rows_are_counted(config: RunConfig) -> str | None:
    """How many rows were accepted is not known to a host that replays the step which writes them."""
    if config.prune.catchup == "none" or config.graph.name == "eager":
        return None
    return (
        f"prune.catchup={config.prune.catchup} gathers the accepted rows of drafter={config.drafter.name}, whose "
        f"number the host does not read with graph={config.graph.name}; use prune.catchup=none or graph=eager"
    )


def block_has_room(config: RunConfig) -> str | None:
    """A block of random weights holds as many drafts as its rows; of a checkpoint, its config.json says how many."""
    options: Any = config.drafter
    if options.weights != Weights.random:
        return None
    size = options.block_size or BLOCK_SIZE
    most = size - (options.slots == Reading.mask_first)
    if options.num_draft_tokens <= most:
        return None
    return (
        f"drafter.num_draft_tokens={options.num_draft_tokens} is more than the {most} drafts of a block of {size} rows "
        f"with drafter.slots={options.slots}; use drafter.num_draft_tokens={most} or a larger drafter.block_size"
    )


def form_is_read(config: RunConfig) -> str | None:
    """A Markov form without a Markov head says nothing."""
    options: Any = config.drafter
    if options.markov_form == Form.vanilla or options.head == Head.markov:
        return None
    return (
        f"drafter.markov_form={options.markov_form} is read with drafter.head=markov only, and drafter.head="
        f"{options.head}; leave it out"
    )


def rows_written(config: RunConfig) -> int:
    """Count the rows that a round writes behind L: verify's, and a block behind the last of them."""
    options: Any = config.drafter
    size = options.block_size or BLOCK_SIZE
    if options.weights != Weights.random:
        from spec_lab.checkpoints.block_layouts import read_block_file

        folder = DrafterWeights(zoo_folders(options.name)).folder(config, options)
        size = read_block_file(folder).fields.integer("block_size", least=2, most=LARGEST_BLOCK)
    return int(options.num_draft_tokens) + 1 + size


def load(chosen: Chosen, options: BlockDrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Read the drafter, or make one of random weights; the factory then makes one an engine around it."""
    from spec_lab.core.types import FeatureSpec
    from spec_lab.drafters.block import BlockDrafter
    from spec_lab.models.blocks.model import BlockModel
    from spec_lab.wiring.caches import build_cache
    from spec_lab.wiring.drafting import make_picker

    config, tensors = read_block(chosen, options, build)
    target = build.target
    model = BlockModel(
        config,
        tensors,
        target.embedding,
        target.head_weight,
        build.backend,
        target.num_positions,
        build.kernels.products,
    )
    features = FeatureSpec(layer_inputs=tuple(tap.layer_input for tap in config.taps))

    def make(resources: DrafterResources) -> Drafter[Any]:
        cache = build_cache(config.body.layers, resources.limits, build)
        says_itself = options.confidence and model.confidence is not None
        asked = replace(resources, confidences=None) if says_itself else resources
        return BlockDrafter(
            options.num_draft_tokens,
            model,
            features,
            cache,
            build.backend,
            resources.prune,
            make_picker(chosen, options, build, asked),
            build.kernels,
            resources.confidences if says_itself else None,
        )

    return make


def read_block(
    chosen: Chosen, options: BlockDrafterConfig, build: DrafterBuild
) -> tuple[BlockConfig, dict[str, torch.Tensor]]:
    """Read the config and the tensors; UserError where they do not belong to the target."""
    from spec_lab.checkpoints.block_checkpoint import load_block
    from spec_lab.checkpoints.random_blocks import random_block

    target = build.target.config
    if options.weights == Weights.random:
        config, tensors = random_block(target, _parts(options), build.dtype, build.device, chosen.config.seed + 1)
    else:
        config, tensors = load_block(chosen.drafter_folder, target, build.dtype, build.device)
        refuse_other_parts(config, options, str(chosen.drafter_folder))
    return _with_window(config, options.window), tensors


def refuse_other_parts(config: BlockConfig, options: BlockDrafterConfig, source: str) -> None:
    """The parts that a run names are those of its checkpoint: another reading costs acceptance, and raises no error."""
    has = {
        "head": config.head.kind.value,
        "slots": config.slots.name,
        "conv": config.conv is not None,
    }
    wrong = [f"drafter.{name}={str(value).lower()}" for name, value in has.items() if getattr(options, name) != value]
    if wrong:
        raise UserError(
            f"{source}: the checkpoint is not what drafter={options.name} says; use {' '.join(wrong)}, or set "
            "drafter.path to another one"
        )
    most = config.slots.most_drafts
    if options.num_draft_tokens > most:
        raise UserError(
            f"{source}: drafter.num_draft_tokens={options.num_draft_tokens} is more than the {most} drafts of its "
            f"block of {config.block_size} rows; use drafter.num_draft_tokens={most}"
        )


def _parts(options: BlockDrafterConfig) -> BlockParts:
    """Return what random weights are made for."""
    from spec_lab.checkpoints.block_config import Slots
    from spec_lab.checkpoints.block_heads import HeadKind, MarkovForm
    from spec_lab.checkpoints.random_blocks import BlockParts

    parts = BlockParts(
        head=HeadKind(options.head.value),
        slots=Slots(options.slots.value),
        conv=options.conv,
        confidence=options.confidence,
        block_size=options.block_size or BLOCK_SIZE,
        form=MarkovForm(options.markov_form.value),
    )
    given: dict[str, Any] = {"num_layers": options.num_layers, "rank": options.head_rank, "topk": options.head_topk}
    return replace(parts, **{name: value for name, value in given.items() if value is not None})


def _with_window(config: BlockConfig, window: int | None) -> BlockConfig:
    """Let a block see no more than the newest `window` rows of context."""
    if window is None:
        return config
    layers = tuple(replace(plan, window=min(window, plan.window or window)) for plan in config.body.layers)
    return replace(config, body=replace(config.body, layers=layers))


ROWS = tuple(
    DrafterOption(
        name=name,
        schema=schema,
        load=load,
        refusals=(weights_or_random, block_has_room, form_is_read, steps_are_replayed, accepted_rows_are_counted),
        folder=DrafterWeights(zoo_folders(name)).folder,
        no_moves="drafts a block in one pass",
        notes_confidence=True,
        ingests_in_graphs=True,
        preset_of=None if name == "dflash" else "dflash",
        rows_written=rows_written,
    )
    for name, schema in PRESETS.items()
)
