"""Loads block drafters, for a chain or a tree of drafts, once a run has chosen one (`options.drafters.blocks`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from spec_lab.acceptance.confidences import DraftConfidences
from spec_lab.checkpoints.block_checkpoint import load_block, without_head
from spec_lab.checkpoints.block_config import BlockConfig, Slots
from spec_lab.checkpoints.block_heads import HeadKind, MarkovForm
from spec_lab.checkpoints.random_blocks import BlockParts, random_block
from spec_lab.core.errors import UserError
from spec_lab.core.types import FeatureSpec
from spec_lab.drafters.block import BlockDrafter, BlockPass, BlockTreeDrafter
from spec_lab.drafters.block_context import ContextPass
from spec_lab.menu.choices import Weights
from spec_lab.menu.chosen import Chosen
from spec_lab.menu.config import RunConfig
from spec_lab.menu.readings import Aspect, Reading
from spec_lab.models.blocks.model import BlockModel
from spec_lab.options.drafters.block_keys import BLOCK_SIZE, BlockDrafterConfig, Form, Head, fewer_drafts
from spec_lab.wiring.caches import build_cache
from spec_lab.wiring.drafting import (
    DrafterFactory,
    DrafterResources,
    build_siblings,
    build_tree_shape,
    make_picker,
    refuse_few_tokens,
    shape_of_engine,
)
from spec_lab.wiring.models import DrafterBuild

log = logging.getLogger(__name__)

PassMaker = Callable[[DrafterResources], BlockPass]


def load_chain(chosen: Chosen, options: BlockDrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Load a drafter of chains. With drafter.confidence=true its confidences are those of the confidence head."""
    return _chain(chosen, options, build, *read_block(chosen, options, build))


def _chain(
    chosen: Chosen,
    options: BlockDrafterConfig,
    build: DrafterBuild,
    config: BlockConfig,
    tensors: Mapping[str, torch.Tensor],
) -> DrafterFactory:
    """Make drafters of chains with weights that have already been read."""
    model, make_pass = _pass(chosen, options, build, config, tensors)
    own_head = model.confidence if options.confidence else None

    def make(resources: DrafterResources) -> BlockDrafter:
        noted: DraftConfidences | None = None if own_head is None else resources.confidences
        asked = resources if own_head is None else replace(resources, confidences=None)
        picker = make_picker(chosen, options, build, asked)
        return BlockDrafter(make_pass(resources), picker, resources.span, own_head, noted)

    return make


def load_tree(chosen: Chosen, options: BlockDrafterConfig, build: DrafterBuild) -> DrafterFactory:
    """Load a drafter of trees."""
    config, tensors = read_block(chosen, options, build)
    _, make_pass = _pass(chosen, options, build, config, tensors)
    return tree_factory(chosen, build, make_pass, config.head.num_candidates or config.draft_vocab_size)


def tree_factory(chosen: Chosen, build: DrafterBuild, make_pass: PassMaker, num_scored: int) -> DrafterFactory:
    """Make drafters of trees from a pass whose head scores `num_scored` tokens for each slot."""
    shape = build_tree_shape(chosen, build)
    refuse_few_tokens(shape.topk, num_scored)

    def make(resources: DrafterResources) -> BlockTreeDrafter:
        siblings = build_siblings(chosen, build, resources, shape)
        grown = shape_of_engine(chosen, shape, resources)
        return BlockTreeDrafter(make_pass(resources), grown, siblings, resources.span)

    return make


def _pass(
    chosen: Chosen,
    options: BlockDrafterConfig,
    build: DrafterBuild,
    config: BlockConfig,
    tensors: Mapping[str, torch.Tensor],
) -> tuple[BlockModel, PassMaker]:
    """Make the model, and a function that makes its pass for each engine."""
    model = build.beside_target(BlockModel, config, tensors)
    features = FeatureSpec(layer_inputs=tuple(tap.layer_input for tap in config.taps))

    def make(resources: DrafterResources) -> BlockPass:
        cache = build_cache(config.body.layers, resources.limits, build)
        return ContextPass(
            options.num_draft_tokens,
            model,
            features,
            cache,
            build.backend,
            resources.prune,
            resources.span,
            build.kernels,
            host_waits=not chosen.graph.captures,
        )

    return model, make


def read_block(
    chosen: Chosen, options: BlockDrafterConfig, build: DrafterBuild
) -> tuple[BlockConfig, dict[str, torch.Tensor]]:
    """Read the config and the tensors, or make random ones; UserError if a checkpoint does not fit the target or the
    options."""
    target = build.target.config
    if options.weights == Weights.random:
        config, tensors = random_block(target, _parts(options), build.dtype, build.device, chosen.config.seed + 1)
    else:
        config, tensors = load_block(chosen.drafter_folder, target, build.dtype, build.device)
        refuse_other_parts(config, options, str(chosen.drafter_folder), chosen.config)
        if options.head == Head.none and config.head.kind != HeadKind.none:
            kind = config.head.kind
            log.info("%s: its head is left out; drafter.head=%s drafts with it", chosen.drafter_folder, kind)
            config, tensors = without_head(config, tensors)
    return replace(config, most_context=options.window), tensors


def aspects(chosen: Chosen, options: BlockDrafterConfig, build: DrafterBuild) -> list[Aspect]:
    """List the one choice in reading a block drafter, the attention window, with its alternative."""
    config, tensors = read_block(chosen, options, build)
    windows = {window for plan in config.body.layers if (window := config.window_of(plan)) is not None}
    if not windows:
        return [Aspect("attention window", "all keys", [])]
    # A window as long as any text hides no key. With no window at all, a layer that is causal because it has a window
    # would not be causal.
    longest = build.target.num_positions
    layers = tuple(replace(plan, window=plan.window and longest) for plan in config.body.layers)
    whole = replace(config, body=replace(config.body, layers=layers), most_context=None)
    every_key = Reading("all keys", partial(_chain, chosen, options, build, whole, tensors))
    return [Aspect("attention window", f"{' and '.join(map(str, sorted(windows)))} keys", [every_key])]


def refuse_other_parts(config: BlockConfig, options: BlockDrafterConfig, source: str, run: RunConfig) -> None:
    """Refuse parts that are not the checkpoint's, which would lower acceptance without an error, and too many drafts.

    Only the head and the confidence head may be left out.
    """
    has: dict[str, str | bool] = {
        "head": config.head.kind.value,
        "slots": config.slots.name,
        "conv": config.conv is not None,
    }
    if options.confidence:
        served = without_head(config, {})[0] if options.head == Head.none else config
        has["confidence"] = served.confidence_reads > 0
    if options.markov_form != Form.vanilla:  # vanilla is also the default, so it fits a checkpoint of any form
        has["markov_form"] = getattr(config.head, "form", MarkovForm.vanilla).value
    if options.head == Head.none:
        del has["head"]
    wrong = {name: str(value).lower() for name, value in has.items() if getattr(options, name) != value}
    if wrong:
        words = " ".join(f"drafter.{name}={value}" for name, value in wrong.items())
        raise UserError(
            f"{source}: the checkpoint does not fit drafter={options.name}; use {words}, or set drafter.path to "
            "another one"
        )
    most = config.slots.most_drafts
    if options.num_draft_tokens > most:
        raise UserError(
            f"{source}: drafter.num_draft_tokens={options.num_draft_tokens} is more than the {most} drafts of its "
            f"block of {config.block_size} rows; use {fewer_drafts(run, most)}"
        )


def _parts(options: BlockDrafterConfig) -> BlockParts:
    """Return the parts for which random weights are made."""
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
