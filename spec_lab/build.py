"""From a configuration to parts. The only place where an option's name chooses a class."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spec_lab.acceptance.distribution import SamplingParams
from spec_lab.acceptance.draft_sampling import DraftLogits
from spec_lab.acceptance.noise import SlotSeeds
from spec_lab.acceptance.phase import RelaxationPhase, RoundPhase, ThinkingMarkers, TokenPhase
from spec_lab.acceptance.rejection import METHODS, RejectionAcceptance
from spec_lab.acceptance.relaxed import DeltaForm, RatioForm, RelaxedThinkingAcceptance
from spec_lab.acceptance.strict import StrictAcceptance
from spec_lab.acceptance.synthetic import SyntheticAcceptance, expand_mean_length
from spec_lab.attention.torch_backend import TorchAttention
from spec_lab.config import (
    AcceptanceConfig,
    DrafterConfig,
    Eagle3DrafterConfig,
    NgramDrafterConfig,
    NoDrafterConfig,
    PruneConfig,
    RejectionConfig,
    RelaxedThinkingConfig,
    RunConfig,
    SyntheticConfig,
)
from spec_lab.core.protocols import AcceptanceRule, AttentionBackend, Drafter, GraphMode, PrunePolicy
from spec_lab.core.types import Request
from spec_lab.drafters.eagle3 import Eagle3Drafter
from spec_lab.drafters.history import TokenHistory
from spec_lab.drafters.ngram import NgramDrafter
from spec_lab.drafters.none import NoDrafter
from spec_lab.drafters.oracle import OracleDrafter
from spec_lab.drafters.picking import DraftPicker, GreedyPicker, SamplingPicker
from spec_lab.drafters.random import RandomDrafter
from spec_lab.engine.engine import Engine
from spec_lab.engine.graphs import EagerGraph
from spec_lab.engine.kv_cache import NUM_RESERVED_PAGES, PageAllocator, PagedKVCache, PageTable
from spec_lab.engine.round import Parts
from spec_lab.engine.scheduler import Scheduler
from spec_lab.engine.slots import SlotState
from spec_lab.engine.timing import make_timer
from spec_lab.models.checkpoint import decoder_tensor_shapes, load_tensors
from spec_lab.models.config import ModelConfig, read_model_config
from spec_lab.models.decoder import DecoderTarget
from spec_lab.models.eagle3 import Eagle3Head
from spec_lab.models.eagle3_checkpoint import default_tap_layer_inputs, load_eagle3
from spec_lab.pruning.policy import CATCHUP_PRUNING, PROMPT_PRUNING
from spec_lab.workloads.example import THINK_END, THINK_START
from spec_lab.workloads.tokenizer import TargetTokenizer

ZOO = Path(__file__).parent / "zoo"
UNPRUNED = PruneConfig(name="none", prefill="all_rows", catchup="none")


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of an engine's caches.

    Attributes:
        max_seq_len: longest prompt plus output.
        margin: positions past it that a round may write (2K).
    """

    num_slots: int
    max_seq_len: int
    margin: int
    page_size: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class Models:
    """What is loaded once and shared by every engine of a run.

    Attributes:
        markers: of the thinking phase; None when the tokenizer has none.
    """

    target: DecoderTarget
    backend: AttentionBackend
    device: torch.device
    dtype: torch.dtype
    markers: ThinkingMarkers | None = None


@dataclass(frozen=True, slots=True)
class DrafterResources:
    """What one engine has for its drafter."""

    limits: Limits
    prune: PrunePolicy
    picker: DraftPicker


DrafterFactory = Callable[[DrafterResources], Drafter[Any]]


def target_folder(config: RunConfig) -> Path:
    """Where the target's checkpoint lies."""
    return ZOO / "pocket" if config.target.path is None else Path(config.target.path)


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device={name}: this torch sees no CUDA device; use device=cpu")
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def engine_limits(config: RunConfig, requests: list[Request], num_draft_tokens: int) -> Limits:
    """Sizes that hold `batch_size` of the longest requests, unless the cache group says otherwise."""
    longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
    max_seq_len = config.cache.max_seq_len or longest
    margin = 2 * num_draft_tokens
    page_size = config.cache.page_size
    num_slots = min(config.batch_size, len(requests))
    pages_each = -(-(max_seq_len + margin) // page_size)
    num_pages = config.cache.num_pages or pages_each * num_slots + NUM_RESERVED_PAGES
    return Limits(num_slots, max_seq_len, margin, page_size, num_pages)


def thinking_markers(tokenizer: TargetTokenizer) -> ThinkingMarkers | None:
    """The ids of the thinking markers, None when the tokenizer does not have both."""
    begin, end = tokenizer.special_id(THINK_START), tokenizer.special_id(THINK_END)
    return None if begin is None or end is None else ThinkingMarkers(begin, end)


def load_models(config: RunConfig, max_seq_len: int, markers: ThinkingMarkers | None = None) -> Models:
    """Load the target; ValueError when the checkpoint is not what it should be or too short for `max_seq_len`."""
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    folder = target_folder(config)
    model_config = read_model_config(folder)
    if max_seq_len > model_config.max_position_embeddings:
        raise ValueError(
            f"sequences of {max_seq_len} tokens are longer than the target's {model_config.max_position_embeddings} "
            "positions; lower max_new_tokens, cache.max_seq_len, or use shorter prompts"
        )
    # Draft positions may pass the end; they are clamped onto the last row of the table.
    max_positions = min(model_config.max_position_embeddings, max_seq_len + 2 * 16)
    backend = ATTENTION[config.attention.name](config.cache.page_size, max_positions)
    tensors = load_tensors(folder, decoder_tensor_shapes(model_config), dtype, device)
    return Models(DecoderTarget(model_config, tensors, backend, max_positions), backend, device, dtype, markers)


def load_drafter(config: RunConfig, models: Models) -> DrafterFactory:
    """Load the drafter's weights; the factory then makes one drafter an engine around them."""
    return DRAFTERS[config.drafter.name](config, config.drafter, models)


def build_prune_policy(config: PruneConfig) -> PrunePolicy:
    return PrunePolicy(PROMPT_PRUNING[config.prefill](), CATCHUP_PRUNING[config.catchup]())


def build_engine(config: RunConfig, models: Models, make_drafter: DrafterFactory, limits: Limits) -> Engine:
    """An engine with caches of its own."""
    prune = build_prune_policy(config.prune)
    seeds = SlotSeeds(limits.num_slots, config.seed, models.device)
    rule = ACCEPTANCE[config.acceptance.name](config, config.acceptance, models, limits, seeds)
    picker = build_picker(config, models, limits, seeds)
    drafter = make_drafter(DrafterResources(limits, prune, picker))
    assert limits.margin >= 2 * drafter.num_draft_tokens
    table = PageTable(limits.num_slots, limits.max_seq_len + limits.margin, limits.page_size, models.device)
    parts = Parts(
        target=models.target,
        drafter=drafter,
        rule=rule,
        backend=models.backend,
        cache=build_cache(models.target.config, models.target.config.num_layers, limits, models),
        slots=SlotState(limits.num_slots, drafter.num_draft_tokens, table),
        timer=make_timer(models.device),
        picker=picker,
    )
    allocator = PageAllocator(limits.num_pages)
    scheduler = Scheduler(limits.num_slots, allocator, limits.page_size, limits.max_seq_len, limits.margin)
    return Engine(parts, prune, GRAPH[config.graph.name](), scheduler, config.cache.prefill_chunk)


def build_cache(shape: ModelConfig, num_layers: int, limits: Limits, models: Models) -> PagedKVCache:
    return PagedKVCache(
        num_layers, limits.num_pages, limits.page_size, shape.num_kv_heads, shape.head_dim, models.dtype, models.device
    )


def plain_config(config: RunConfig) -> RunConfig:
    """The same run without drafter, pruning and lossy acceptance: what every run is compared with."""
    is_greedy = config.sampling.temperature == 0
    rule = AcceptanceConfig(name="strict") if is_greedy else RejectionConfig(method="one_hot")
    return dataclasses.replace(config, drafter=NoDrafterConfig(), acceptance=rule, prune=UNPRUNED)


def unpruned_config(config: RunConfig) -> RunConfig:
    """The same run without pruning."""
    return dataclasses.replace(config, prune=UNPRUNED)


def _load_none(config: RunConfig, options: DrafterConfig, models: Models) -> DrafterFactory:
    return lambda resources: NoDrafter()


def _load_random(config: RunConfig, options: DrafterConfig, models: Models) -> DrafterFactory:
    vocab_size = models.target.vocab_size
    return lambda resources: RandomDrafter(options.num_draft_tokens, vocab_size, config.seed, models.device)


def _history(resources: DrafterResources, models: Models) -> TokenHistory:
    limits = resources.limits
    return TokenHistory(limits.num_slots, limits.max_seq_len + limits.margin + 1, models.device)


def _load_oracle(config: RunConfig, options: DrafterConfig, models: Models) -> DrafterFactory:
    return lambda resources: OracleDrafter(options.num_draft_tokens, _history(resources, models))


def _load_ngram(config: RunConfig, options: NgramDrafterConfig, models: Models) -> DrafterFactory:
    sizes = options.max_ngram, options.min_ngram
    return lambda resources: NgramDrafter(options.num_draft_tokens, *sizes, _history(resources, models))


def _load_eagle3(config: RunConfig, options: Eagle3DrafterConfig, models: Models) -> DrafterFactory:
    target = models.target
    folder = _head_folder(config, options)
    head_config, tensors = load_eagle3(folder, target.config, models.dtype, models.device)
    taps = head_config.tap_layer_inputs or default_tap_layer_inputs(target.config.num_layers)
    head = Eagle3Head(head_config, tensors, target.embedding, target.head_weight, models.backend, target.num_positions)

    def make(resources: DrafterResources) -> Drafter[Any]:
        cache = build_cache(head_config.layer, 1, resources.limits, models).layers[0]
        return Eagle3Drafter(
            options.num_draft_tokens, head, taps, cache, models.backend, resources.prune, resources.picker
        )

    return make


def _head_folder(config: RunConfig, options: Eagle3DrafterConfig) -> Path:
    if options.path is not None:
        return Path(options.path)
    if config.target.name != "pocket":
        raise ValueError(f"no {options.name} head is shipped for target={config.target.name}; set drafter.path=FOLDER")
    return ZOO / f"pocket-{options.name}"


def build_picker(config: RunConfig, models: Models, limits: Limits, seeds: SlotSeeds) -> DraftPicker:
    """How the drafter picks tokens. Without `drafter.draft_sampling` there is one way."""
    options = config.drafter
    if getattr(options, "draft_sampling", "greedy") == "greedy":
        return GreedyPicker()
    num_draft_tokens = options.num_draft_tokens
    kept = DraftLogits(limits.num_slots, num_draft_tokens, models.target.vocab_size, models.device)
    return SamplingPicker(config.sampling.temperature, seeds, kept, num_draft_tokens)


def _strict(
    config: RunConfig, options: AcceptanceConfig, models: Models, limits: Limits, seeds: SlotSeeds
) -> AcceptanceRule:
    return StrictAcceptance()


def _relaxed_thinking(
    config: RunConfig, options: RelaxedThinkingConfig, models: Models, limits: Limits, seeds: SlotSeeds
) -> AcceptanceRule:
    markers = models.markers
    if markers is None:
        raise ValueError(
            f"acceptance=relaxed_thinking needs {THINK_START} and {THINK_END} as tokens, and this target's tokenizer "
            "has none; use acceptance=strict"
        )
    form = DeltaForm(options.delta) if options.form == "delta" else RatioForm(options.ratio)
    phase: RelaxationPhase = (
        TokenPhase(limits.num_slots, markers, models.target.eos_token_ids, models.device)
        if options.phase == "token"
        else RoundPhase(limits.num_slots, markers, config.cache.prefill_chunk, models.device)
    )
    return RelaxedThinkingAcceptance(form, options.topk, phase)


def _rejection(
    config: RunConfig, options: RejectionConfig, models: Models, limits: Limits, seeds: SlotSeeds
) -> AcceptanceRule:
    sampling = SamplingParams(config.sampling.temperature, config.sampling.top_k, config.sampling.top_p)
    return RejectionAcceptance(METHODS[options.method], sampling, seeds)


def _synthetic(
    config: RunConfig, options: SyntheticConfig, models: Models, limits: Limits, seeds: SlotSeeds
) -> AcceptanceRule:
    num_draft_tokens = config.drafter.num_draft_tokens
    rates = options.rates
    if rates is None:
        assert options.mean_length is not None
        rates = list(expand_mean_length(options.mean_length, num_draft_tokens))
    return SyntheticAcceptance(rates, seeds, models.device)


DRAFTERS: Mapping[str, Callable[..., DrafterFactory]] = {
    "none": _load_none,
    "eagle3": _load_eagle3,
    "ngram": _load_ngram,
    "oracle": _load_oracle,
    "random": _load_random,
}
ACCEPTANCE: Mapping[str, Callable[..., AcceptanceRule]] = {
    "strict": _strict,
    "relaxed_thinking": _relaxed_thinking,
    "rejection": _rejection,
    "synthetic": _synthetic,
}
ATTENTION: Mapping[str, Callable[[int, int], AttentionBackend]] = {"torch": TorchAttention}
GRAPH: Mapping[str, Callable[[], GraphMode]] = {"eager": EagerGraph}
